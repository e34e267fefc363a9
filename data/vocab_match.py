"""Whether the tokens of two models are the same, so that one can draft for the other.

Verification compares ids, so an id must mean the same text in both. The rules are llama.cpp's
(`common_speculative_are_compatible` in common/speculative.cpp): type, BOS and EOS, size within 128, texts from id 5 on.
vLLM 0.32 asks for something else: the same `vocab_size` (config/speculative.py,
`verify_equal_vocab_size_if_draft_model`), or, with `use_heterogeneous_vocab`, drafts from the tokens that both have
(v1/spec_decode/vocab_mapping.py).
"""

from dataclasses import dataclass
from typing import Any

MAX_SIZE_DIFFERENCE = 128
"""Rows with which the models of a family pad their embedding tables differently."""
FIRST_COMPARED_ID = 5
"""The ids before it are control tokens, whose texts vary between conversions of one model."""
SHOWN = 5
"""Differing tokens that a failure lists."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What of a model's tokenizer matters to drafting for another."""

    type: str
    ids: dict[str, int]
    """Id of each token, as the tokenizer spells it (a space may be `Ġ` or `▁`)."""
    size: int
    """Rows of the embedding table, padding included."""
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    add_bos: bool
    add_eos: bool
    space_prefixes: tuple[str, ...]
    """How a token that begins with a space begins."""


def find_mismatches(target: Vocabulary, draft: Vocabulary) -> list[dict[str, Any]]:
    """Apply every rule.

    Returns:
        For each that fails `rule`, `target` and `draft` (the two values) and `message`; the rule `token_texts` also
        has `differing`, how many, and `first`, some of them.
    """
    failures = [
        _failure(rule, ours, theirs, f"{what}: {ours!r} in the target, {theirs!r} in the draft model")
        for rule, what, ours, theirs in (
            ("type", "type of the vocabulary", target.type, draft.type),
            ("bos_id", "id of BOS", target.bos_id, draft.bos_id),
            ("eos_id", "id of EOS", target.eos_id, draft.eos_id),
            ("add_bos", "BOS is put before a text", target.add_bos, draft.add_bos),
            ("add_eos", "EOS is put behind a text", target.add_eos, draft.add_eos),
        )
        if ours != theirs
    ]
    difference = abs(target.size - draft.size)
    if difference > MAX_SIZE_DIFFERENCE:
        apart = f"{difference} apart, more than {MAX_SIZE_DIFFERENCE}"
        message = f"{target.size} tokens in the target, {draft.size} in the draft model: {apart}"
        failures.append(_failure("size", target.size, draft.size, message))
    return failures + _texts(target, draft)


def _texts(target: Vocabulary, draft: Vocabulary) -> list[dict[str, Any]]:
    ours, theirs = ({number: text for text, number in one.ids.items()} for one in (target, draft))
    common = range(FIRST_COMPARED_ID, min(target.size, draft.size))
    # a row that only pads has no text in either
    differing = [number for number in common if ours.get(number) != theirs.get(number)]
    if not differing:
        return []
    first = [{"id": one, "target": ours.get(one), "draft": theirs.get(one)} for one in differing[:SHOWN]]
    message = (
        f"token {first[0]['id']} is {first[0]['target']!r} in the target, {first[0]['draft']!r} in the draft model; "
        f"{len(differing)} of {len(common)} differ"
    )
    failure = _failure("token_texts", first[0]["target"], first[0]["draft"], message)
    return [{**failure, "differing": len(differing), "first": first}]


def shared_tokens(target: Vocabulary, draft: Vocabulary) -> list[tuple[int, int]]:
    """Target id and draft id of each token that both have, spaces spelled alike; vLLM drafts only these."""
    ours, theirs = _normalized(target), _normalized(draft)
    pairs = ((number, theirs[text]) for text, number in ours.items() if text in theirs)
    return [(one, other) for one, other in pairs if one < target.size and other < draft.size]


def _normalized(vocabulary: Vocabulary) -> dict[str, int]:
    ids: dict[str, int] = {}
    for token, number in vocabulary.ids.items():
        prefix = next((one for one in vocabulary.space_prefixes if token.startswith(one)), None)
        # of two tokens that become the same the first stays, as in vLLM
        ids.setdefault(token if prefix is None else " " + token[len(prefix) :], number)
    return ids


def _failure(rule: str, target: Any, draft: Any, message: str) -> dict[str, Any]:
    return {"rule": rule, "target": target, "draft": draft, "message": message}

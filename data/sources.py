"""Where prompts come from: the built-in set, a JSONL file, a Hugging Face data set; how they are mixed."""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafthead.data.conversations import Conversation, Dropped, content_id, parse_rows, read_conversations
from drafthead.data.errors import InputError
from drafthead.data.files import digest

PROMPTS = Path(__file__).resolve().parent / "prompts"
SELF_WRITTEN = "self_written.jsonl"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Mixed conversations, and what each source was asked for and gave."""

    conversations: list[Conversation]
    requested: list[int | None]
    """Per source: its share of the total as a number, or None without a share."""
    taken: list[int]
    duplicates: int
    """Conversations left out because an equal one was there already."""


def read_source(source: str, *, heldout: bool, split: str) -> tuple[list[Conversation], list[Dropped]]:
    """Read `builtin`, `builtin:self-written`, a file, or a Hugging Face data set.

    Args:
        heldout: Of the built-in set, which half.
        split: Of a Hugging Face data set.

    Raises:
        InputError: The source does not exist or holds nothing usable.
    """
    if source == "builtin" or source.startswith("builtin:"):
        return _read_builtin(source, "heldout" if heldout else "train")
    if looks_like_file(source):
        return read_conversations(Path(source).expanduser(), source)
    return _read_hub(source, split)


def looks_like_file(source: str) -> bool:
    """Whether a source names a file, present or not, rather than a Hugging Face data set."""
    named = source.startswith(("/", ".", "~")) or source.endswith((".jsonl", ".json"))
    return named or Path(source).expanduser().exists()


def _read_builtin(source: str, half: str) -> tuple[list[Conversation], list[Dropped]]:
    folder = PROMPTS / half
    if source == "builtin:self-written":
        return read_conversations(folder / SELF_WRITTEN, source)
    if source != "builtin":
        raise InputError(f"{source}: no such built-in source; there are builtin and builtin:self-written")
    paths = [path for path in sorted(folder.glob("*.jsonl")) if path.name != SELF_WRITTEN]
    if not paths:
        raise InputError(f"{folder}: the built-in prompts are missing; install drafthead again")
    read = [read_conversations(path, source) for path in paths]
    return [one for kept, _ in read for one in kept], [one for _, dropped in read for one in dropped]


def _read_hub(source: str, split: str) -> tuple[list[Conversation], list[Dropped]]:
    rows = _load_dataset(source, split)
    numbered, dropped = parse_rows(((i, _without_nulls(row)) for i, row in enumerate(rows)), source)
    if not numbered:
        reason = dropped[0].reason if dropped else "it has no rows"
        raise InputError(f"{source}: no samples remain, {len(dropped)} rows dropped; the first: {reason}")
    return [conversation for _, conversation in numbered], dropped


def _load_dataset(source: str, split: str) -> Iterator[dict[str, Any]]:
    import datasets
    import httpx2

    try:
        return iter(datasets.load_dataset(source, split=split))
    except (OSError, ValueError, RuntimeError, httpx2.HTTPError, datasets.exceptions.DatasetsError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{source}: neither a file nor a Hugging Face data set with split {split!r} "
            f"that can be loaded ({lines[0][:200]})"
        ) from None


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all the keys that any row has; absent ones come as null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


# ---- mixing ----------------------------------------------------------------------------------------------


def mix(per_source: list[tuple[list[Conversation], int | None, float | None]], total: int | None, seed: int) -> Mixture:
    """Shuffle sources together: (conversations, limit, share of the total) each.

    A source with a share gives that part of `total`, or all it has (`shortfalls` says which); those without divide
    what is left. Of equal conversations only the first stays, and no two keep the same id.

    Raises:
        InputError: Shares without a total, or shares above 1 in all.
    """
    shares = [share for _, _, share in per_source if share is not None]
    if shares and total is None:
        raise InputError("prompts.sources: a share needs prompts.limit, the number that it is a part of")
    if sum(shares) > 1 + 1e-9:
        raise InputError(f"prompts.sources: the shares add up to {sum(shares):g}; at most 1")
    generator = random.Random(seed)
    pools, duplicates = _distinct_pools(per_source)
    for pool in pools:
        generator.shuffle(pool)
    limited = [pool[:limit] for pool, (_, limit, _) in zip(pools, per_source, strict=True)]
    requested = share_out([share for _, _, share in per_source], total or 0)
    picked = _pick(limited, requested, total, generator)
    conversations = [conversation for part in picked for conversation in part]
    generator.shuffle(conversations)
    return Mixture(
        conversations=conversations,
        requested=requested,
        taken=[len(part) for part in picked],
        duplicates=duplicates,
    )


def share_out(shares: list[float | None], total: int) -> list[int | None]:
    """Each share of `total` as a whole number; together they are the rounded sum of the shares, never more than it.

    Rounded down, and what is missing given to the largest remainders.
    """
    exact = [0.0 if share is None else share * total for share in shares]
    numbers = [int(part + 1e-9) for part in exact]
    missing = round(sum(exact)) - sum(numbers)
    by_remainder = sorted(range(len(exact)), key=lambda place: numbers[place] - exact[place])
    for place in by_remainder[:missing]:
        numbers[place] += 1
    return [None if share is None else number for share, number in zip(shares, numbers, strict=True)]


def shortfalls(names: list[str], mixture: Mixture) -> list[str]:
    """A line for each source that gave fewer conversations than its share asks for."""
    return [
        f"{name} gave {taken:,} of the {wanted:,} conversations that its share asks for: the mixture differs from what "
        f"was asked; lower prompts.limit or that share, or raise the source's own limit"
        for name, wanted, taken in zip(names, mixture.requested, mixture.taken, strict=True)
        if wanted is not None and taken < wanted
    ]


def _distinct_pools(
    per_source: list[tuple[list[Conversation], int | None, float | None]],
) -> tuple[list[list[Conversation]], int]:
    contents: set[str] = set()
    ids: set[str] = set()
    pools: list[list[Conversation]] = []
    duplicates = 0
    for conversations, _, _ in per_source:
        pool = []
        for conversation in conversations:
            content = content_id(conversation.messages, conversation.tools)
            if content in contents:
                duplicates += 1
                continue
            contents.add(content)
            if conversation.id in ids:
                conversation = replace(conversation, id=content)
            ids.add(conversation.id)
            pool.append(conversation)
        pools.append(pool)
    return pools, duplicates


def _pick(
    pools: list[list[Conversation]], requested: list[int | None], total: int | None, generator: random.Random
) -> list[list[Conversation]]:
    """Take the shares, then fill up from the sources without one, each in proportion to its size."""
    picked = [pool[:number] if number is not None else [] for pool, number in zip(pools, requested, strict=True)]
    open_pool = [
        (place, conversation)
        for place, number in enumerate(requested)
        if number is None
        for conversation in pools[place]
    ]
    generator.shuffle(open_pool)
    left = None if total is None else max(0, total - sum(number or 0 for number in requested))
    for place, conversation in open_pool[:left]:
        picked[place].append(conversation)
    return picked


# ---- held-out split --------------------------------------------------------------------------------------


def split_heldout(
    conversations: list[Conversation], share: float, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Split into (train, heldout); conversations with the same first user text stay on one side.

    Both sides get at least one where there are two different first texts, and `heldout` no more than its share unless
    every text's conversations are more.

    Raises:
        InputError: `share` is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise InputError(f"prompts.heldout={share:g}: the held-out share lies between 0 and 1")
    groups: dict[str, list[int]] = defaultdict(list)
    for place, conversation in enumerate(conversations):
        groups[digest([seed, first_user_text(conversation)])].append(place)
    heldout = _choose_groups([groups[key] for key in sorted(groups)], max(1, round(share * len(conversations))))
    return (
        [one for place, one in enumerate(conversations) if place not in heldout],
        [one for place, one in enumerate(conversations) if place in heldout],
    )


def _choose_groups(groups: list[list[int]], wanted: int) -> set[int]:
    """Members of groups that add up to `wanted` or less, of the smallest if none fits; never of all groups."""
    fitting: list[list[int]] = []
    room = wanted
    for group in groups:
        if len(group) <= room and len(fitting) < len(groups) - 1:
            fitting.append(group)
            room -= len(group)
    if not fitting and len(groups) > 1:
        fitting = [min(groups, key=len)]
    return {place for group in fitting for place in group}


def first_user_text(conversation: Conversation) -> str:
    """What the conversation begins with, without case and extra spaces; "" where no user speaks."""
    texts = (message["content"] for message in conversation.messages if message["role"] == "user")
    return " ".join(str(next(texts, "")).lower().split())

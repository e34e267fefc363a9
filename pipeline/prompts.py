"""Prompts: the conversations that the target will answer, mixed from their sources, and a held-out set.

    drafthead prompts runs/eagle3

Source `self` lets the target write its own prompts (the Magpie method, Xu et al. 2024): the chat template is rendered
up to the empty user turn, and the target samples what a user would say there.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.data.conversations import Conversation, content_id
from drafthead.data.errors import InputError
from drafthead.data.files import append_jsonl, read_partial_jsonl, write_json, write_jsonl
from drafthead.data.sources import first_user_text, mix, read_source, shortfalls, split_heldout
from drafthead.data.template import Template
from drafthead.eval.engine import Request
from drafthead.pipeline.progress import progress
from drafthead.pipeline.recipe import PromptsConfig, SourceConfig
from drafthead.pipeline.respond import open_engine
from drafthead.pipeline.run_dir import Run

SELF = "self"
DEFAULT_SELF_PROMPTS = 2000
USER_MARK = "\x00user text\x00"
MIN_CHARS = 12


def collect_prompts(run: Run) -> dict[str, Any]:
    """Write `train.jsonl` and `heldout.jsonl`."""
    settings = run.recipe.prompts
    dropped: Counter[str] = Counter()
    heldout: list[Conversation] = []
    if not isinstance(settings.heldout, float):
        heldout_pools = [
            (_read(run, source, settings, dropped, heldout=True), source.limit, source.share)
            for source in settings.heldout
        ]
        heldout = spread(mix(heldout_pools, None, run.recipe.run.seed).conversations, settings.heldout_limit)
    pools = []
    for source in settings.sources:
        read = _read(run, source, settings, dropped, heldout=False)
        kept, repeated = without_heldout(read, heldout)  # before the mixing, so that shares are met
        dropped.update({"also held out": repeated} if repeated else {})
        pools.append((kept, source.limit, source.share))
    mixture = mix(pools, settings.limit, run.recipe.run.seed)
    names = [source.source for source in settings.sources]
    warnings = shortfalls(names, mixture)
    for warning in warnings:
        print(f"WARNING: prompts: {warning}", file=sys.stderr)
    train = mixture.conversations
    if isinstance(settings.heldout, float):
        train, heldout = split_heldout(train, settings.heldout, run.recipe.run.seed)
        split_off, heldout = len(heldout), spread(heldout, settings.heldout_limit)
        dropped.update({"beyond prompts.heldout_limit": split_off - len(heldout)} if split_off > len(heldout) else {})
    if not train or not heldout:
        raise InputError(f"prompts: {len(train)} training and {len(heldout)} held-out prompts; both are needed")
    folder = run.folder("prompts")
    for name, conversations in (("train", train), ("heldout", heldout)):
        write_jsonl(folder / f"{name}.jsonl", (_as_json(one) for one in conversations))
    report = {
        "train": len(train),
        "heldout": len(heldout),
        "domains": dict(Counter(one.domain for one in train)),
        "sources": _added(names, mixture.taken),
        "requested": _added(names, [number or 0 for number in mixture.requested]),
        "warnings": warnings,
        "duplicates": mixture.duplicates,
        "dropped": dict(dropped),
    }
    write_json(folder / "report.json", report)
    return report


def file_hashes(run: Run) -> dict[str, str]:
    """Contents of the user's prompt files: other contents are another stage output."""
    sources = [*run.recipe.prompts.sources]
    if not isinstance(run.recipe.prompts.heldout, float):
        sources += run.recipe.prompts.heldout
    paths = {source.source: Path(source.source).expanduser() for source in sources}
    found = {name: _hash(path) for name, path in paths.items() if path.is_file()}
    return found | _builtin_hashes({source.source for source in sources})


def without_heldout(train: list[Conversation], heldout: list[Conversation]) -> tuple[list[Conversation], int]:
    """Remove training prompts whose first user text is held out; returns the rest and how many went."""
    taken = {first_user_text(one) for one in heldout}
    kept = [one for one in train if first_user_text(one) not in taken]
    return kept, len(train) - len(kept)


def spread(conversations: list[Conversation], limit: int | None) -> list[Conversation]:
    """At most `limit` conversations, taken from the domains in turn."""
    if limit is None or limit >= len(conversations):
        return conversations
    by_domain: dict[str, list[Conversation]] = {}
    for one in conversations:
        by_domain.setdefault(one.domain, []).append(one)
    queues = [by_domain[domain] for domain in sorted(by_domain)]
    rounds = max(len(queue) for queue in queues)
    return [queue[place] for place in range(rounds) for queue in queues if place < len(queue)][:limit]


def _read(
    run: Run, source: SourceConfig, settings: PromptsConfig, dropped: Counter[str], *, heldout: bool
) -> list[Conversation]:
    if source.source == SELF:
        conversations = write_own_prompts(run, source.limit or DEFAULT_SELF_PROMPTS, dropped)
    else:
        conversations, left_out = read_source(source.source, heldout=heldout, split=source.split)
        dropped.update(one.reason for one in left_out)
    spoken = [one for one in conversations if any(message["role"] == "user" for message in one.messages)]
    kept = [one for one in spoken if _num_chars(one) <= settings.max_prompt_chars]
    left = {
        "no user message": len(conversations) - len(spoken),
        "longer than prompts.max_prompt_chars": len(spoken) - len(kept),
    }
    dropped.update({reason: count for reason, count in left.items() if count})
    return kept


# ---- prompts that the target writes ----------------------------------------------------------------------


def write_own_prompts(run: Run, count: int, dropped: Counter[str]) -> list[Conversation]:
    """Let the target write user turns until `count` have been sampled; what is not usable is counted in `dropped`."""
    settings = run.recipe.prompts.self_written
    path = run.folder("prompts") / "self.part.jsonl"
    prompt_ids = user_turn_ids(Template.load(run.target.path, template_kwargs=run.recipe.encode.template_kwargs))
    done = {row["key"]: SelfSample(**row) for row in read_partial_jsonl(path)}
    todo = [key for key in (f"self-{number:06d}" for number in range(count)) if key not in done]
    if todo:
        requests = [
            Request(
                key=key,
                prompt_ids=prompt_ids,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
            )
            for key in todo
        ]
        # another seed after each kill, or the rest would repeat what is there
        engine = open_engine(run, seed=run.recipe.run.seed + 1 + len(done))
        with (
            engine,
            append_jsonl(path) as append,
            progress(count, "self-written prompts", "prompt", len(done)) as bar,
        ):
            for result in engine.generate(requests):
                text = run.target.tokenizer.decode(result.token_ids, skip_special_tokens=True)
                done[result.key] = SelfSample(key=result.key, text=text, finish_reason=result.finish_reason)
                append(vars(done[result.key]))
                bar.update()
    return [
        Conversation(
            id=content_id([{"role": "user", "content": text}], None),
            source=SELF,
            domain="self-written",
            messages=[{"role": "user", "content": text}],
            tools=None,
        )
        for text in usable_texts((done[key] for key in sorted(done)), dropped)
    ]


@dataclass(frozen=True, kw_only=True)
class SelfSample:
    """One sampled user turn."""

    key: str
    text: str
    finish_reason: str


def usable_texts(samples: Iterator[SelfSample], dropped: Counter[str]) -> Iterator[str]:
    """Texts that ended by themselves, are not too short and did not come before."""
    seen: set[str] = set()
    for sample in samples:
        text = sample.text.strip()
        plain = " ".join(text.lower().split())
        if sample.finish_reason != "stop":
            dropped["self-written: cut at max_new_tokens"] += 1
        elif len(text) < MIN_CHARS:
            dropped["self-written: too short"] += 1
        elif plain in seen:
            dropped["self-written: repeated"] += 1
        else:
            seen.add(plain)
            yield text


def user_turn_ids(template: Template) -> list[int]:
    """The chat template rendered up to the place where the user's text begins.

    Raises:
        InputError: The template rewrites the user's text, so that its place cannot be found.
    """
    text = template.render([{"role": "user", "content": USER_MARK}], None, add_generation_prompt=False)
    before, found, _ = text.partition(USER_MARK)
    if not found:
        raise InputError("prompts: source self: the chat template does not show the user's text as it is")
    return template.tokenize(before)


# ---- small things ----------------------------------------------------------------------------------------


def _as_json(one: Conversation) -> dict[str, Any]:
    row: dict[str, Any] = {"id": one.id, "source": one.source, "domain": one.domain, "messages": one.messages}
    return row | ({"tools": one.tools} if one.tools else {})


def _num_chars(one: Conversation) -> int:
    return sum(len(message["content"]) for message in one.messages)


def _added(names: list[str], numbers: list[int]) -> dict[str, int]:
    """Numbers by name; a name that comes twice has the sum."""
    found: Counter[str] = Counter()
    for name, number in zip(names, numbers, strict=True):
        found[name] += number
    return dict(found)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _builtin_hashes(names: set[str]) -> dict[str, str]:
    from drafthead.data.sources import PROMPTS

    if not any(name.startswith("builtin") for name in names):
        return {}
    paths = sorted(PROMPTS.glob("*/*.jsonl"))  # a file beside the folders is no part of the set
    return {"builtin": hashlib.sha256("".join(_hash(path) for path in paths).encode()).hexdigest()}

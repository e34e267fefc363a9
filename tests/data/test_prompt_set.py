"""The built-in prompt set: large, varied, and with a held-out half that shares nothing with the training half."""

import json
from collections import Counter
from pathlib import Path

import pytest
from drafthead.data.sources import PROMPTS, SELF_WRITTEN

DOMAINS = sorted(path.stem for path in (PROMPTS / "train").glob("*.jsonl") if path.name != SELF_WRITTEN)
REQUIRED = {"code", "math", "rewriting", "extraction", "translation", "questions", "multiturn"}


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def texts(half: str, domain: str) -> list[str]:
    return ["\n".join(row["turns"]) for row in read(PROMPTS / half / f"{domain}.jsonl")]  # type: ignore[arg-type]


def words(text: str) -> list[str]:
    return text.lower().split()


def runs(text: str, length: int) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[i : i + length]) for i in range(len(found) - length + 1)}


def test_there_are_enough_prompts_over_enough_domains() -> None:
    counts = {domain: len(texts("train", domain)) for domain in DOMAINS}
    assert set(DOMAINS) >= REQUIRED
    assert len(DOMAINS) >= 8
    assert sum(counts.values()) >= 1500, counts
    assert min(counts.values()) >= 100, counts


@pytest.mark.parametrize("domain", [*DOMAINS, "self_written"])
def test_rows_are_whole_and_ids_unique(domain: str) -> None:
    rows = [row for half in ("train", "heldout") for row in read(PROMPTS / half / f"{domain}.jsonl")]
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["domain"] for row in rows} == {domain.replace("_", "-")}
    assert all(row["turns"] and all(isinstance(t, str) and t.strip() for t in row["turns"]) for row in rows)  # type: ignore[attr-defined]


@pytest.mark.parametrize("domain", DOMAINS)
def test_heldout_prompts_share_no_wording_with_training_prompts(domain: str) -> None:
    train, heldout = texts("train", domain), texts("heldout", domain)
    assert len(heldout) >= 20
    known = set().union(*(runs(text, 8) for text in train))
    shared = [text for text in heldout if runs(text, 8) & known]
    assert not shared, shared[:2]
    openings = Counter(tuple(words(text)[:5]) for text in train)
    assert not [text for text in heldout if tuple(words(text)[:5]) in openings]


def test_no_text_stands_in_both_halves() -> None:
    files = [*DOMAINS, "self_written"]
    every = {half: {text for domain in files for text in texts(half, domain)} for half in ("train", "heldout")}
    assert not every["train"] & every["heldout"]


@pytest.mark.parametrize("domain", DOMAINS)
def test_training_prompts_are_not_made_from_templates(domain: str) -> None:
    openings = Counter(tuple(words(text)[:5]) for text in texts("train", domain))
    assert openings.most_common(1)[0][1] <= 0.1 * len(texts("train", domain)), openings.most_common(3)

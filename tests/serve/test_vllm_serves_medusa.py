"""A real vLLM serves exported Medusa heads: plain text, and counters equal to the walk.

The heads half learn the greedy texts of `builtin:tiny-random` by heart, so that rounds of every length occur. A block,
map, lm_head or state that vLLM reads otherwise breaks that pattern.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.eval.engine import is_available
from drafthead.eval.hf_target import HFTarget
from drafthead.pipeline.export.folder import TrainedHead, initial_digests
from drafthead.pipeline.export.medusa import write_medusa
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.heads.base import Objective
from drafthead.pipeline.heads.build import build_frozen_target, build_head, describe_head
from drafthead.pipeline.recipe import MedusaConfig
from drafthead.pipeline.target import open_target

from tests.serve.by_heart import assert_served_as_walked, batch_of, greedy_texts, learn_by_heart, rounds_of

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="vllm is not installed"),
]

NUM_HEADS = 3
SHARED = MedusaConfig(type="medusa", num_heads=NUM_HEADS)
SEPARATE = MedusaConfig(
    type="medusa", num_heads=NUM_HEADS, num_layers=2, bias=True, shared_lm_head=False, train_lm_head=True
)


def vocabulary(size: int, whole: bool) -> DraftVocab:
    ids = torch.tensor([token for token in range(size) if whole or token % 4 != 3])
    return DraftVocab(
        d2t=ids - torch.arange(len(ids)), t2d=torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
    )


@pytest.mark.parametrize(
    ("config", "k", "num_steps"),
    [(SHARED, NUM_HEADS, 30), (SEPARATE, 2, 8)],
    ids=["truncated vocabulary", "separate lm_heads, k below"],
)
def test_text_is_plain_and_counters_are_those_of_the_walk(
    cache: Path, tmp_path: Path, config: MedusaConfig, k: int, num_steps: int
) -> None:
    target = open_target("builtin:tiny-random")
    model = HFTarget(target.load(torch.float32, "cpu"), [])
    texts = greedy_texts(target, model, NUM_HEADS)
    batches = [batch_of(text, model) for text in texts]
    vocab = vocabulary(target.vocab_size, whole=not config.shared_lm_head)
    frozen = build_frozen_target(target, vocab)
    head = build_head(config, target, frozen, 0, seed=0)
    initial = initial_digests(head.state_dict())
    learn_by_heart(head, frozen, batches, Objective(depth=NUM_HEADS, loss="hard_ce"), num_steps, rate=1e-2)
    trained = TrainedHead(
        state=head.state_dict(),
        description={**describe_head(head, []), "initial_digests": initial, "trained_length": 48},
        target=target,
        vocab=vocab,
        k=NUM_HEADS,
        dtype="float32",
    )
    export = tmp_path / "export"
    write_medusa(export, trained)
    assert preflight(export, target.path).failures == []

    rounds = rounds_of(texts, batches, head, frozen, k)
    assert set(Counter(rounds)) == set(range(k + 1)), "rounds of every length"
    assert_served_as_walked(target, export, k, texts, rounds)

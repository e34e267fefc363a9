"""A real vLLM serves each kind of head on the built-in real target, from an export of the pipeline's own writers.

The heads learn three short greedy answers by heart, so that drafts are kept. Text must be plain decoding's, counters
those of the walk.
"""

from pathlib import Path

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.eval.engine import is_available
from drafthead.eval.hf_target import HFTarget
from drafthead.pipeline.export.folder import TrainedHead, initial_digests
from drafthead.pipeline.export.layouts import LAYOUTS
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.heads.base import Objective
from drafthead.pipeline.heads.build import build_frozen_target, build_head, describe_head
from drafthead.pipeline.recipe import Eagle3Config, HeadConfig, MedusaConfig, MTPConfig
from drafthead.pipeline.target import Target, open_target

from tests.serve.by_heart import Text, assert_served_as_walked, batch_of, greedy_texts, learn_by_heart, rounds_of

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="vllm is not installed"),
]

K = 3
AUX_LAYERS = [2, 15, 27]
TEXTS = (3, 5, 7)
"""Which of the greedy texts: answers of 12, 14 and 30 tokens."""
CONFIGS = [Eagle3Config(), MedusaConfig(type="medusa"), MTPConfig(type="mtp")]


@pytest.fixture(scope="module")
def plain() -> tuple[Target, HFTarget, list[Text]]:
    """SmolLM2 from the user's cache, or made there; greedy texts of prompts that are random tokens."""
    target = open_target("builtin:smollm2-135m-instruct")
    model = HFTarget(target.load(torch.float32, "cpu"), AUX_LAYERS)
    texts = greedy_texts(target, model, K)
    return target, model, [texts[number] for number in TEXTS]


def vocab_of(texts: list[Text], size: int, whole: bool) -> DraftVocab:
    """All tokens, or every second one and those of the answers but each seventh."""
    answered = sorted({token for text in texts for token in [*text.answer, *text.beyond]})
    dropped = set(answered[::7])
    kept = [token for token in range(size) if whole or ((token % 2 or token in answered) and token not in dropped)]
    ids = torch.tensor(kept)
    return DraftVocab(
        d2t=ids - torch.arange(len(ids)), t2d=torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_text_is_plain_and_counters_are_those_of_the_walk(
    plain: tuple[Target, HFTarget, list[Text]], tmp_path: Path, config: HeadConfig
) -> None:
    target, model, texts = plain
    aux = AUX_LAYERS if config.type == "eagle3" else []
    batches = [batch_of(text, model) for text in texts]
    vocab = vocab_of(texts, target.vocab_size, whole=config.type == "mtp")
    frozen = build_frozen_target(target, vocab)
    head = build_head(config, target, frozen, len(AUX_LAYERS) if aux else 0, seed=0)
    head.calibrate(batches[0].last_TD, frozen)
    initial = initial_digests(head.state_dict())
    learn_by_heart(head, frozen, batches, Objective(depth=K, loss="hard_ce"), num_steps=6, rate=1e-3)
    trained = TrainedHead(
        state=head.state_dict(),
        description={**describe_head(head, aux), "initial_digests": initial, "trained_length": 64},
        target=target,
        vocab=vocab,
        k=K,
        dtype="float32",
    )
    export = tmp_path / "export"
    LAYOUTS[config.type].write(export, trained)
    assert preflight(export, target.path).failures == []

    rounds = rounds_of(texts, batches, head, frozen, K)
    assert {0} < set(rounds), "some drafts are kept, some are not"
    assert_served_as_walked(target, export, K, texts, rounds)

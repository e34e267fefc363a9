"""Whether answers are the target's own: measured from stored states, held against the target's own logits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from drafthead.data.encoding import Row
from drafthead.data.shards import ShardWriter, Store
from drafthead.data.store_format import StoreInfo
from drafthead.eval.states import StateRecorder
from drafthead.pipeline.on_policy import measure_on_policy, show_on_policy
from drafthead.pipeline.target import Target

MakeStore = Callable[..., Store]
PROMPT, ANSWER = 12, 40


@pytest.fixture
def target(tiny_target: Path) -> Target:
    return Target(tiny_target)


@pytest.fixture
def model(target: Target) -> Any:
    return target.load(torch.float32, "cpu")


def make_rows(model: Any, source: str, count: int, temperature: float | None) -> list[Row]:
    """Answers by the model (0: greedy), or at random (None)."""
    generator = torch.Generator().manual_seed(len(source))
    ids_BT = torch.randint(3, 500, (count, PROMPT), generator=generator)
    for _ in range(ANSWER):
        with torch.inference_mode():
            logits_BV = model(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits[:, -1]
        if temperature == 0:
            next_B = logits_BV.argmax(-1)
        else:
            weights_BV = torch.ones_like(logits_BV) if temperature is None else (logits_BV / temperature).softmax(-1)
            next_B = torch.multinomial(weights_BV, 1, generator=generator)[:, 0]
        ids_BT = torch.cat([ids_BT, next_B[:, None]], dim=1)
    return [
        Row(
            id=f"{source}-{number}",
            source=source,
            domain="all",
            turn=0,
            input_ids=ids,
            context_length=PROMPT,
            clipped=False,
        )
        for number, ids in enumerate(ids_BT.tolist())
    ]


@pytest.fixture
def make_store(model: Any, target: Target, tmp_path: Path) -> MakeStore:
    def make(rows: list[Row], last: Literal["all", "answers"] = "all") -> Store:
        info = StoreInfo(
            fingerprint=target.fingerprint,
            layer_ids=[2],
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            dtype="float32",
            last=last,
        )
        writer = ShardWriter(tmp_path / last, info, 10_000)
        states = StateRecorder(model, [2]).record([row.input_ids for row in rows])
        for row, (aux, last_TD) in zip(rows, states, strict=True):
            writer.add(row, aux, last_TD)
        writer.finish()
        return Store(tmp_path / last)

    return make


@pytest.mark.parametrize("last", ["all", "answers"])
def test_the_measure_is_that_of_the_targets_own_logits(
    last: Literal["all", "answers"], model: Any, target: Target, make_store: MakeStore
) -> None:
    rows = make_rows(model, "sampled", 5, 1.0)
    rows[0] = replace(rows[0], input_ids=rows[0].input_ids[: PROMPT + 2])
    found = measure_on_policy(target, rows, make_store(rows, last))["sources"]["sampled"]
    own, agreed = [], []
    for row in rows:
        with torch.inference_mode():
            logits_TV = model(input_ids=torch.tensor([row.input_ids])).logits[0]
        for place in range(PROMPT, len(row.input_ids)):
            logprob_V = logits_TV[place - 1].log_softmax(-1)
            own.append(float(logprob_V[row.input_ids[place]]))
            agreed.append(int(logprob_V.argmax()) == row.input_ids[place])
    assert (found["rows"], found["tokens"]) == (5, len(own)) == (5, 2 + 4 * ANSWER)
    assert found["mean_logprob"] == pytest.approx(sum(own) / len(own), abs=1e-4)
    assert found["top1_agreement"] == pytest.approx(sum(agreed) / len(agreed))


def test_only_answers_of_others_are_warned_of(
    model: Any, target: Target, make_store: MakeStore, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        *make_rows(model, "greedy", 8, 0.0),
        *make_rows(model, "sampled", 8, 1.0),
        *make_rows(model, "foreign", 8, None),
    ]
    measured = measure_on_policy(target, rows, make_store(rows))
    found = measured["sources"]
    assert set(found) == {"greedy", "sampled", "foreign"}
    assert found["greedy"]["top1_agreement"] == 1.0
    assert found["greedy"]["gap"] > 0
    assert abs(found["sampled"]["gap"]) < 4 * found["sampled"]["gap_error"]
    (warning,) = measured["warnings"]
    assert warning.startswith("foreign: these answers are not what the target writes: mean log-probability -")
    assert f"{found['foreign']['top1_agreement']:.1%}" in warning
    show_on_policy(measured)
    printed = capsys.readouterr().err
    assert printed.count("on-policy: ") == 3
    assert f"WARNING: {warning}" in printed


def test_a_sample_is_enough_and_always_the_same(model: Any, target: Target, make_store: MakeStore) -> None:
    rows = make_rows(model, "sampled", 8, 1.0)
    store = make_store(rows)
    few = measure_on_policy(target, rows, store, tokens_per_source=2 * ANSWER)
    assert few["sources"]["sampled"]["rows"] == 2
    assert measure_on_policy(target, rows[::-1], store, tokens_per_source=2 * ANSWER) == few


def test_rows_without_states_are_left_out(model: Any, target: Target, make_store: MakeStore) -> None:
    rows = make_rows(model, "sampled", 3, 1.0)
    store = make_store(rows[:2])
    assert measure_on_policy(target, rows, store)["sources"]["sampled"]["rows"] == 2
    assert measure_on_policy(target, rows[2:], store) == {"sources": {}, "warnings": []}

"""`drafthead store verify`: whatever is done to a row's states, that row is named, and no other.

Shapes: T tokens, A captured layers, D hidden.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.encoding import Row
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, sha256_of, write_json
from drafthead.data.shards import ShardWriter, Store
from drafthead.data.store_format import RowPlace, StoreInfo, digest_of, row_places
from drafthead.eval.states import StateRecorder
from drafthead.pipeline import store_verify
from drafthead.pipeline.arguments import parse
from drafthead.pipeline.store_verify import find_stores, verify
from drafthead.pipeline.target import Target
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

V, D, LAYERS, AUX = 64, 32, 4, [1, 2, 3]
ROWS, CONTEXT = 24, 6
NAME = "shard-0-00000"
Change = Callable[[Tensor], None]
Wrong = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return Target(folder)


def greedy_rows(model: Any) -> list[Row]:
    """Prompts of random tokens, with answers of 6 to 17 tokens that the target wrote itself."""
    prompt_BT = torch.randint(V, (ROWS, CONTEXT), generator=torch.Generator().manual_seed(0))
    ids_BT = prompt_BT
    with torch.inference_mode():
        for _ in range(17):
            ids_BT = torch.cat([ids_BT, model(input_ids=ids_BT).logits[:, -1:].argmax(-1)], 1)
    return [
        Row(
            id=f"row{number}",
            source="test",
            domain="test",
            turn=0,
            input_ids=ids[: CONTEXT + 6 + number % 12],
            context_length=CONTEXT,
            clipped=False,
        )
        for number, ids in enumerate(ids_BT.tolist())
    ]


def capture_store(folder: Path, target: Target, dtype: str, wrong: Mapping[int, Wrong]) -> Path:
    """The states of the target's own answers, as an EAGLE-3 head reads them, but for some rows."""
    info = StoreInfo(
        fingerprint=target.fingerprint,
        revision="org/target",
        layer_ids=AUX,
        num_layers=LAYERS,
        hidden_size=D,
        dtype=dtype,
        last="answer",
    )
    model = target.load(torch.float32, "cpu")
    recorder = StateRecorder(model, AUX)
    writer = ShardWriter(folder, info, 10_000)
    for number, row in enumerate(greedy_rows(model)):
        aux, last = next(iter(recorder.record([row.input_ids])))
        writer.add(row, *wrong[number](aux, last) if number in wrong else (aux, last))
    writer.finish()
    return folder


@pytest.fixture(scope="module", params=["bfloat16", "int8", "fp8"])
def sound(request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture_store(tmp_path_factory.mktemp("store") / "train", target, request.param, {})


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "train"))


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Store other tensors with checksums that fit them, as a faulty capture would have written them."""
    path, list_path = folder / f"{NAME}.safetensors", folder / f"{NAME}.json"
    save_file(tensors, path)
    shard = {**read_json(list_path), "sha256": sha256_of(path)}
    for row in shard["rows"]:
        row["digest"] = digest_of(row["id"], row_places(shard)[row["id"]], tensors)
    write_json(list_path, shard)
    index = read_json(folder / "index.json")
    index["shards"][0].update(sha256=sha256_of(path), list_sha256=sha256_of(list_path))
    write_json(folder / "index.json", index)


def own(place: RowPlace, name: str) -> slice:
    (_, start, count) = (place.aux if name.startswith("aux") else place.last)[-1]
    return slice(start, start + count)


def spoil(folder: Path, row_id: str, name: str, change: Change) -> None:
    """Change what the row's states are widened from; codes hold no NaN, scales do."""
    tensors = load_file(folder / f"{NAME}.safetensors")
    window = own(Store(folder).where[row_id], name)
    changed = [tensors[name][window]] if change not in (not_a_number, infinite) or is_plain(tensors, name) else []
    if not is_plain(tensors, name) and change is not zero:
        changed.append(tensors[f"{name}_scale"][window])
    for one in changed:
        change(one)
    rewrite(folder, tensors)


def is_plain(tensors: dict[str, Tensor], name: str) -> bool:
    return f"{name}_scale" not in tensors


def zero(states: Tensor) -> None:
    states[1] = 0


def not_a_number(states: Tensor) -> None:
    states[1] = float("nan")


def infinite(states: Tensor) -> None:
    states[-1] = float("inf")


def constant(states: Tensor) -> None:
    states[:] = states[1].clone()


def shifted(states: Tensor) -> None:
    states[:] = states.roll(1, 0).clone()


def bad_rows(report: dict[str, object]) -> dict[str, str]:
    bad = report["bad"]
    assert isinstance(bad, list)
    return {one["sample"]: one["reason"] for one in bad}


def test_states_of_the_target_are_sound(target: Target, store: Path) -> None:
    assert verify(store, target) == {"bad": [], "checked": ROWS}


@pytest.mark.parametrize("name", ["aux", "last"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (zero, "holds a zero state"),
        (not_a_number, "holds NaN or infinity"),
        (infinite, "holds NaN or infinity"),
        (constant, "is the same at every position"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_states_that_no_target_gives_are_named_without_it(store: Path, name: str, change: Change, reason: str) -> None:
    row_id = list(Store(store).ids())[5]
    spoil(store, row_id, name, change)
    assert bad_rows(verify(store, None)) == {row_id: f"{name} {reason}"}


def swap(folder: Path, first: str, second: str) -> None:
    """The states of two rows, each as long as the other's would have been."""
    tensors, places = load_file(folder / f"{NAME}.safetensors"), Store(folder).where
    for name in (one for one in ("aux", "last", "aux_scale", "last_scale") if one in tensors):
        one, other = (tensors[name][own(places[row_id], name)] for row_id in (first, second))
        kept, count = one.clone(), min(len(one), len(other))
        one[-count:] = other[-count:].clone()
        other[-count:] = kept[-count:]
    rewrite(folder, tensors)


def test_swapped_rows_are_both_named(target: Target, store: Path) -> None:
    """Whole states with fitting checksums: nothing but the target tells."""
    first, second = (list(Store(store).ids())[number] for number in (3, 17))
    swap(store, first, second)
    assert verify(store, None)["bad"] == []
    found = bad_rows(verify(store, target))
    assert found.keys() == {first, second}
    assert all(reason.startswith("swapped: not the states of its tokens") for reason in found.values())


def test_states_one_position_off_are_named(target: Target, store: Path) -> None:
    row_id = list(Store(store).ids())[8]
    spoil(store, row_id, "last", shifted)
    assert bad_rows(verify(store, target)).keys() == {row_id}


def exchanged(aux: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    return aux[:, [1, 2, 0]], last


def one_off(aux: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    return aux.roll(1, 0), last


def of_another_row(aux: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    return aux.flip(0), last


def too_large(aux: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    return aux * 2, last


def behind_the_norm(aux: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """A28: the norm of a norm predicts the same tokens."""
    return aux, last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True))


@pytest.mark.parametrize(
    "change",
    [exchanged, one_off, of_another_row, too_large, behind_the_norm],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_row_that_predicts_its_tokens_and_is_wrong_stands_out(
    target: Target, tmp_path: Path, dtype: str, change: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured wrongly, with fitting checksums; no sample has it by luck."""
    monkeypatch.setattr(store_verify, "SAMPLE", 0)
    store = capture_store(tmp_path / "train", target, dtype, {11: change})
    assert bad_rows(verify(store, target)).keys() == {"row11/0"}


def test_a_row_with_the_states_of_another_is_named(store: Path) -> None:
    first, second = list(Store(store).ids())[:2]
    tensors, places = load_file(store / f"{NAME}.safetensors"), Store(store).where
    lists = read_json(store / f"{NAME}.json")
    for row in lists["rows"]:
        if row["id"] == second:
            row["last"], row["aux"] = (
                [list(piece[1:]) for piece in one] for one in (places[first].last, places[first].aux)
            )
            row["length"], row["context"] = places[first].length, places[first].context_length
    write_json(store / f"{NAME}.json", lists)
    rewrite(store, tensors)
    found = bad_rows(verify(store, None))
    assert found[second] == f"duplicate: the states of {first}, whose tokens are others"


def test_fewer_states_than_tokens_are_named(store: Path) -> None:
    row_id = list(Store(store).ids())[4]
    lists = read_json(store / f"{NAME}.json")
    for row in lists["rows"]:
        if row["id"] == row_id:
            row["aux"][-1][1] -= 2
    write_json(store / f"{NAME}.json", lists)
    rewrite(store, load_file(store / f"{NAME}.safetensors"))
    assert bad_rows(verify(store, None))[row_id].startswith("short: ")


def test_states_of_another_target_are_all_named(target: Target, store: Path) -> None:
    index, lists = read_json(store / "index.json"), read_json(store / f"{NAME}.json")
    lists["info"]["fingerprint"] = "beef"
    write_json(store / f"{NAME}.json", lists)
    write_json(store / "index.json", {**index, "fingerprint": "beef"})
    rewrite(store, load_file(store / f"{NAME}.safetensors"))
    assert verify(store, None)["bad"] == []
    found = bad_rows(verify(store, target))
    assert len(found) == ROWS
    assert all("states of target beef (org/target)" in reason for reason in found.values())


def test_a_shard_of_another_target_is_named_without_it(store: Path) -> None:
    index = read_json(store / "index.json")
    write_json(store / "index.json", {**index, "fingerprint": "beef"})
    found = bad_rows(verify(store, None))
    assert len(found) == ROWS
    assert all(reason.startswith("fingerprint of its shard is ") for reason in found.values())


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no finished store in it"):
        find_stores(tmp_path)


# ---- the command line ------------------------------------------------------------------------------------


def run(*words: object) -> int:
    arguments = parse(["store", "verify", *map(str, words), "--json"])
    code: int = arguments.command(arguments)
    return code


def test_a_run_is_checked_split_by_split(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "heldout"):
        shutil.copytree(store, tmp_path / "run" / "capture" / split)
    spoil(tmp_path / "run" / "capture" / "heldout", "row5/0", "aux", zero)
    assert run(tmp_path / "run") == 1
    assert json.loads(capsys.readouterr().out) == {
        "bad": [{"sample": "row5/0", "reason": "aux holds a zero state", "split": "heldout"}],
        "checked": 2 * ROWS,
    }


def test_a_sound_store_is_exit_code_0(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(store) == 0
    assert json.loads(capsys.readouterr().out) == {"bad": [], "checked": ROWS}


def test_a_missing_shard_is_exit_code_1(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / f"{NAME}.safetensors").unlink()
    assert run(store) == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["bad"]) == report["checked"] == ROWS
    assert all("missing or cut off" in one["reason"] for one in report["bad"])

"""The exported Medusa heads, and a preflight that must name every single fault made in them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import GateError, InputError
from drafthead.pipeline.export.folder import TrainedHead, check_path, initial_digests, serve_command
from drafthead.pipeline.export.layouts import check_export_path
from drafthead.pipeline.export.medusa import OPTIONS, expected_shapes, write_medusa
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.target import Target
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.pipeline import export_faults
from tests.pipeline.export_faults import (
    SPECULATIVE,
    SPECULATIVE_FAULTS,
    Config,
    Tensors,
    change_config,
    change_tensors,
    drop,
    fields,
    poke,
    put,
    redraw,
    swap,
)

V, U, D = 512, 128, 64
SHARED: Config = {"num_heads": 3, "num_layers": 2, "draft_vocab_size": U, "shared_lm_head": True, "bias": False}
SEPARATE: Config = {**SHARED, "num_layers": 1, "draft_vocab_size": V, "shared_lm_head": False, "bias": True}
LAYOUTS = {
    "shared": SHARED,
    "separate": SEPARATE,
    "full vocabulary": {**SHARED, "draft_vocab_size": V},
}
TRUNCATED_IDS = torch.arange(U) * (V // U)
"""Every fourth target token."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "target"
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def vocab(size: int) -> DraftVocab:
    ids = TRUNCATED_IDS if size == U else torch.arange(V)
    return DraftVocab(d2t=ids - torch.arange(size), t2d=torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True))


def head_state(options: Config, target: Target, seed: int = 1, trained_lm_head: bool = False) -> Tensors:
    config = {"hidden_size": D, "vocab_size": V, **{OPTIONS[name]: value for name, value in options.items()}}
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in expected_shapes(config).items()}
    if options["shared_lm_head"] and not trained_lm_head:
        state["lm_head.weight"] = target.lm_head_VD[vocab(options["draft_vocab_size"]).target_ids()]
    return state


def make_export(
    folder: Path, target_path: Path, options: Config = SHARED, dtype: str = "bfloat16", k: int = 3, **state: Any
) -> Path:
    target = Target(target_path)
    description = {
        "type": "medusa",
        "options": options,
        "aux_layer_ids": [],
        "inv_freq": [],
        "trained_length": 512,
        "initial_digests": initial_digests(head_state(options, target, seed=2)),
    }
    trained = TrainedHead(
        state=head_state(options, target, **state),
        description=description,
        target=target,
        vocab=vocab(options["draft_vocab_size"]),
        k=k,
        dtype=dtype,
    )
    write_medusa(folder, trained)
    return folder


@pytest.fixture
def export(tmp_path: Path, small_target: Path) -> Path:
    return make_export(tmp_path / "run" / "export", small_target)


# ---- a good export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_good_export_passes(tmp_path: Path, small_target: Path, layout: str, dtype: str) -> None:
    folder = make_export(tmp_path / "export", small_target, LAYOUTS[layout], dtype)
    report = preflight(folder, small_target)
    assert report.failures == []
    assert report.ok
    tensors = load_file(folder / "model.safetensors")
    assert ("token_map" in tensors) is (layout == "shared")
    assert ("quantization_config" in json.loads((folder / "config.json").read_text())) is (layout == "shared")
    for name, tensor in head_state(LAYOUTS[layout], Target(small_target)).items():
        assert torch.equal(tensors[name], tensor.to(getattr(torch, dtype)))


def test_a_trained_lm_head_passes(tmp_path: Path, small_target: Path) -> None:
    folder = make_export(tmp_path / "export", small_target, trained_lm_head=True)
    assert preflight(folder, small_target).failures == []
    assert json.loads((folder / "config.json").read_text())["drafthead"]["lm_head_of_target"] is False


def test_the_map_holds_target_ids_and_the_command_the_method(export: Path, small_target: Path) -> None:
    token_map = load_file(export / "model.safetensors")["token_map"]
    assert token_map.dtype == torch.int64
    assert torch.equal(token_map, TRUNCATED_IDS)
    written = json.loads((export / "speculative_config.json").read_text())
    assert written == {"method": "medusa", "model": str(export), "num_speculative_tokens": 3}
    assert preflight(export, small_target).serve_command == serve_command(small_target, export)


def test_the_config_says_what_vllm_reads_and_no_more_heads_or_layers(export: Path) -> None:
    """As vllm/transformers_utils/configs/medusa.py does: any such key takes the place of the right one."""
    config = json.loads((export / "config.json").read_text())
    assert {name for name in config if "num" in name} == {"num_heads", "num_hidden_layers"}
    wanted = {
        "num_heads": 3,
        "num_hidden_layers": 2,
        "truncated_vocab_size": U,
        "vocab_size": V,
        "hidden_size": D,
        "original_lm_head": True,
        "medusa_fc_bias": False,
    }
    assert wanted.items() <= config.items()


# ---- one fault each --------------------------------------------------------------------------------------


CONFIG_FAULTS: dict[str, tuple[Callable[[Config], Any], str]] = {
    **export_faults.CONFIG_FAULTS,
    "attention heads of the target": (put(num_attention_heads=2), "num_attention_heads"),
    "key-value heads of the target": (put(num_key_value_heads=1), "num_key_value_heads"),
    "original implementation's heads": (put(medusa_num_heads=3), "medusa_num_heads"),
    "original implementation's layers": (put(medusa_num_layers=2), "medusa_num_layers"),
    "lookahead": (put(num_lookahead_tokens=5), "num_lookahead_tokens"),
    "n_predict": (put(n_predict=2), "n_predict"),
    "fewer heads": (put(num_heads=2), "blocks.2.layers.0.weight"),
    "fewer heads than k": (put(num_heads=2), "drafthead.num_speculative_tokens"),
    "more heads": (put(num_heads=4), "blocks.3.layers.0.weight"),
    "another head count than trained": (put(num_heads=4), "num_heads"),
    "no head count": (drop("num_heads"), "num_heads"),
    "fewer layers": (put(num_hidden_layers=1), "blocks.0.layers.1.weight"),
    "more layers": (put(num_hidden_layers=3), "blocks.0.layers.2.weight"),
    "layers as text": (put(num_hidden_layers="2"), "num_hidden_layers"),
    "bias that is not there": (put(medusa_fc_bias=True), "blocks.0.layers.0.bias"),
    "no bias flag": (drop("medusa_fc_bias"), "medusa_fc_bias"),
    "separate lm_heads that are not there": (put(original_lm_head=False), "lm_heads.0.weight"),
    "truncated, yet separate": (put(original_lm_head=False), "truncated_vocab_size"),
    "no lm_head flag": (drop("original_lm_head"), "original_lm_head"),
    "truncated size": (put(truncated_vocab_size=100), "lm_head.weight"),
    "truncated size against the map": (put(truncated_vocab_size=100), "token_map"),
    "truncated size is full": (put(truncated_vocab_size=V), "token_map"),
    "truncated size above full": (put(truncated_vocab_size=V + 1), "truncated_vocab_size"),
    "no truncated size": (drop("truncated_vocab_size"), "truncated_vocab_size"),
    "hidden_size": (put(hidden_size=32), "hidden_size"),
    "architecture": (put(architectures=["MedusaModel", "LlamaForCausalLM"]), "architectures"),
    "model type": (put(model_type="llama"), "model_type"),
    "dtype against tensors": (put(dtype="float32", torch_dtype="float32"), "blocks.0.layers.0.weight"),
    "no block that lets the map in": (drop("quantization_config"), "quantization_config"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_fault_in_the_config_is_named(export: Path, small_target: Path, fault: str) -> None:
    change, field = CONFIG_FAULTS[fault]
    change_config(export, change)
    report = preflight(export, small_target)
    assert not report.ok
    assert field in fields(report)
    assert all(failure.keys() == {"gate", "field", "message"} for failure in report.failures)


BLOCK = "blocks.1.layers.0.weight"
TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no block": (lambda t: t.pop(BLOCK), BLOCK),
    "zero block": (lambda t: t[BLOCK].zero_(), BLOCK),
    "NaN": (poke(BLOCK, float("nan")), BLOCK),
    "infinity": (poke(BLOCK, float("inf")), BLOCK),
    "block of float32": (lambda t: t.update({BLOCK: t[BLOCK].float()}), BLOCK),
    "block of another shape": (lambda t: t.update({BLOCK: t[BLOCK][:-1].contiguous()}), BLOCK),
    "original implementation's name": (
        lambda t: t.update({"medusa_heads.1.0.linear.weight": t.pop(BLOCK)}),
        "medusa_heads.1.0.linear.weight",
    ),
    "random block": (redraw(BLOCK), "drafthead.trained_digest"),
    "one head for another": (swap(BLOCK, "blocks.2.layers.0.weight"), "drafthead.trained_digest"),
    "extra block": (lambda t: t.update({"blocks.3.layers.0.weight": t[BLOCK].clone()}), "blocks.3.layers.0.weight"),
    "extra lm_heads": (lambda t: t.update({"lm_heads.0.weight": t["lm_head.weight"].clone()}), "lm_heads.0.weight"),
    "a map of EAGLE-3": (lambda t: t.update(d2t=TRUNCATED_IDS - torch.arange(U)), "d2t"),
    "no lm_head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
    "lm_head of the whole vocabulary": (
        lambda t: t.update({"lm_head.weight": torch.randn(V, D).bfloat16()}),
        "lm_head.weight",
    ),
    "rows of lm_head in another order": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].flip(0).contiguous()}),
        "lm_head.weight",
    ),
    "no map": (lambda t: t.pop("token_map"), "token_map"),
    "map holds offsets": (lambda t: t["token_map"].sub_(torch.arange(U)).clamp_(max=0), "token_map"),
    "map of other tokens": (lambda t: t["token_map"].add_(1), "lm_head.weight"),
    "map not ascending": (lambda t: t["token_map"][5:6].fill_(0), "token_map"),
    "map beyond the vocabulary": (lambda t: t["token_map"][-1:].fill_(V), "token_map"),
    "map negative": (lambda t: t["token_map"][:1].fill_(-1), "token_map"),
    "map of int32": (lambda t: t.update(token_map=t["token_map"].int()), "token_map"),
    "map as mask": (lambda t: t.update(token_map=torch.ones(V, dtype=torch.bool)), "token_map"),
    "map of another length": (lambda t: t.update(token_map=t["token_map"][:-1].contiguous()), "token_map"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_fault_in_the_tensors_is_named(export: Path, small_target: Path, fault: str) -> None:
    change, field = TENSOR_FAULTS[fault]
    change_tensors(export, change)
    report = preflight(export, small_target)
    assert not report.ok
    assert field in fields(report)


def test_faults_of_separate_lm_heads_are_named(tmp_path: Path, small_target: Path) -> None:
    folder = make_export(tmp_path / "export", small_target, SEPARATE)
    change_tensors(folder, lambda tensors: tensors.pop("lm_heads.1.weight"))
    change_tensors(folder, lambda tensors: tensors["blocks.0.layers.0.bias"].zero_())
    change_tensors(folder, lambda tensors: tensors.update(token_map=torch.arange(V)))
    change_config(folder, lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    assert fields(preflight(folder, small_target)) == {
        "lm_heads.1.weight",
        "blocks.0.layers.0.bias",
        "token_map",
        "quantization_config",
    }


@pytest.mark.parametrize("fault", SPECULATIVE_FAULTS)
def test_a_fault_in_the_speculative_config_is_named(export: Path, small_target: Path, fault: str) -> None:
    change, field = SPECULATIVE_FAULTS[fault]
    change_config(export, change, SPECULATIVE)
    assert fields(preflight(export, small_target)) == {f"speculative_config.{field}"}


def test_more_draft_tokens_than_heads_are_named(tmp_path: Path, small_target: Path) -> None:
    folder = make_export(tmp_path / "export", small_target, k=4)
    assert fields(preflight(folder, small_target)) == {"drafthead.num_speculative_tokens"}


# ---- where the folder lies -------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["eagle3-runs", "my-EAGLE3", "eagle-owl", "dflash", "x-dspark-y"])
def test_a_path_that_vllm_takes_for_another_head_is_refused(tmp_path: Path, small_target: Path, part: str) -> None:
    folder = tmp_path / part / "run" / "export"
    for refuse in (
        lambda: make_export(folder, small_target),
        lambda: check_export_path("medusa", folder),
    ):
        with pytest.raises(GateError, match=rf"ExportGate: path part '{part}'.*run\.name or run\.dir"):
            refuse()
    assert not folder.exists()
    check_export_path("eagle3", folder)


def test_a_moved_folder_is_refused_too(export: Path, tmp_path: Path, small_target: Path) -> None:
    moved = tmp_path / "eagle3" / "export"
    shutil.copytree(export, moved)
    assert fields(preflight(moved, small_target)) == {"path part 'eagle3'", "speculative_config.model"}


def test_a_link_by_which_vllm_takes_the_head_for_another_is_refused(
    export: Path, tmp_path: Path, small_target: Path
) -> None:
    """vLLM looks at the path as it is written, not at where it leads."""
    (tmp_path / "my-eagle3").symlink_to(export.parent)
    change_config(export, put(model=str(tmp_path / "my-eagle3" / "export")), SPECULATIVE)
    assert fields(preflight(export, small_target)) == {"speculative_config.model"}


def test_harmless_paths_pass() -> None:
    check_path(Path("/runs/beagle/eagle/eagle_3/medusa/export"))


def test_missing_tensors_are_bad_input(export: Path, small_target: Path) -> None:
    (export / "model.safetensors").unlink()
    with pytest.raises(InputError, match="export the head again"):
        preflight(export, small_target)

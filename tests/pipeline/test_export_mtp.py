"""The stitched MTP checkpoint, and a preflight that must name every single fault made in it."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import GateError
from drafthead.pipeline.export import mtp
from drafthead.pipeline.export.folder import (
    TrainedHead,
    initial_digests,
    is_linked,
    replace_folder,
    serve_command,
    served_path,
)
from drafthead.pipeline.export.mtp import write_mtp
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.heads.base import FrozenTarget
from drafthead.pipeline.heads.build import build_head
from drafthead.pipeline.recipe import MTPConfig
from drafthead.pipeline.target import Target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig, PreTrainedConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from tests.pipeline.export_faults import SPECULATIVE, SPECULATIVE_FAULTS, Config, Tensors, change_config, fields, put

V, D, N = 64, 32, 4
COMMON: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": N,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "dtype": torch.float32,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def make_config(family: str) -> PreTrainedConfig:
    if family == "llama":
        return LlamaConfig(**COMMON, tie_word_embeddings=True, head_dim=16, rope_parameters=ROPE)
    if family == "qwen3_5":
        layers = ["linear_attention"] * (N - 1) + ["full_attention"]
        return Qwen3_5TextConfig(**COMMON, head_dim=16, layer_types=layers, rope_parameters=dict(ROPE))
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    return Glm4MoeConfig(**COMMON, **experts, head_dim=16, num_mtp_layers=0, rope_parameters=dict(ROPE))


def write_target(folder: Path, family: str) -> Path:
    """A random target of two shards with files beside the weights, and one that no server reads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make_config(family))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.5, 0.3)
        model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("the target's own card")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("targets")

    def made_once(family: str) -> Path:
        path = folder / family
        return path if path.exists() else write_target(path, family)

    return made_once


def trained_head(target: Target, dtype: str = "float32", start: str = "fresh") -> TrainedHead:
    frozen = FrozenTarget(target.embedding_VD, target.final_norm_D, target.lm_head_VD, torch.arange(V), 1e-6)
    head: Any = build_head(MTPConfig(type="mtp", start=start), target, frozen, num_aux=0, seed=0)
    digests = initial_digests(head.state_dict())
    generator = torch.Generator().manual_seed(5)
    state = {
        name: tensor if name == "lm_head.weight" else tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in head.state_dict().items()
    }
    description = {
        "type": "mtp",
        "options": asdict(head.options),
        "aux_layer_ids": [],
        "inv_freq": head.inverse_frequencies(),
        "initial_digests": digests,
        "trained_length": 128,
    }
    vocab = DraftVocab(d2t=torch.zeros(V, dtype=torch.int64), t2d=torch.ones(V, dtype=torch.bool))
    return TrainedHead(state=state, description=description, target=target, vocab=vocab, k=3, dtype=dtype)


def make_export(folder: Path, target_path: Path, dtype: str = "float32") -> Path:
    write_mtp(folder, trained_head(Target(target_path), dtype))
    return folder


@pytest.fixture
def target(tmp_path: Path, targets: Callable[[str], Path]) -> Path:
    """A copy of the Llama target, whose files a test may damage."""
    return Path(shutil.copytree(targets("llama"), tmp_path / "target"))


@pytest.fixture
def export(tmp_path: Path, target: Path) -> Path:
    return make_export(tmp_path / "run" / "export", target)


# ---- a good export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "glm4_moe"])
def test_a_good_export_passes(tmp_path: Path, targets: Callable[[str], Path], family: str, dtype: str) -> None:
    folder = make_export(tmp_path / "export", targets(family), dtype)
    report = preflight(folder, targets(family))
    assert report.failures == []
    assert report.ok
    names = Target(folder).tensor_files.keys() - Target(targets(family)).tensor_files.keys()
    prefix = {"llama": "model.mtp_layers.0.", "qwen3_5": "mtp.", "glm4_moe": f"model.layers.{N}."}[family]
    zeros = {f"model.layers.{i}.self_attn.{part}_proj.bias" for i in range(N) for part in "qkv"} | {"lm_head.weight"}
    assert {name for name in names if not name.startswith(prefix)} == (zeros if family == "llama" else set())


def test_the_targets_files_are_linked_and_stay_as_they_are(tmp_path: Path, target: Path) -> None:
    before = {path.name: (path.read_bytes(), path.stat().st_mode) for path in target.iterdir()}
    folder = make_export(tmp_path / "export", target)
    shards = {path.name for path in target.glob("*.safetensors")}
    assert len(shards) > 1
    for name in (*shards, "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).samefile(target / name)
        assert is_linked(folder / name)
    own = {path.name for path in folder.iterdir() if not (target / path.name).exists()}
    assert own == {"mtp.safetensors", "speculative_config.json"}
    assert not (folder / "README.md").exists()
    assert {path.name: (path.read_bytes(), path.stat().st_mode) for path in target.iterdir()} == before


def test_where_hard_links_are_refused_files_are_symlinked(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    folder = make_export(tmp_path / "export", target)
    shard = next(target.glob("model-*.safetensors")).name
    assert (folder / shard).is_symlink()
    assert preflight(folder, target).ok


def test_served_as_a_whole(export: Path, target: Path) -> None:
    assert served_path(target, export) == export
    words = shlex.split(serve_command(target, export))
    assert words[:4] == ["vllm", "serve", str(export), "--speculative-config"]
    assert json.loads(words[4]) == {"method": "mtp", "num_speculative_tokens": 3}


def test_transformers_reads_a_llama_as_the_same_model(export: Path, target: Path) -> None:
    """Qwen2 with zero biases computes what the Llama did."""
    assert AutoConfig.from_pretrained(export).model_type == "qwen2"
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (export, target)]
    torch.testing.assert_close(*logits)


def test_a_layer_that_is_there_already_is_replaced_everywhere(tmp_path: Path, targets: Callable[[str], Path]) -> None:
    """Grown for a stitched target, whose own MTP shard vLLM would read as well."""
    first = make_export(tmp_path / "first", targets("llama"))
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    second = tmp_path / "second"
    write_mtp(second, trained_head(Target(first), start="native"))
    assert preflight(second, first).failures == []
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    name = "model.mtp_layers.0.input_proj.weight"
    holders = [path.name for path in sorted(second.glob("*.safetensors")) if name in load_file(path)]
    assert holders == ["mtp-1.safetensors"]
    assert not torch.equal(Target(second).tensor(name), Target(first).tensor(name))
    assert "lm_head.weight" in load_file(second / "mtp.safetensors"), "what else the old shard held is kept"


def test_a_path_that_names_another_method_is_refused(tmp_path: Path, target: Path) -> None:
    with pytest.raises(GateError, match="path part 'eagle3-mtp'"):
        make_export(tmp_path / "eagle3-mtp" / "export", target)
    folder = make_export(tmp_path / "export", target)
    folder.rename(tmp_path / "dflash")
    assert "path part 'dflash'" in fields(preflight(tmp_path / "dflash", target))


def test_a_failed_export_leaves_the_targets_files(tmp_path: Path, target: Path) -> None:
    names = sorted(path.name for path in target.iterdir())
    head = trained_head(Target(target))
    broken = {**head.state, "fc.weight": torch.ones(2, 2, device="meta")}
    with pytest.raises(NotImplementedError):
        write_mtp(tmp_path / "export", TrainedHead(**{**vars(head), "state": broken}))
    assert sorted(path.name for path in target.iterdir()) == names
    assert not (tmp_path / "export").exists()
    make_export(tmp_path / "export", target)
    replace_folder(tmp_path / "export", lambda folder: None)
    assert sorted(path.name for path in target.iterdir()) == names


# ---- one fault each --------------------------------------------------------------------------------------


def change_tensors(folder: Path, change: Callable[[Tensors], Any], file: str = "mtp.safetensors") -> None:
    """Rewrite a shard and the index's entries of it; a link is replaced, not written through."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
    change(tensors)
    (folder / file).unlink()
    save_file(tensors, folder / file)

    def list_again(index: Config) -> None:
        kept = {name: one for name, one in index["weight_map"].items() if one != file}
        index["weight_map"] = {**kept, **dict.fromkeys(tensors, file)}

    change_config(folder, list_again, mtp.INDEX)


CONFIG_FAULTS: dict[str, tuple[Callable[[Config], Any], str]] = {
    "architecture of the target": (lambda c: c.update(architectures=["LlamaForCausalLM"]), "architectures"),
    "model type": (lambda c: c.update(model_type="llama"), "model_type"),
    "no MTP layers": (lambda c: c.update(num_nextn_predict_layers=0), "num_nextn_predict_layers"),
    "head_dim": (lambda c: c.update(head_dim=16), "head_dim"),
    "attention bias": (lambda c: c.update(attention_bias=False), "attention_bias"),
    "mlp bias": (lambda c: c.update(mlp_bias=False), "mlp_bias"),
    "null": (lambda c: c.update(pad_token_id=None), "pad_token_id"),
    "sliding window": (lambda c: c.update(use_sliding_window=True), "use_sliding_window"),
    "untied": (lambda c: c.update(tie_word_embeddings=False), "tie_word_embeddings"),
    "a size with a point": (put(hidden_size=float(D)), "hidden_size"),
    "layers": (lambda c: c.update(num_hidden_layers=3), "num_hidden_layers"),
    "key-value heads": (lambda c: c.pop("num_key_value_heads"), "num_key_value_heads"),
    "norm epsilon": (lambda c: c.update(rms_norm_eps=1e-5), "rms_norm_eps"),
    "dtype": (lambda c: c.update(dtype="bfloat16"), "dtype"),
    "positions": (lambda c: c.update(max_position_embeddings=128), "max_position_embeddings"),
    "quantised": (lambda c: c.update(quantization_config={"bits": 8}), "quantization_config"),
    "rope base": (lambda c: c["rope_parameters"].update(rope_theta=1e4), "rope_parameters"),
    "older rope base": (lambda c: c.update(rope_theta=1e4), "rope_theta"),
    "no rope": (lambda c: c.pop("rope_parameters"), "rope_parameters"),
    "trained with another rope": (lambda c: c["drafthead"].update(inv_freq=[1.0] * 8), "rope_parameters"),
    "no provenance": (lambda c: c.pop("drafthead"), "drafthead.head"),
    "unknown layout": (lambda c: c["drafthead"]["head"].update(layout="other"), "drafthead.head"),
    "another training": (lambda c: c["drafthead"].update(trained_digest="0" * 16), "drafthead.trained_digest"),
    "another dtype": (lambda c: c["drafthead"].update(head_dtype="float64"), "drafthead.head_dtype"),
    "another target": (lambda c: c["drafthead"].update(target_fingerprint="0"), "drafthead.target_fingerprint"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_fault_in_the_config_is_named(export: Path, target: Path, fault: str) -> None:
    change, field = CONFIG_FAULTS[fault]
    change_config(export, change)
    assert field in fields(preflight(export, target))


OF_A_LAYER = {
    **{name: fault for name, fault in SPECULATIVE_FAULTS.items() if fault[1] != "model"},
    "a model of its own": (put(model="/somewhere"), "model"),
}


@pytest.mark.parametrize("fault", OF_A_LAYER)
def test_a_fault_in_the_speculative_config_is_named(export: Path, target: Path, fault: str) -> None:
    change, field = OF_A_LAYER[fault]
    change_config(export, change, SPECULATIVE)
    assert fields(preflight(export, target)) == {f"speculative_config.{field}"}


PREFIX = "model.mtp_layers.0."
TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(PREFIX + "input_proj.weight"), PREFIX + "input_proj.weight"),
    "one bit": (lambda t: t[PREFIX + "mlp.up_proj.weight"][0, :1].add_(1), "drafthead.trained_digest"),
    "transposed": (
        lambda t: t.update({PREFIX + "input_proj.weight": t[PREFIX + "input_proj.weight"].t().contiguous()}),
        PREFIX + "input_proj.weight",
    ),
    "other dtype": (
        lambda t: t.update({PREFIX + "input_proj.weight": t[PREFIX + "input_proj.weight"].half()}),
        PREFIX + "input_proj.weight",
    ),
    "NaN": (lambda t: t[PREFIX + "final_layernorm.weight"].fill_(float("nan")), PREFIX + "final_layernorm.weight"),
    "zero": (lambda t: t[PREFIX + "final_layernorm.weight"].zero_(), PREFIX + "final_layernorm.weight"),
    "a bias of the target": (
        lambda t: t["model.layers.2.self_attn.k_proj.bias"][:1].fill_(1e-6),
        "model.layers.2.self_attn.k_proj.bias",
    ),
    "a bias of the layer": (
        lambda t: t[PREFIX + "self_attn.v_proj.bias"][:1].fill_(1e-6),
        PREFIX + "self_attn.v_proj.bias",
    ),
    "no bias": (
        lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"),
        "model.layers.0.self_attn.q_proj.bias",
    ),
    "no lm_head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
    "another lm_head": (lambda t: t["lm_head.weight"][0, :1].add_(1), "lm_head.weight"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_fault_in_a_tensor_is_named(export: Path, target: Path, fault: str) -> None:
    change, field = TENSOR_FAULTS[fault]
    change_tensors(export, change)
    assert field in fields(preflight(export, target))


def test_an_untrained_layer_is_named(tmp_path: Path, target: Path) -> None:
    head = trained_head(Target(target))
    digests = initial_digests(head.state)
    write_mtp(
        tmp_path / "export",
        TrainedHead(**{**vars(head), "description": {**head.description, "initial_digests": digests}}),
    )
    assert fields(preflight(tmp_path / "export", target)) == {"drafthead.initial_digest"}


def test_the_originals_in_place_of_the_trained_are_named(tmp_path: Path, targets: Callable[[str], Path]) -> None:
    first = make_export(tmp_path / "first", targets("llama"))
    second = tmp_path / "second"
    write_mtp(second, trained_head(Target(first), start="native"))
    originals = load_file(first / "mtp.safetensors")
    change_tensors(second, lambda t: t.update({n: originals[n] for n in t}), "mtp-1.safetensors")
    assert {"drafthead.trained_digest", "drafthead.initial_digest"} == fields(preflight(second, first))


def test_a_tensor_in_two_files_is_named(export: Path, target: Path) -> None:
    """The index names one of them; vLLM reads both."""
    shard = sorted(path.name for path in export.glob("model-*.safetensors"))[-1]
    name, index = PREFIX + "input_proj.weight", (export / mtp.INDEX).read_text()
    change_tensors(export, lambda t: t.update({name: torch.zeros(D, 2 * D)}), shard)
    (export / mtp.INDEX).write_text(index)
    assert fields(preflight(export, target)) == {name}


def test_an_index_that_leads_nowhere_is_named(export: Path, target: Path) -> None:
    name = PREFIX + "input_proj.weight"
    change_config(export, lambda index: index["weight_map"].update({name: "other.safetensors"}), mtp.INDEX)
    assert name in fields(preflight(export, target))
    change_config(export, lambda index: index["weight_map"].pop(name), mtp.INDEX)
    assert name in fields(preflight(export, target))


@pytest.mark.parametrize("fault", ["changed", "missing", "cast"])
def test_a_change_to_the_target_is_named(export: Path, target: Path, fault: str) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    changes: dict[str, Callable[[Tensors], Any]] = {
        "changed": lambda t: t[name][0, :1].add_(1),
        "missing": lambda t: t.pop(name),
        "cast": lambda t: t.update({name: t[name].bfloat16()}),
    }
    change_tensors(export, changes[fault], Target(target).tensor_files[name].name)
    assert fields(preflight(export, target)) == {name}


def test_weights_beside_the_index_are_named(export: Path, target: Path) -> None:
    save_file({PREFIX + "input_proj.weight": torch.randn(D, 2 * D)}, export / "consolidated.safetensors")
    assert fields(preflight(export, target)) == {"consolidated.safetensors"}


def test_a_copy_of_a_shard_is_as_good_as_a_link(export: Path, target: Path) -> None:
    change_tensors(export, lambda t: None, sorted(path.name for path in export.glob("model-*.safetensors"))[0])
    assert preflight(export, target).ok


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_a_file_beside_the_weights_is_held_to_the_targets(export: Path, target: Path, file: str) -> None:
    (export / file).unlink()
    assert fields(preflight(export, target)) == {file}
    (export / file).write_text("other")
    assert fields(preflight(export, target)) == {file}


NATIVE_FAULTS: dict[str, tuple[Callable[[Config], Any], str]] = {
    "no MTP layers": (lambda c: c.update(num_nextn_predict_layers=0), "num_nextn_predict_layers"),
    "another setting": (lambda c: c.update(routed_scaling_factor=2.0), "routed_scaling_factor"),
    "rope base": (lambda c: c["rope_parameters"].update(rope_theta=1e4), "rope_parameters"),
    "trained with another rope": (lambda c: c["drafthead"].update(inv_freq=[1.0] * 4), "drafthead.inv_freq"),
}


@pytest.mark.parametrize("fault", NATIVE_FAULTS)
def test_a_fault_in_a_native_config_is_named(tmp_path: Path, targets: Callable[[str], Path], fault: str) -> None:
    change, field = NATIVE_FAULTS[fault]
    folder = make_export(tmp_path / "export", targets("glm4_moe"))
    change_config(folder, change)
    assert field in fields(preflight(folder, targets("glm4_moe")))

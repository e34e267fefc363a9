"""The exported folder, and a preflight that must name every single fault made in it."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import GateError, InputError
from drafthead.pipeline.export import rope
from drafthead.pipeline.export.eagle3 import HeadOptions, expected_shapes, export_head
from drafthead.pipeline.export.folder import initial_digests, serve_command
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.heads.build import build_frozen_target
from drafthead.pipeline.heads.eagle3 import Eagle3, Eagle3Options
from drafthead.pipeline.recipe import Eagle3Config
from drafthead.pipeline.target import Target
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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

V, U, D, P = 512, 128, 64, 32
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}
OPTIONS = HeadOptions(aux_layer_ids=(1, 2, 4))


def tiny_config(**changes: Any) -> LlamaConfig:
    values: Config = {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": P,
        "max_position_embeddings": 4096,
        "rope_parameters": DEFAULT_ROPE,
        "tie_word_embeddings": True,
        "dtype": torch.float32,
    }
    return LlamaConfig(**{**values, **changes})


def head_state(options: HeadOptions = OPTIONS, draft_vocab: int = U, seed: int = 1) -> Tensors:
    sizes = {
        "hidden_size": D,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": P,
        "vocab_size": V,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": D,
        "num_aux_hidden_states": len(options.aux_layer_ids),
        **options.norms(),
    }
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for name, shape in expected_shapes(sizes).items() if name != "embed_tokens.weight"}
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def draft_map(size: int = U) -> tuple[Tensor, Tensor]:
    """Every fourth target token."""
    ids = torch.arange(size) * (V // size)
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(size), t2d


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "target"
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def make_export(
    folder: Path,
    target: Path,
    options: HeadOptions = OPTIONS,
    draft_vocab: int = U,
    dtype: str = "bfloat16",
    state: Tensors | None = None,
    inv_freq: list[float] | None = None,
) -> Path:
    d2t, t2d = draft_map(draft_vocab)
    raw = json.loads((target / "config.json").read_text())
    export_head(
        folder,
        head_state=state or head_state(options, draft_vocab),
        options=options,
        target=Target(target),
        d2t=d2t,
        t2d=t2d,
        k=3,
        dtype=dtype,
        inv_freq=inv_freq or rope.inverse_frequencies(rope.rope_of(raw), P),
        trained_length=512,
        initial_digests=initial_digests(head_state(options, draft_vocab, seed=2)),
    )
    return folder


@pytest.fixture
def export(tmp_path: Path, tiny_target: Path) -> Path:
    return make_export(tmp_path / "run" / "export", tiny_target)


# ---- a good export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("draft_vocab", [U, V], ids=["reduced", "full vocabulary"])
def test_a_good_export_passes(tmp_path: Path, tiny_target: Path, dtype: str, draft_vocab: int) -> None:
    folder = make_export(tmp_path / "export", tiny_target, draft_vocab=draft_vocab, dtype=dtype)
    report = preflight(folder, tiny_target)
    assert report.failures == []
    assert report.ok
    assert ("d2t" in load_file(folder / "model.safetensors")) is (draft_vocab == U)


@pytest.mark.parametrize("norm", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_every_norm_passes_and_is_held_to_training(tmp_path: Path, tiny_target: Path, norm: str) -> None:
    options = HeadOptions(aux_layer_ids=(0, 3), **{norm: True})
    folder = make_export(tmp_path / "export", tiny_target, options=options)
    assert preflight(folder, tiny_target).ok
    change_config(folder, lambda config: config.update({norm: False}))
    assert norm in fields(preflight(folder, tiny_target))


def test_transformers_reads_the_config(export: Path) -> None:
    config = AutoConfig.from_pretrained(export)
    assert config.model_type == "llama"
    assert config.num_hidden_layers == 1
    assert config.rope_parameters["rope_theta"] == 1e6
    assert config.eagle_aux_hidden_state_layer_ids == [1, 2, 4]


def test_tensors_are_those_given_and_the_embeddings_those_of_the_target(export: Path, tiny_target: Path) -> None:
    tensors = load_file(export / "model.safetensors")
    for name, tensor in head_state().items():
        assert torch.equal(tensors[name], tensor.to(torch.bfloat16))
    assert torch.equal(tensors["embed_tokens.weight"], Target(tiny_target).embedding_VD.to(torch.bfloat16))
    assert torch.equal(torch.arange(U) + tensors["d2t"], torch.arange(U) * 4)


def test_the_serve_command_survives_the_shell(tmp_path: Path, tiny_target: Path) -> None:
    target = tmp_path / "it's a target"
    shutil.copytree(tiny_target, target)
    folder = make_export(tmp_path / "my run" / "export", target)
    words = shlex.split(serve_command(target, folder))
    assert words[:4] == ["vllm", "serve", str(target), "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    assert preflight(folder, target).serve_command == serve_command(target, folder)


def test_the_serve_command_follows_a_run_that_was_moved(tmp_path: Path, tiny_target: Path) -> None:
    make_export(tmp_path / "before" / "export", tiny_target)
    moved = (tmp_path / "before").rename(tmp_path / "after") / "export"
    assert f'"model":"{moved}"' in serve_command(tiny_target, moved)


def test_an_export_that_fails_leaves_the_old_one_whole(export: Path, tiny_target: Path) -> None:
    before = {path.name: path.read_bytes() for path in export.iterdir()}
    broken = head_state()
    broken["fc.weight"] = torch.ones(2, 2, device="meta")
    with pytest.raises(NotImplementedError):
        make_export(export, tiny_target, state=broken)
    assert {path.name: path.read_bytes() for path in export.iterdir()} == before
    assert [path.name for path in export.parent.iterdir()] == ["export"]


def test_exporting_again_replaces_the_folder(export: Path, tiny_target: Path) -> None:
    (export / "leftover.bin").write_bytes(b"old")
    make_export(export, tiny_target, dtype="float32")
    assert sorted(path.name for path in export.iterdir()) == [
        "config.json",
        "model.safetensors",
        "speculative_config.json",
    ]
    assert preflight(export, tiny_target).ok
    assert [path.name for path in export.parent.iterdir()] == ["export"]


def test_a_reduced_head_without_its_map_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    with pytest.raises(InputError, match="d2t"):
        export_head(
            tmp_path / "export",
            head_state=head_state(),
            options=OPTIONS,
            target=Target(tiny_target),
            d2t=None,
            t2d=None,
            k=3,
            dtype="float32",
            inv_freq=[1.0],
            trained_length=512,
            initial_digests=initial_digests(head_state()),
        )


@pytest.mark.parametrize(
    ("heads", "groups", "head_dim"), [(4, 2, 48), (2, 2, 16), (8, 1, 32)], ids=["wider", "narrower", "one group"]
)
def test_heads_of_their_own_width_round_trip(tmp_path: Path, heads: int, groups: int, head_dim: int) -> None:
    """A109: head_dim is not hidden_size / heads; the exported config alone builds the module that was trained."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim}
    LlamaForCausalLM(tiny_config(**sizes)).save_pretrained(tmp_path / "target")  # type: ignore[no-untyped-call]
    target, (d2t, t2d) = Target(tmp_path / "target"), draft_map()
    head = Eagle3.fresh(Eagle3Config(), target, build_frozen_target(target, DraftVocab(d2t, t2d)), num_aux=3)
    initial = initial_digests(head.state_dict())
    state = {name: tensor + 0.01 for name, tensor in head.state_dict().items()}
    export_head(
        tmp_path / "export",
        head_state=state,
        options=OPTIONS,
        target=target,
        d2t=d2t,
        t2d=t2d,
        k=3,
        dtype="float32",
        inv_freq=head.inverse_frequencies(),
        trained_length=512,
        initial_digests=initial,
    )
    assert preflight(tmp_path / "export", target.path).failures == []
    config = AutoConfig.from_pretrained(tmp_path / "export")
    assert {name: getattr(config, name) for name in sizes} == sizes
    again = Eagle3(config, Eagle3Options(num_aux=3, draft_vocab_size=U))
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    again.load_state_dict({name: tensors[name] for name in state})
    assert again.inverse_frequencies() == head.inverse_frequencies()


# ---- one fault each --------------------------------------------------------------------------------------


IDS = "eagle_aux_hidden_state_layer_ids"
CONFIG_FAULTS: dict[str, tuple[Callable[[Config], Any], str]] = {
    **export_faults.CONFIG_FAULTS,
    "no aux ids": (lambda c: c.pop(IDS), IDS),
    "aux ids out of range": (lambda c: c.update({IDS: [1, 2, 5]}), IDS),
    "aux ids negative": (lambda c: c.update({IDS: [-1, 2, 4]}), IDS),
    "aux ids not ascending": (lambda c: c.update({IDS: [2, 1, 4]}), IDS),
    "aux ids repeated": (lambda c: c.update({IDS: [2, 2, 4]}), IDS),
    "aux ids of another training": (lambda c: c.update({IDS: [0, 2, 4]}), "aux_layer_ids"),
    "nested aux ids differ": (lambda c: c["eagle_config"].update({IDS: [0, 1, 2]}), f"eagle_config.{IDS}"),
    "aux states switched off": (
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "eagle_config.use_aux_hidden_state",
    ),
    "nested norm wins": (
        lambda c: c["eagle_config"].update(norm_before_fc=True),
        "eagle_config.norm_before_fc",
    ),
    "aux count": (lambda c: c.update(num_aux_hidden_states=2), "num_aux_hidden_states"),
    "layer count of the target": (lambda c: c.update(num_hidden_layers=4), "num_hidden_layers"),
    "dtype against tensors": (lambda c: c.update(dtype="float32", torch_dtype="float32"), "fc.weight"),
    "null": (lambda c: c.update(pad_token_id=None), "pad_token_id"),
    "nested null": (lambda c: c["rope_parameters"].update(factor=None), "rope_parameters.factor"),
    "2048 positions": (lambda c: c.update(max_position_embeddings=2048), "max_position_embeddings"),
    "tied embeddings": (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
    "another activation": (lambda c: c.update(hidden_act="gelu"), "hidden_act"),
    "head_dim": (lambda c: c.update(head_dim=16), "midlayer.self_attn.q_proj.weight"),
    "head count": (lambda c: c.update(num_attention_heads=4), "midlayer.self_attn.q_proj.weight"),
    "key-value heads": (lambda c: c.update(num_key_value_heads=2), "midlayer.self_attn.k_proj.weight"),
    "no head_dim": (lambda c: c.pop("head_dim"), "head_dim"),
    "draft_vocab_size": (lambda c: c.update(draft_vocab_size=100), "lm_head.weight"),
    "draft_vocab_size above the target's": (lambda c: c.update(draft_vocab_size=600), "draft_vocab_size"),
    "hidden size of the target": (lambda c: c.update(target_hidden_size=96), "target_hidden_size"),
    "norm epsilon": (lambda c: c.update(rms_norm_eps=1e-5), "rms_norm_eps"),
    "attention bias": (lambda c: c.update(attention_bias=True), "attention_bias"),
    "mlp bias": (lambda c: c.update(mlp_bias=True), "mlp_bias"),
    "norm flag missing": (lambda c: c.pop("norm_output"), "norm_output"),
    "norm flag flipped": (lambda c: c.update(norm_before_residual=True), "norm_before_residual"),
    "architecture": (lambda c: c.update(architectures=["LlamaForCausalLM"]), "architectures"),
    "model type": (lambda c: c.update(model_type="eagle"), "model_type"),
    "biases by another name": (put(qkv_bias=True), "qkv_bias"),
    "layers by type": (put(layer_types=["sliding_attention"]), "layer_types"),
    "layer ids as text": (put(**{IDS: ["1", "2", "4"]}), IDS),
    "layer ids of another convention": (
        lambda c: [held.update({IDS: [2, 3, 5]}) for held in (c, c["eagle_config"])],
        IDS,
    ),
    "no nested ids": (drop("eagle_config"), f"eagle_config.{IDS}"),
    "a flag as number": (put(norm_before_fc=0), "norm_before_fc"),
    "rope base as text": (put(rope_theta="1e6"), "rope_theta"),
    "rope base zero": (lambda c: c["rope_parameters"].update(rope_theta=0), "rope_parameters"),
    "rope nested by layer type": (
        lambda c: c.update(rope_parameters={"full_attention": c["rope_parameters"]}),
        "rope_parameters",
    ),
    "rope for images": (lambda c: c["rope_parameters"].update(mrope_section=[4, 6, 6]), "rope_parameters"),
    "rope of two types": (lambda c: c["rope_parameters"].update(type="yarn"), "rope_parameters"),
    "rope of another width": (lambda c: c["rope_parameters"].update(rope_dim=8), "rope_parameters"),
    "older rope scaled": (put(rope_scaling={"rope_type": "linear", "factor": 8.0}), "rope_scaling"),
    "older partial rotation": (put(partial_rotary_factor=0.25), "partial_rotary_factor"),
    "another way to rotate": (put(is_neox_style=False), "is_neox_style"),
    "rope base": (lambda c: c["rope_parameters"].update(rope_theta=10000.0), "rope_parameters"),
    "older rope base": (lambda c: c.update(rope_theta=10000.0), "rope_theta"),
    "no older rope schema": (lambda c: c.pop("rope_theta"), "rope_theta"),
    "no newer rope schema": (lambda c: c.pop("rope_parameters"), "rope_parameters"),
    "rope type": (lambda c: c["rope_parameters"].update(rope_type="dynamic"), "rope_parameters.rope_type"),
    "partial rotation": (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.5), "rope_parameters"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_fault_in_the_config_is_named(export: Path, tiny_target: Path, fault: str) -> None:
    change, field = CONFIG_FAULTS[fault]
    change_config(export, change)
    report = preflight(export, tiny_target)
    assert not report.ok
    assert field in fields(report)
    assert all(failure.keys() == {"gate", "field", "message"} for failure in report.failures)


def _zero(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors[name].zero_()


SQUARE, QUERIES = "midlayer.self_attn.o_proj.weight", "midlayer.self_attn.q_proj.weight"
TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no lm_head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
    "no embeddings": (lambda t: t.pop("embed_tokens.weight"), "embed_tokens.weight"),
    "random embeddings": (lambda t: t["embed_tokens.weight"].normal_(), "embed_tokens.weight"),
    "one bit of the embeddings": (poke("embed_tokens.weight", 0.5), "embed_tokens.weight"),
    "no d2t": (lambda t: t.pop("d2t"), "d2t"),
    "d2t holds target ids": (lambda t: t["d2t"].add_(torch.arange(U)), "d2t"),
    "d2t not ascending": (lambda t: t["d2t"][5:6].fill_(0), "d2t"),
    "d2t beyond the vocabulary": (lambda t: t["d2t"][-1:].fill_(V), "d2t"),
    "d2t negative": (lambda t: t["d2t"][:1].fill_(-1), "d2t"),
    "d2t of int32": (lambda t: t.update(d2t=t["d2t"].int()), "d2t"),
    "t2d of another map": (lambda t: t["t2d"][1:2].fill_(True), "t2d"),
    "random lm_head": (redraw("lm_head.weight"), "drafthead.trained_digest"),
    "random fc": (redraw("fc.weight"), "drafthead.trained_digest"),
    "lm_head one row off": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].roll(1, 0)}),
        "drafthead.trained_digest",
    ),
    "gate for up": (swap("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"), "drafthead.trained_digest"),
    "a square matrix transposed": (
        lambda t: t.update({SQUARE: t[SQUARE].t().contiguous()}),
        "drafthead.trained_digest",
    ),
    "halves of each query head exchanged": (
        lambda t: t.update({QUERIES: t[QUERIES].view(-1, 2, P // 2, 2 * D).flip(1).reshape(t[QUERIES].shape)}),
        "drafthead.trained_digest",
    ),
    "last token of the map": (lambda t: t["d2t"][-1:].add_(1), "t2d"),
    "last token of both maps": (
        lambda t: (t["d2t"][-1:].add_(1), t["t2d"][-4:].copy_(torch.tensor([False, True, False, False]))),
        "drafthead.map_digest",
    ),
    "keys for values": (
        swap("midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight"),
        "drafthead.trained_digest",
    ),
    "map one token off": (
        lambda t: t.update(d2t=t["d2t"] + 1, t2d=t["t2d"].roll(1)),
        "drafthead.map_digest",
    ),
    "embeddings one row off": (
        lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"].roll(1, 0)}),
        "embed_tokens.weight",
    ),
    "extra tensor": (lambda t: t.update({"midlayer.extra.weight": torch.ones(2)}), "midlayer.extra.weight"),
    "extra bias": (
        lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(64)}),
        "midlayer.self_attn.q_proj.bias",
    ),
    "missing tensor": (lambda t: t.pop("midlayer.mlp.up_proj.weight"), "midlayer.mlp.up_proj.weight"),
    "renamed tensor": (
        lambda t: t.update({"layers.0.hidden_norm.weight": t.pop("midlayer.hidden_norm.weight")}),
        "midlayer.hidden_norm.weight",
    ),
    "transposed tensor": (
        lambda t: t.update({"fc.weight": t["fc.weight"].t().contiguous()}),
        "fc.weight",
    ),
    "one tensor of float32": (lambda t: t.update({"norm.weight": t["norm.weight"].float()}), "norm.weight"),
    "NaN": (poke("fc.weight", float("nan")), "fc.weight"),
    "infinity": (poke("lm_head.weight", float("inf")), "lm_head.weight"),
    "all zero": (_zero("midlayer.self_attn.o_proj.weight"), "midlayer.self_attn.o_proj.weight"),
    "norm without an option": (
        lambda t: t.update({"input_norm.weight": torch.ones(3 * D, dtype=torch.bfloat16)}),
        "input_norm.weight",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_fault_in_the_tensors_is_named(export: Path, tiny_target: Path, fault: str) -> None:
    change, field = TENSOR_FAULTS[fault]
    change_tensors(export, change)
    report = preflight(export, tiny_target)
    assert not report.ok
    assert fields(report) == {field} or fault in ("renamed tensor",)
    assert field in fields(report)


def test_a_map_of_the_full_vocabulary_is_a_fault(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_export(tmp_path / "export", tiny_target, draft_vocab=V)
    change_tensors(folder, lambda tensors: tensors.update(d2t=torch.zeros(V, dtype=torch.int64)))
    assert fields(preflight(folder, tiny_target)) == {"d2t"}


@pytest.mark.parametrize("fault", SPECULATIVE_FAULTS)
def test_a_fault_in_the_speculative_config_is_named(export: Path, tiny_target: Path, fault: str) -> None:
    change, field = SPECULATIVE_FAULTS[fault]
    change_config(export, change, SPECULATIVE)
    assert fields(preflight(export, tiny_target)) == {f"speculative_config.{field}"}


def test_choices_of_serving_pass(export: Path, tiny_target: Path) -> None:
    schedule = [[1, 8, 3], [9, 64, 1]]
    change_config(export, put(num_speculative_tokens_per_batch_size=schedule), SPECULATIVE)
    assert preflight(export, tiny_target).ok


def test_links_that_lead_in_a_circle_are_named(export: Path, tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    change_config(export, put(model=str(tmp_path / "one")), SPECULATIVE)
    assert fields(preflight(export, tiny_target)) == {"speculative_config.model"}


def test_a_file_that_says_quantised_is_named(export: Path, tiny_target: Path) -> None:
    """A119: vLLM reads ModelOpt's file beside a config without a block; the head would be looked for quantised."""
    (export / "hf_quant_config.json").write_text("{}")
    assert fields(preflight(export, tiny_target)) == {"hf_quant_config.json"}


def test_a_fine_tune_of_the_same_size_and_time_is_another_target(
    export: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """A114: as in an image whose files all have one time; the remembered hash must not be taken."""
    target = Path(shutil.copytree(tiny_target, tmp_path / "tuned"))
    assert preflight(export, target).ok
    path = target / "model.safetensors"
    stat, tensors = path.stat(), load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert fields(preflight(export, target)) == {"drafthead.target_fingerprint"}


@pytest.mark.parametrize("name", ["model-2.safetensors", "consolidated.safetensors", "model.safetensors.index.json"])
def test_further_weights_are_named(export: Path, tiny_target: Path, name: str) -> None:
    save_file({"lm_head.weight": torch.randn(U, D)}, export / name)
    assert fields(preflight(export, tiny_target)) == {name}


def test_a_missing_speculative_config_is_a_fault(export: Path, tiny_target: Path) -> None:
    (export / "speculative_config.json").unlink()
    report = preflight(export, tiny_target)
    assert fields(report) == {"speculative_config.json"}
    assert report.serve_command == ""


@pytest.mark.parametrize("which", ["no export", "no target", "export without tensors", "torn tensors", "swapped"])
def test_a_wrong_folder_is_one_line(export: Path, tiny_target: Path, which: str) -> None:
    if which == "export without tensors":
        (export / "model.safetensors").unlink()
    if which == "torn tensors":
        whole = (export / "model.safetensors").read_bytes()
        (export / "model.safetensors").write_bytes(whole[:-100])
    folder = export / "nowhere" if which == "no export" else export
    target = tiny_target / "nowhere" if which == "no target" else tiny_target
    if which == "swapped":
        change_config(export, lambda config: config.pop("num_hidden_layers"))
        folder, target = target, folder
    with pytest.raises(InputError) as caught:
        preflight(folder, target)
    assert "\n" not in str(caught.value)


# ---- rotary embeddings -----------------------------------------------------------------------------------

ROPES: dict[str, Config] = {
    "default 1e6": DEFAULT_ROPE,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn with options": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


def rope_target(folder: Path, source: Path, parameters: Config, older_schema: bool = False) -> Path:
    shutil.copytree(source, folder)

    def change(config: Config) -> None:
        config.pop("rope_parameters")
        if older_schema:
            scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
            config["rope_theta"] = parameters["rope_theta"]
            config["rope_scaling"] = scaling if scaling["rope_type"] != "default" else None
        else:
            config["rope_parameters"] = parameters

    change_config(folder, change)
    return folder


def trained_frequencies(parameters: Config) -> tuple[list[float], float]:
    """What transformers computes, as a head in training would."""
    embedding = LlamaRotaryEmbedding(tiny_config(rope_parameters=dict(parameters)))
    return embedding.inv_freq.tolist(), float(embedding.attention_scaling)


@pytest.mark.parametrize("older_schema", [False, True], ids=["newer schema", "older schema"])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_is_that_of_training_in_both_schemas(
    tmp_path: Path, tiny_target: Path, kind: str, older_schema: bool
) -> None:
    target = rope_target(tmp_path / "target", tiny_target, ROPES[kind], older_schema)
    trained, scaling = trained_frequencies(ROPES[kind])
    folder = make_export(tmp_path / "export", target, inv_freq=trained)
    assert preflight(folder, target).failures == []
    config = json.loads((folder / "config.json").read_text())
    for read in (rope.rope_of(config), rope.legacy_rope(config)):
        assert rope.inverse_frequencies(read, P) == pytest.approx(trained, rel=2e-5)
        assert rope.attention_scaling(read) == pytest.approx(scaling)
    reread = AutoConfig.from_pretrained(folder)
    assert LlamaRotaryEmbedding(reread).inv_freq.tolist() == pytest.approx(trained, rel=2e-5)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_head_trained_without_the_scaling_is_refused(tmp_path: Path, tiny_target: Path, kind: str) -> None:
    target = rope_target(tmp_path / "target", tiny_target, ROPES[kind])
    plain = {"rope_type": "default", "rope_theta": ROPES[kind]["rope_theta"]}
    folder = make_export(tmp_path / "export", target, inv_freq=trained_frequencies(plain)[0])
    report = preflight(folder, target)
    assert fields(report) == {"rope_parameters", "rope_theta"}
    assert {failure["gate"] for failure in report.failures} == {"RopeGate"}


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_dropped_scaling_is_refused(tmp_path: Path, tiny_target: Path, kind: str) -> None:
    target = rope_target(tmp_path / "target", tiny_target, ROPES[kind])
    folder = make_export(tmp_path / "export", target)
    change_config(folder, lambda config: config.pop("rope_scaling"))
    assert fields(preflight(folder, target)) == {"rope_theta"}


FACTORS = {"short_factor": [1.0] * (P // 2), "long_factor": [2.0] * (P // 2)}
"""Which transformers asks of longrope."""


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "sideways"])
def test_an_unknown_rope_type_is_refused_at_export(tmp_path: Path, tiny_target: Path, kind: str) -> None:
    target = rope_target(
        tmp_path / "target", tiny_target, {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **FACTORS}
    )
    with pytest.raises(GateError, match=f"RopeGate.*{kind}"):
        make_export(tmp_path / "export", target, inv_freq=[1.0])
    assert not (tmp_path / "export").exists()


def test_partial_rotation_counts_the_rotated_pairs_alone() -> None:
    read = rope.rope_of({"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.25}})
    frequencies = rope.inverse_frequencies(read, 256)
    assert len(frequencies) == 32
    assert frequencies[1] == pytest.approx(1e6 ** (-2 / 64))


def test_partial_rotation_trained_in_full_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    target = rope_target(tmp_path / "target", tiny_target, {**DEFAULT_ROPE, "partial_rotary_factor": 0.5})
    folder = make_export(tmp_path / "export", target, inv_freq=trained_frequencies(DEFAULT_ROPE)[0])
    assert fields(preflight(folder, target)) == {"rope_parameters", "rope_theta"}


def test_nested_and_image_parameters_are_flattened() -> None:
    nested = {
        "full_attention": DEFAULT_ROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert rope.rope_of({"rope_parameters": nested}) == DEFAULT_ROPE
    image = {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}
    assert rope.rope_of({"rope_parameters": image}) == DEFAULT_ROPE


def test_a_missing_base_is_not_guessed() -> None:
    with pytest.raises(InputError, match="rope_theta"):
        rope.rope_of({"model_type": "qwen3"})
    assert rope.rope_of({"model_type": "llama"})["rope_theta"] == 1e4

"""What is read of a target: its tensors under the names of several families, its sizes, and its rotary embedding.

The rotary embeddings are those of transformers' own modules of each family, of our reader of an exported config and,
where it is installed, of vLLM: all three must be the one that a head is trained with.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.errors import GateError, InputError
from drafthead.eval.engine import is_available
from drafthead.pipeline.export import rope
from drafthead.pipeline.heads.blocks import rope_frequencies
from drafthead.pipeline.heads.build import check_rope, check_sizes, check_target
from drafthead.pipeline.recipe import Eagle3Config, MedusaConfig
from drafthead.pipeline.target import Target, open_target
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronHConfig, Qwen2VLConfig
from transformers import Qwen2VLForConditionalGeneration as Qwen2VL
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from tests.conftest import CommandLine

V, D = 64, 32
Config = dict[str, Any]
SIZES: Config = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))


# ---- names -----------------------------------------------------------------------------------------------


def llama(tied: bool = False, **changes: Any) -> Any:
    config = LlamaConfig(**{**SIZES, "head_dim": 24, "tie_word_embeddings": tied, **changes})
    return AutoModelForCausalLM.from_config(config)


def vision(tied: bool = False) -> Any:
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
    eye = {"depth": 1, "embed_dim": 16, "hidden_size": D, "num_heads": 2, "mlp_ratio": 2}
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    return Qwen2VL(Qwen2VLConfig(text_config=text, vision_config=eye, tie_word_embeddings=tied, **ids))


def nemotron_h() -> Any:
    layers = ["mamba", "attention", "mlp", "mamba", "mlp", "attention"]
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8}
    sizes = {name: value for name, value in SIZES.items() if name not in ("rms_norm_eps", "num_hidden_layers")}
    config = NemotronHConfig(**sizes, **mamba, head_dim=16, layers_block_type=layers, layer_norm_epsilon=3e-5)
    return AutoModelForCausalLM.from_config(config)


LLAMA_NAMES = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
MADE: dict[str, tuple[Callable[[], Any], tuple[str, str, str]]] = {
    "one shard without an index": (llama, LLAMA_NAMES),
    "tied lm_head": (lambda: llama(tied=True), (LLAMA_NAMES[0], LLAMA_NAMES[0], LLAMA_NAMES[2])),
    "a vision model's": (
        vision,
        ("model.language_model.embed_tokens.weight", "lm_head.weight", "model.language_model.norm.weight"),
    ),
    "a Mamba hybrid's": (nemotron_h, ("backbone.embeddings.weight", "lm_head.weight", "backbone.norm_f.weight")),
}

PUBLISHED = {"a vision model's": "model.language_model.", "a Mamba hybrid's": "backbone."}
"""How published checkpoints say `model.`."""


def renamed(folder: Path, names: dict[str, str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    moved = {names.get(name, name): tensor for name, tensor in tensors.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", MADE)
def test_embedding_lm_head_and_norm_are_found(kind: str, tmp_path: Path) -> None:
    make, names = MADE[kind]
    model = make()
    model.save_pretrained(tmp_path / "target")
    if kind in PUBLISHED:  # transformers writes a spelling of its own
        stored = [name for name in Target(tmp_path / "target").tensor_files if name.startswith("model.")]
        renamed(tmp_path / "target", {name: name.replace("model.", PUBLISHED[kind], 1) for name in stored})
    target = Target(tmp_path / "target")
    assert tuple(target.tensor_names[what] for what in ("embedding", "lm_head", "final norm")) == names
    assert not (target.path / "model.safetensors.index.json").exists()
    assert torch.equal(target.embedding_VD, model.get_input_embeddings().weight)
    assert torch.equal(target.lm_head_VD, model.get_output_embeddings().weight)
    check_sizes(MedusaConfig(type="medusa"), target)


def test_a_vision_model_is_run_as_its_language_model(tmp_path: Path) -> None:
    model = vision().eval()
    model.save_pretrained(tmp_path / "target")
    target = Target(tmp_path / "target")
    ids = torch.tensor([[3, 1, 4, 1, 5 + 10, 9]])
    loaded = target.load(torch.float32, "cpu")
    with torch.inference_mode():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    check_rope(target)


@pytest.mark.parametrize("lost", LLAMA_NAMES)
def test_unknown_names_are_an_error_with_candidates_before_any_work(lost: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "target")
    renamed(tmp_path / "target", {lost: "something.else.weight"})
    with pytest.raises(InputError, match=r"under any known name; tensors outside the layers:.*something\.else\.weight"):
        check_target(Eagle3Config(), V, Target(tmp_path / "target"))


def test_a_missing_lm_head_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    llama(tied=True).save_pretrained(tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(InputError, match="no lm_head under any known name"):
        assert Target(tmp_path / "target").lm_head_VD is not None


def test_an_epsilon_of_another_name_is_found(tmp_path: Path) -> None:
    nemotron_h().save_pretrained(tmp_path / "target")
    assert Target(tmp_path / "target").config.rms_norm_eps == 3e-5


# ---- before any work -------------------------------------------------------------------------------------


def write_config(folder: Path, **values: Any) -> Target:
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, **SIZES}
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return Target(folder)


def test_a_last_layer_of_another_kind_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "target")
    name = "model.layers.5.self_attn.q_proj.weight"
    check_target(Eagle3Config(), V, Target(tmp_path / "target"))
    path = tmp_path / "target/model.safetensors"
    tensors = load_file(path)
    for change, named in ((lambda one: torch.cat([one, one]), r"\[96, 32\] instead of \[48, 32\]"), (None, "no such")):
        changed: dict[str, Tensor] = {**tensors, name: change(tensors[name])} if change else dict(tensors)
        if change is None:
            del changed[name]
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(InputError, match=rf"{named}.*set head\.init_from_target=false"):
            check_target(Eagle3Config(), V, Target(tmp_path / "target"))
        check_target(Eagle3Config(init_from_target=False), V, Target(tmp_path / "target"))


def test_a_target_without_a_needed_size_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 4, "num_heads": 2, "head_dim": 32}
    target = write_config(tmp_path / "target", model_type="mamba2", **sizes)
    target.config.intermediate_size = None
    with pytest.raises(InputError, match="no intermediate_size: a mamba2 target has no eagle3 head here"):
        check_sizes(Eagle3Config(), target)


def test_head_counts_that_no_llama_has_are_refused(tmp_path: Path) -> None:
    target = write_config(tmp_path / "target", model_type="qwen3", num_attention_heads=6, head_dim=16)
    with pytest.raises(InputError, match="num_attention_heads=6 does not divide hidden_size=32"):
        check_sizes(Eagle3Config(), target)
    check_sizes(MedusaConfig(type="medusa"), target)


# ---- rotary embeddings (C13) -----------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
WIDE = {"head_dim": 256}
QWEN3_5 = {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 6, **WIDE}
ROPES: dict[str, tuple[Config, Any, int]] = {
    "base 1e6, older keys": ({"rope_theta": 1e6}, LlamaRotaryEmbedding, 8),
    "base under rope_parameters alone": ({"rope_parameters": {"rope_theta": 1e6}}, LlamaRotaryEmbedding, 8),
    "llama3, older keys": ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, LlamaRotaryEmbedding, 8),
    "llama3": ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, LlamaRotaryEmbedding, 8),
    "yarn, older keys": ({"rope_theta": 1e6, "rope_scaling": YARN}, LlamaRotaryEmbedding, 8),
    "yarn": ({"rope_parameters": {**YARN, "rope_theta": 1e6}}, LlamaRotaryEmbedding, 8),
    "a quarter of 256 channels": (
        {**QWEN3_5, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}},
        Qwen3_5TextRotaryEmbedding,
        32,
    ),
    "a quarter that only the family knows": ({**QWEN3_5, "rope_parameters": DEFAULT}, Qwen3_5TextRotaryEmbedding, 32),
    "nested by layer type": (
        {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": LOCAL, "full_attention": DEFAULT}},
        Gemma3RotaryEmbedding,
        8,
    ),
    "M-RoPE": (
        {"model_type": "qwen2_vl_text", "rope_parameters": {**DEFAULT, "mrope_section": [2, 3, 3], "type": "mrope"}},
        Qwen2VLRotaryEmbedding,
        8,
    ),
}


def raw_config(kind: str) -> Config:
    return {"model_type": "llama", "head_dim": 16, **SIZES, **ROPES[kind][0]}


def of_transformers(kind: str, target: Target) -> tuple[Tensor, float]:
    module = ROPES[kind][1](target.config)
    prefix = "full_attention_" if kind == "nested by layer type" else ""
    scaling = float(getattr(module, f"{prefix}attention_scaling"))
    return getattr(module, f"{prefix}inv_freq"), scaling


def write_rope_target(folder: Path, kind: str) -> Target:
    raw = raw_config(kind)
    if kind == "M-RoPE":
        raw = {"model_type": "qwen2_vl", "text_config": raw}
    return write_config(folder, **raw)


@pytest.mark.parametrize("kind", ROPES)
def test_heads_are_trained_with_the_targets_rotary_embedding_and_exported_with_it(kind: str, tmp_path: Path) -> None:
    target = write_rope_target(tmp_path / "target", kind)
    trained, factor = rope_frequencies(target.config)
    wanted, scaling = of_transformers(kind, target)
    torch.testing.assert_close(trained, wanted, rtol=1e-6, atol=0)
    assert factor == pytest.approx(scaling)
    assert len(trained) == ROPES[kind][2]
    check_rope(target)

    written = rope.both_schemas(rope.rope_of(raw_config(kind)))
    assert not {"type", "mrope_section"} & written["rope_parameters"].keys()
    exported = {"model_type": "llama", "max_position_embeddings": 4096, "head_dim": target.head_dim, **written}
    for read in (rope.rope_of(exported), rope.legacy_rope(exported)):
        assert rope.inverse_frequencies(read, target.head_dim) == pytest.approx(trained.tolist(), rel=2e-5)
        assert rope.attention_scaling(read) == pytest.approx(factor)
    reread = LlamaConfig(**{**SIZES, **exported})
    again, _ = rope_frequencies(reread)
    torch.testing.assert_close(again, trained, rtol=1e-6, atol=0)


@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
@pytest.mark.parametrize("kind", ROPES)
def test_vllm_computes_the_same_from_what_is_exported(kind: str, tmp_path: Path) -> None:
    """From the config as vLLM's own loader reads it back; on a CPU its modules need no engine for this."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.transformers_utils.config import get_config

    target = write_rope_target(tmp_path / "target", kind)
    written = rope.both_schemas(rope.rope_of(raw_config(kind)))
    sizes = {**SIZES, "head_dim": target.head_dim}
    folder = write_config(tmp_path / "export", **sizes, **written).path
    config = get_config(str(folder), trust_remote_code=False)
    with set_current_vllm_config(VllmConfig()):
        rotary = get_rope(target.head_dim, 4096, rope_parameters=config.rope_parameters, dtype=torch.float32)
    trained, factor = rope_frequencies(target.config)
    positions = torch.arange(0, 1024, 31).float()
    angle = positions[:, None] * trained
    wanted = torch.cat([angle.cos() * factor, angle.sin() * factor], -1)
    torch.testing.assert_close(rotary.cos_sin_cache[::31][: len(positions)].float(), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_parameters": {"rope_type": "sideways", "rope_theta": 1e4, "factor": 2.0}}, "sideways"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"model_type": "gemma4_text", "rope_parameters": {"full_attention": PROPORTIONAL}}, "."),
        (
            {"rope_parameters": {"chunked_attention": DEFAULT, "sliding_attention": LOCAL}},
            "full_attention: missing among the layer types",
        ),
    ],
    ids=["unknown", "dynamic", "proportional", "none of full attention"],
)
def test_a_rotary_embedding_that_no_head_can_follow_is_refused(values: Config, named: str, tmp_path: Path) -> None:
    with pytest.raises((GateError, InputError), match=named) as caught:
        check_rope(write_config(tmp_path / "target", **values))
    assert "\n" not in str(caught.value)


# ---- the command line ------------------------------------------------------------------------------------


def test_a_plan_says_which_tensors_were_chosen(drafthead: CommandLine, tmp_path: Path) -> None:
    """Vocabulary 512 and the tokenizer of the built-in target, so that all checks before work pass."""
    llama(tied=True, vocab_size=512).save_pretrained(tmp_path / "target")
    for path in open_target("builtin:tiny-random").path.glob("*"):
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, tmp_path / "target" / path.name)
    command = ("run", "smoke/eagle3", f"target={tmp_path}/target", "capture.aux_layers=[1,3,5]", "--plan")
    done = drafthead(*command)
    assert done.code == 0, done.stderr
    assert "embedding model.embed_tokens.weight, lm_head model.embed_tokens.weight (tied)" in done.stdout
    told = drafthead(*command, "--json").json()
    assert told["target"]["tensors"]["lm_head"] == "model.embed_tokens.weight"


def test_unusable_targets_are_one_line_before_any_work(drafthead: CommandLine, tmp_path: Path) -> None:
    llama(vocab_size=512, num_hidden_layers=5).save_pretrained(tmp_path / "target")
    done = drafthead("run", "smoke/eagle3", f"target={tmp_path}/target")
    assert done.code == 2
    assert len(done.complaints) == 1
    assert "capture.aux_layers=[2, 2, 2] (the default of a target of 5 layers)" in done.complaints[0]
    assert "such as capture.aux_layers=[1, 2, 4]" in done.complaints[0]
    assert not (tmp_path / "runs").exists()

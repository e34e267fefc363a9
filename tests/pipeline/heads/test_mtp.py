"""MTP layers against what vLLM computes around transformers' own decoder layers, and their unroll against serving.

`Served` restates vllm/model_executor/models/{mimo,qwen3_5,qwen3_next,deepseek,glm4_moe}_mtp.py line by line; the
decoder layer inside is transformers' module of that family, given the head's weights.

Shapes: T packed tokens, S entries of one served sequence, D hidden, V vocabulary, K unroll depth.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.pipeline.heads import recursive
from drafthead.pipeline.heads.base import FrozenTarget, HeadBatch, HeadOutput, Objective
from drafthead.pipeline.heads.build import build_head, check_target
from drafthead.pipeline.heads.mtp import MTP, MTPOptions
from drafthead.pipeline.heads.mtp_layouts import LAYOUTS, resolve_layout
from drafthead.pipeline.heads.recursive import DraftCache, decode_step
from drafthead.pipeline.recipe import MTPConfig
from drafthead.pipeline.target import Target
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, LlamaConfig, Qwen2Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from tests.pipeline.heads.conftest import WAYS
from tests.pipeline.heads.documents import Document, pack

V, D, K, N = 24, 32, 3, 4
EPS = 1e-6
COMMON: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": N,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family: its configuration, transformers' modules, and what vLLM does with its MTP layer."""

    layout: str
    config: Callable[[], Any]
    decoder_layer: Any
    rotary: Any
    norm_adds_one: bool = False
    fed_behind_the_final_norm: bool
    hidden_first: bool = False
    first_embedding_is_zero: bool = True
    feeds_back_what_the_lm_head_reads: bool = True
    qkv_bias: bool = False


def full_attention() -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * N}


CASES = {
    "mimo of a llama": Case(
        layout="mimo",
        config=lambda: LlamaConfig(**COMMON, rope_parameters=ROPE),
        decoder_layer=llama.LlamaDecoderLayer,
        rotary=llama.LlamaRotaryEmbedding,
        fed_behind_the_final_norm=False,
        hidden_first=True,
    ),
    "mimo of a qwen2": Case(
        layout="mimo",
        config=lambda: Qwen2Config(**COMMON, rope_parameters=ROPE),
        decoder_layer=qwen2.Qwen2DecoderLayer,
        rotary=qwen2.Qwen2RotaryEmbedding,
        fed_behind_the_final_norm=False,
        hidden_first=True,
        qkv_bias=True,
    ),
    "qwen3_5": Case(
        layout="qwen3_5",
        config=lambda: Qwen3_5TextConfig(**COMMON, **full_attention(), head_dim=16, rope_parameters=dict(ROPE)),
        decoder_layer=qwen3_5.Qwen3_5DecoderLayer,
        rotary=qwen3_5.Qwen3_5TextRotaryEmbedding,
        norm_adds_one=True,
        fed_behind_the_final_norm=True,
        first_embedding_is_zero=False,
    ),
    "qwen3_next, experts": Case(
        layout="qwen3_next",
        config=lambda: Qwen3NextConfig(
            **{**COMMON, **EXPERTS, **full_attention()},
            head_dim=16,
            num_experts=4,
            shared_expert_intermediate_size=16,
            rope_parameters=dict(ROPE),
        ),
        decoder_layer=qwen3_next.Qwen3NextDecoderLayer,
        rotary=qwen3_next.Qwen3NextRotaryEmbedding,
        norm_adds_one=True,
        fed_behind_the_final_norm=True,
        first_embedding_is_zero=False,
    ),
    "deepseek, dense, yarn": Case(
        layout="deepseek",
        config=lambda: DeepseekV3Config(
            **{**COMMON, "num_key_value_heads": 4, **ROUTED, **LATENT},
            first_k_dense_replace=99,
            rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        decoder_layer=deepseek.DeepseekV3DecoderLayer,
        rotary=deepseek.DeepseekV3RotaryEmbedding,
        fed_behind_the_final_norm=True,
    ),
    "deepseek, experts": Case(
        layout="deepseek",
        config=lambda: DeepseekV3Config(
            **{**COMMON, "num_key_value_heads": 4, **ROUTED, **LATENT, "q_lora_rank": None},
            first_k_dense_replace=0,
            rope_parameters=ROPE,
        ),
        decoder_layer=deepseek.DeepseekV3DecoderLayer,
        rotary=deepseek.DeepseekV3RotaryEmbedding,
        fed_behind_the_final_norm=True,
    ),
    "glm4_moe, experts": Case(
        layout="glm4_moe",
        config=lambda: Glm4MoeConfig(
            **COMMON,
            **ROUTED,
            first_k_dense_replace=0,
            head_dim=16,
            use_qk_norm=True,
            attention_bias=True,
            rope_parameters=dict(ROPE),
        ),
        decoder_layer=glm4_moe.Glm4MoeDecoderLayer,
        rotary=glm4_moe.Glm4MoeRotaryEmbedding,
        fed_behind_the_final_norm=True,
        feeds_back_what_the_lm_head_reads=False,
        qkv_bias=True,
    ),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
SOME = pytest.mark.parametrize("name", ["mimo of a llama", "deepseek, experts"])

# ---- making heads and data -------------------------------------------------------------------------------


def make_head(case: Case, seed: int = 0) -> MTP:
    """A head in which every tensor, norm weights, biases and routing too, is random."""
    options = MTPOptions(layout=case.layout, draft_vocab_size=V, qkv_bias=case.qkv_bias)
    head = MTP(case.config(), options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in head.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            centre = 0.0 if case.norm_adds_one or "norm" not in name else 1.0
            tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else centre + 0.3 * noise)
    return head


def make_frozen(head: MTP, seed: int = 1) -> FrozenTarget:
    """The target behind the head: the lm_head is the head's."""
    generator = torch.Generator().manual_seed(seed)
    embedding_VD = torch.randn(V, D, generator=generator)
    norm_D = 1 + 0.3 * torch.randn(D, generator=generator)
    return FrozenTarget(embedding_VD, norm_D, head.lm_head.weight.detach(), torch.arange(V), EPS)


def make_document(length: int, context: int, seed: int = 0) -> Document:
    generator = torch.Generator().manual_seed(seed)
    return Document(
        tokens_T=torch.randint(V, (length,), generator=generator),
        last_TD=torch.randn(length, D, generator=generator) * 2,
        supervised_T=torch.arange(length) >= context,
    )


def unroll(head: MTP, frozen: FrozenTarget, batch: HeadBatch) -> tuple[HeadOutput, dict[tuple[int, int], Tensor]]:
    """What `forward` returns, and what the lm_head reads by (slot, step)."""
    seen: list[Tensor] = []
    handle = head.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    output = head(batch, frozen, Objective(depth=K, step_weight=0.6))
    handle.remove()
    outs = {
        (slot, step): seen[step][row]
        for step, mask_T in enumerate(batch.step_masks(K))
        for row, slot in enumerate(mask_T.nonzero().squeeze(-1).tolist())
    }
    return output, outs


# ---- vLLM's arithmetic, restated -------------------------------------------------------------------------


class Served:
    """The layer as vLLM serves one request: the whole sequence at every step, no cache."""

    def __init__(self, case: Case, head: MTP, frozen: FrozenTarget):
        self.case, self.frozen = case, frozen
        config = case.config()
        config._attn_implementation = "eager"
        self.layer = case.decoder_layer(config, N - 1).eval()
        self.layer.load_state_dict(head.layer.state_dict())
        self.rotary = case.rotary(config)
        self.outer = {name: tensor.detach() for name, tensor in head.state_dict().items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.outer[f"{name}.weight"] + (1 if self.case.norm_adds_one else 0)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight

    def target_states(self, last_SD: Tensor) -> Tensor:
        """What the target model's forward pass returns."""
        if not self.case.fed_behind_the_final_norm:
            return last_SD
        return last_SD / torch.sqrt((last_SD * last_SD).mean(-1, keepdim=True) + EPS) * self.frozen.norm_D

    @torch.no_grad()
    def forward(self, tokens_S: Tensor, hidden_SD: Tensor) -> tuple[Tensor, Tensor]:
        """(for the logits, fed back) of each entry."""
        embedded_SD = self.frozen.embedding_VD[tokens_S]
        if self.case.first_embedding_is_zero:
            embedded_SD = torch.cat([torch.zeros(1, D), embedded_SD[1:]])
        both = [self.norm(embedded_SD, "token_norm"), self.norm(hidden_SD, "hidden_norm")]
        x_SD = torch.cat(both[::-1] if self.case.hidden_first else both, -1) @ self.outer["fc.weight"].T
        positions_1S = torch.arange(len(tokens_S))[None]
        mask = torch.full((len(tokens_S), len(tokens_S)), float("-inf")).triu(1)[None, None]
        turned = self.rotary(x_SD[None], positions_1S)
        found = self.layer(x_SD[None], attention_mask=mask, position_ids=positions_1S, position_embeddings=turned)
        y_SD = (found[0] if isinstance(found, tuple) else found).reshape(len(tokens_S), D)
        out_SD = self.norm(y_SD, "final_norm")
        return out_SD, out_SD if self.case.feeds_back_what_the_lm_head_reads else y_SD

    def chain(self, document: Document, slot: int) -> Iterator[Tensor]:
        """What the lm_head reads at each step of the draft from a slot, fed with the data's tokens."""
        hidden_SD = self.target_states(document.last_TD[: slot + 1])
        for step in range(K):
            out_SD, state_SD = self.forward(document.tokens_T[1 : slot + 2 + step], hidden_SD)
            yield out_SD[-1]
            hidden_SD = torch.cat([hidden_SD, state_SD[-1:]])


@ALL
def test_unroll_gives_the_logits_that_vllm_would(case: Case) -> None:
    head = make_head(case)
    frozen = make_frozen(head)
    document, other = make_document(9, 2, seed=2), make_document(6, 1, seed=3)
    _, outs = unroll(head, frozen, pack(other, document))
    served, start = Served(case, head, frozen), len(other)
    for slot in (0, 1, 4, 7):
        for step, out_D in enumerate(served.chain(document, slot)):
            if slot + step + 2 >= len(document) or (start + slot, step) not in outs:
                break
            wanted_V, found_V = (head.lm_head(one).detach() for one in (out_D, outs[start + slot, step]))
            torch.testing.assert_close(found_V, wanted_V, rtol=2e-4, atol=2e-4)
    assert {step for slot, step in outs if slot >= start} == set(range(K))


@ALL
def test_unroll_equals_decoding_with_the_cache(case: Case) -> None:
    head = make_head(case)
    frozen, document = make_frozen(head), make_document(10, 3, seed=5)
    _, outs = unroll(head, frozen, pack(document))
    embedded_TD = frozen.embed(document.tokens_T)
    with torch.no_grad():
        fused_TD = head.fuse(torch.zeros(len(document), 0, D), document.last_TD, frozen)
        for slot in (1, 2, 5):
            cache, positions = DraftCache(head, 1, 16), torch.arange(slot + 1)[None]
            out, state = decode_step(
                head, cache, embedded_TD[None, 1 : slot + 2], fused_TD[None, : slot + 1], positions
            )
            for step in range(K):
                torch.testing.assert_close(outs[slot, step], out[0, -1], rtol=1e-4, atol=1e-4)
                fed = embedded_TD[None, slot + 2 + step, None]
                out, state = decode_step(head, cache, fed, state[:, -1:], torch.tensor([[slot + 1 + step]]))


@ALL
def test_every_tensor_of_the_layer_is_trained(case: Case) -> None:
    head = make_head(case)
    output, _ = unroll(head, make_frozen(head), pack(make_document(14, 2, seed=6), make_document(12, 2, seed=7)))
    output.loss.backward()
    idle = {name for name, one in head.named_parameters() if one.grad is None or not one.grad.any()}
    assert idle == set(), "each has a gradient"


# ---- which slots are trained, and what they see ------------------------------------------------------------


def slot_gradients(head: MTP, frozen: FrozenTarget, batch: HeadBatch) -> list[bool]:
    """Whether the loss has a gradient with respect to the state that each position is fed with."""
    batch = replace(batch, last_TD=batch.last_TD.clone().requires_grad_())
    head(batch, frozen, Objective(depth=K, step_weight=0.6)).loss.backward()
    assert batch.last_TD.grad is not None
    return [bool(row.any()) for row in batch.last_TD.grad]


@SOME
def test_the_slot_at_the_prompts_end_is_trained_and_nothing_unsupervised_is(name: str) -> None:
    """Seven tokens, the answer at 3 to 6: slot 2 drafts the second answer token, slot 1 the first; 5 and 6 nothing."""
    head = make_head(CASES[name])
    frozen, batch = make_frozen(head), pack(make_document(7, 3, seed=8))
    assert slot_gradients(head, frozen, batch) == [True] * 5 + [False] * 2, "slot 0 through the attention"
    with torch.no_grad():
        head.layer.self_attn.o_proj.weight.zero_()
    assert slot_gradients(head, frozen, batch) == [False, True, True, True, True, False, False]


@ALL
def test_all_ways_of_attention_agree_at_every_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 sums in another order differ in the last bits."""
    head = make_head(case)
    frozen, batch = make_frozen(head), pack(*(make_document(length, 2, seed=length) for length in (8, 15, 5)))
    found = []
    for way in WAYS.values():
        monkeypatch.setattr(recursive, "unroll_attention", way)
        found.append(unroll(head, frozen, batch)[1])
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, out in found[0].items():
            torch.testing.assert_close(other[key], out, rtol=1e-4, atol=1e-5)
    assert {step for _, step in found[0]} == set(range(K))


@ALL
def test_documents_do_not_see_each_other(case: Case, attention_way: str) -> None:
    head = make_head(case)
    frozen, document = make_frozen(head), make_document(12, 3, seed=10)
    results = [unroll(head, frozen, pack(make_document(9, 9, seed=seed), document)) for seed in (11, 12)]
    (first, outs), (second, others) = results
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.survived_TK, second.survived_TK)
    assert all(torch.equal(out, others[key]) for key, out in outs.items())


# ---- beginnings ------------------------------------------------------------------------------------------


def test_a_loss_over_fewer_tokens_is_that_of_their_rows() -> None:
    """`train.loss_vocab`: p and q over the kept tokens only; the head itself still drafts all."""
    head = make_head(CASES["mimo of a llama"])
    frozen = make_frozen(head)
    batch = pack(make_document(14, 4), make_document(9, 2, seed=1))
    ids_U = torch.arange(1, len(frozen.target_ids_U), 3)
    fewer = frozen.restricted(ids_U)
    found = head(batch, fewer, Objective(depth=1))
    _, outs = unroll(head, frozen, batch)
    expected = 0.0
    for (slot, step), out in outs.items():
        if step == 0:
            p_U = (frozen.normed(batch.last_TD[slot + 1]) @ frozen.lm_head_UD[ids_U].T).softmax(-1)
            expected -= float((p_U * (out @ frozen.lm_head_UD[ids_U].T).log_softmax(-1)).sum())
    assert float(found.loss.detach()) == pytest.approx(expected, rel=1e-4)
    everything = head(batch, frozen.restricted(frozen.target_ids_U), Objective(depth=3))
    whole = head(batch, frozen, Objective(depth=3))
    assert torch.equal(everything.survived_TK, whole.survived_TK)
    assert float(everything.loss.detach()) == pytest.approx(float(whole.loss.detach()), rel=1e-6)


def write_target(folder: Path, case: Case, norm: float | None = None, **changes: Any) -> Target:
    """A random target of the family; `norm` sets all that the final norm multiplies by."""
    config = case.config()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0 if case.norm_adds_one or "norm" not in name else 1.0, 0.3)
        if norm is not None:
            model.model.norm.weight.fill_(norm - (1 if case.norm_adds_one else 0))
    model.save_pretrained(folder)
    return Target(folder)


def frozen_of(target: Target) -> FrozenTarget:
    return FrozenTarget(target.embedding_VD, target.final_norm_D, target.lm_head_VD, torch.arange(V), EPS)


def begin(target: Target, frozen: FrozenTarget, **settings: Any) -> MTP:
    head = build_head(MTPConfig(type="mtp", **settings), target, frozen, num_aux=0, seed=0)
    assert isinstance(head, MTP)
    return head


@ALL
def test_a_fresh_layer_computes_the_targets_last_layer(case: Case, tmp_path: Path) -> None:
    """On states of one size and tokens without an embedding: what the last layer and final norm make of them."""
    target = write_target(tmp_path / "target", case, norm=0.7)
    frozen = frozen_of(target)
    frozen.embedding_VD.zero_()
    states_SD = torch.randn(6, D)
    states_SD = states_SD * 5 / states_SD.pow(2).mean(-1, keepdim=True).sqrt()
    head = begin(target, frozen)
    head.calibrate(states_SD, frozen)
    model = target.load(torch.float32, "cpu")
    positions_1S = torch.arange(6)[None]
    turned = model.model.rotary_emb(states_SD[None], positions_1S)
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        wanted = model.model.layers[-1](states_SD[None], attention_mask=mask, position_embeddings=turned)
        wanted_SV = model.lm_head(model.model.norm(wanted[0] if isinstance(wanted, tuple) else wanted)).reshape(6, V)
        fused = head.fuse(torch.zeros(6, 0, D), states_SD, frozen)
        out, _ = decode_step(head, DraftCache(head, 1, 8), torch.zeros(1, 6, D), fused[None], positions_1S)
        found_SV = head.lm_head(out[0])
    torch.testing.assert_close(found_SV, wanted_SV, rtol=1e-3, atol=1e-3)
    assert not head.lm_head.weight.requires_grad
    assert torch.equal(head.lm_head.weight, target.lm_head_VD)


@ALL
def test_each_family_passes_the_checks_before_any_work(case: Case, tmp_path: Path) -> None:
    """Sizes, names, layout, and the same rotary embedding for transformers and for who reads the config."""
    check_target(MTPConfig(type="mtp"), V, write_target(tmp_path / "target", case))


def test_calibration_undoes_an_uneven_final_norm(tmp_path: Path) -> None:
    """The fed state is behind the final norm; the layer's input points where the state before it did."""
    target = write_target(tmp_path / "target", CASES["qwen3_5"])
    frozen = frozen_of(target)
    head, states_SD = begin(target, frozen), torch.randn(20, D) * 3
    head.calibrate(states_SD, frozen)
    with torch.no_grad():
        fused = head.fuse(torch.zeros(20, 0, D), states_SD, frozen)
        _, x_SD = head.enter(torch.zeros(20, D), fused, torch.arange(20))
    assert torch.cosine_similarity(x_SD, states_SD).min() > 0.99
    assert x_SD.norm() == pytest.approx(float(states_SD.norm()), rel=0.1)


def add_native_layer(target: Target, case: Case, seed: int = 4) -> MTP:
    """Write a random MTP layer into the target's checkpoint, as its publisher would."""
    head = make_head(case, seed)
    path = target.path / "model.safetensors"
    save_file({**load_file(path), **head.layout.to_checkpoint(head.state_dict(), N)}, path, metadata={"format": "pt"})
    return head


NATIVE_NAMES = {
    "mimo of a qwen2": ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.q_proj.bias"),
    "qwen3_5": ("mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.q_norm.weight"),
    "qwen3_next, experts": ("mtp.norm.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight"),
    "deepseek, experts": ("model.layers.4.shared_head.norm.weight", "model.layers.4.mlp.gate.e_score_correction_bias"),
    "glm4_moe, experts": ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.shared_experts.up_proj.weight"),
}


@pytest.mark.parametrize("name", NATIVE_NAMES)
def test_a_native_layer_is_taken_over_and_a_missing_tensor_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    target = write_target(tmp_path / "target", case)
    written = add_native_layer(target, case)
    target = Target(target.path)
    assert set(NATIVE_NAMES[name]) <= target.tensor_files.keys()
    head = begin(target, frozen_of(target), start="native")
    head.calibrate(torch.randn(5, D), frozen_of(target))
    own = {key: tensor for key, tensor in head.state_dict().items() if key != "lm_head.weight"}
    assert own.keys() < written.state_dict().keys()
    assert all(torch.equal(tensor, written.state_dict()[key]) for key, tensor in own.items())

    tensors = load_file(target.path / "model.safetensors")
    del tensors[NATIVE_NAMES[name][0]]
    save_file(tensors, target.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=NATIVE_NAMES[name][0].replace(".", r"\.")):
        begin(Target(target.path), frozen_of(target), start="native")


# ---- what cannot be served ---------------------------------------------------------------------------------


def test_a_smaller_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", CASES["mimo of a llama"])
    frozen = FrozenTarget(target.embedding_VD, target.final_norm_D, target.lm_head_VD, torch.arange(V - 4), EPS)
    with pytest.raises(InputError, match=f"draft_vocab.size=20.*set draft_vocab.size={V}"):
        begin(target, frozen)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 16}, "head_dim=16"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_llama_that_is_no_qwen2_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", CASES["mimo of a llama"], **changes)
    with pytest.raises(InputError, match=named):
        resolve_layout("auto", target)


def test_layouts_of_other_families_are_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", CASES["mimo of a llama"])
    with pytest.raises(InputError, match=r"head.layout=deepseek.*leave head.layout at auto"):
        resolve_layout("deepseek", target)
    assert resolve_layout("mimo", target) == resolve_layout("auto", target) == "mimo"
    target.config.model_type = "mamba"
    with pytest.raises(InputError, match="a mamba target has no MTP layout here"):
        resolve_layout("auto", target)


def test_quantised_targets_and_several_layers_are_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "quantised", CASES["mimo of a llama"], quantization_config={"quant_method": "fp8"})
    with pytest.raises(InputError, match="quantization_config: an MTP layer needs an unquantised target"):
        resolve_layout("auto", target)
    target = write_target(tmp_path / "several", CASES["deepseek, experts"], num_mtp_layers=3)
    with pytest.raises(InputError, match="3 MTP layers; one, applied recursively, is supported"):
        resolve_layout("auto", target)


@pytest.mark.parametrize("name", LAYOUTS)
def test_names_go_to_a_checkpoint_and_back(name: str) -> None:
    case = next(case for case in CASES.values() if case.layout == name)
    head = make_head(case)
    state = {key: tensor for key, tensor in head.state_dict().items() if key != "lm_head.weight"}
    back = head.layout.from_checkpoint(
        {**head.layout.to_checkpoint(state, N), "model.layers.3.mlp.up_proj.weight": torch.zeros(1)}, N
    )
    assert back.keys() == state.keys()
    assert all(torch.equal(tensor, back[key]) for key, tensor in state.items())

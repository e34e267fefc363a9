"""The EAGLE-3 head against what vLLM computes, and its unroll against step-by-step serving.

`served_*` restate vllm/model_executor/models/llama_eagle3.py in plain float64 torch: no cache, no packing, no masks.

Shapes: T packed tokens, S entries of one served sequence, A captured layers, D hidden, V target vocabulary, U draft
vocabulary, K unroll depth, R rows of one step.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from drafthead.kernels.linear_soft_ce.reference import row_losses
from drafthead.pipeline.heads import chains, recursive
from drafthead.pipeline.heads.base import FrozenTarget, HeadBatch, HeadOutput, Objective
from drafthead.pipeline.heads.chains import round_starts
from drafthead.pipeline.heads.eagle3 import EMBEDDING_SHARE, Eagle3, Eagle3Options, initialise_from_target
from drafthead.pipeline.heads.recursive import DraftCache, decode_step
from drafthead.pipeline.target import Target, open_target
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig

from tests.pipeline.heads.conftest import WAYS
from tests.pipeline.heads.documents import Document, pack

V, U, D, A, K = 24, 12, 32, 3, 4
HEADS, GROUPS, P = 4, 2, 8
THETA, EPS = 10_000.0, 1e-5
STEP_WEIGHT = 0.7
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
COMBINATIONS = [dict(zip(NORMS, flags, strict=True)) for flags in itertools.product([False, True], repeat=4)]


def norms_id(norms: dict[str, bool]) -> str:
    return "+".join(name for name, flag in norms.items() if flag) or "plain"


ALL_NORMS = pytest.mark.parametrize("norms", COMBINATIONS, ids=norms_id)
SOME_NORMS = pytest.mark.parametrize("norms", [COMBINATIONS[0], COMBINATIONS[-1]], ids=norms_id)

# ---- making heads and data -------------------------------------------------------------------------------


def make_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=P,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )


def make_head(norms: dict[str, bool] | None = None, seed: int = 0) -> Eagle3:
    """A head in which every parameter, norm weights too, is random."""
    head = Eagle3(make_config(), Eagle3Options(num_aux=A, draft_vocab_size=U, **(norms or {})))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            wide = parameter.ndim > 1
            parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5 if wide else 1 + 0.3 * noise)
    return head


def make_frozen(seed: int = 1) -> FrozenTarget:
    """Every second token can be drafted."""
    generator = torch.Generator().manual_seed(seed)
    embedding_VD, lm_head_VD = (torch.randn(V, D, generator=generator) for _ in range(2))
    norm_D = 1 + 0.3 * torch.randn(D, generator=generator)
    return FrozenTarget(embedding_VD, norm_D, lm_head_VD * 0.3, torch.arange(0, V, 2) + 1, EPS)


def make_document(head: Eagle3, frozen: FrozenTarget, length: int, context: int, seed: int = 0) -> Document:
    """Random data, in which some chains of drafts hit once, twice, ... K times."""
    generator = torch.Generator().manual_seed(seed)
    aux_TAD = torch.randn(length, A, D, generator=generator)
    tokens = torch.randint(V, (2,), generator=generator).tolist()
    model = Served(head, frozen)
    while len(tokens) < length:
        hits = int(torch.randint(K + 1, (), generator=generator))
        tokens += model.greedy_chain(tokens, aux_TAD, len(tokens) - 2)[:hits]
        tokens += torch.randint(V, (1,), generator=generator).tolist()
    return Document(
        tokens_T=torch.tensor(tokens[:length]),
        aux_TAD=aux_TAD,
        last_TD=torch.randn(length, D, generator=generator) * 2,
        supervised_T=torch.arange(length) >= context,
    )


@dataclass(frozen=True, kw_only=True)
class Unrolled:
    """What `forward` returns, and the `out` of each slot at each step."""

    output: HeadOutput
    outs: dict[tuple[int, int], Tensor]
    """By (slot, step)."""


def unroll(head: Eagle3, frozen: FrozenTarget, batch: HeadBatch, loss: str = "soft_ce") -> Unrolled:
    seen: list[Tensor] = []
    handle = head.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    output = head(batch, frozen, Objective(depth=K, loss=loss, step_weight=STEP_WEIGHT))
    handle.remove()
    outs = {}
    for step, mask_T in enumerate(batch.step_masks(K)):
        slots = mask_T.nonzero().squeeze(-1).tolist()
        if slots:
            outs.update(
                {(slot, step): out for slot, out in zip(slots, seen[step][: len(slots)], strict=True)}
            )  # padding follows
    return Unrolled(output=output, outs=outs)


def survived(output: HeadOutput) -> list[list[bool]]:
    flags: list[list[bool]] = output.survived_TK.tolist()
    return flags


# ---- vLLM's arithmetic, restated -------------------------------------------------------------------------


def served_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def served_rotation(x_SHP: Tensor) -> Tensor:
    """Neox style at positions 0, 1, ...: channel c turns with channel c + P / 2."""
    positions_S = torch.arange(len(x_SHP), dtype=x_SHP.dtype)
    frequencies = THETA ** (-torch.arange(0, P, 2, dtype=x_SHP.dtype) / P)
    turn = torch.polar(torch.ones(len(x_SHP), 1, P // 2).double(), (positions_S[:, None] * frequencies)[:, None])
    turned = torch.complex(x_SHP[..., : P // 2], x_SHP[..., P // 2 :]) * turn
    return torch.cat([turned.real, turned.imag], -1)


class Served:
    """The head as vLLM serves one request, in float64; `weights` are leaves with gradients."""

    def __init__(self, head: Eagle3, frozen: FrozenTarget):
        self.options = head.options
        self.weights = {name: tensor.detach().double().requires_grad_() for name, tensor in head.state_dict().items()}
        self.frozen = frozen

    def combine(self, aux_SAD: Tensor) -> Tensor:
        """`combine_hidden_states`."""
        w, options = self.weights, self.options
        x = aux_SAD.double().reshape(len(aux_SAD), A * D)
        if options.norm_before_fc:
            x = served_norm(x, w["input_norm.weight"])
        if options.fc_norm:
            parts = [x[:, i * D : (i + 1) * D] for i in range(A)]
            x = torch.cat([served_norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], 1)
        return x @ w["fc.weight"].T

    def layer(self, tokens_S: Tensor, hidden_SD: Tensor) -> tuple[Tensor, Tensor]:
        """`LlamaModel.forward` over a whole sequence, causal: (for the logits, fed back)."""
        w = self.weights
        size = len(tokens_S)
        embedded = served_norm(self.frozen.embedding_VD.double()[tokens_S], w["midlayer.input_layernorm.weight"])
        normed = served_norm(hidden_SD, w["midlayer.hidden_norm.weight"])
        residual = normed if self.options.norm_before_residual else hidden_SD
        x = torch.cat([embedded, normed], -1)
        query, key, value = (x @ w[f"midlayer.self_attn.{part}_proj.weight"].T for part in "qkv")
        query = served_rotation(query.view(size, HEADS, P))
        key = served_rotation(key.view(size, GROUPS, P))
        value = value.view(size, GROUPS, P)
        mixed = []
        for number in range(HEADS):
            group = number // (HEADS // GROUPS)
            scores = query[:, number] @ key[:, group].T / P**0.5
            scores = scores + torch.full((size, size), float("-inf")).double().triu(1)
            mixed.append(scores.softmax(-1) @ value[:, group])
        residual = residual + torch.cat(mixed, -1) @ w["midlayer.self_attn.o_proj.weight"].T
        x = served_norm(residual, w["midlayer.post_attention_layernorm.weight"])
        gate, up = (x @ w[f"midlayer.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        prenorm = residual + (silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        out = served_norm(prenorm, w["norm.weight"])
        return out, out if self.options.norm_output else prenorm

    def chain(self, tokens: list[int], aux_TAD: Tensor, slot: int, depth: int) -> Iterator[Tensor]:
        """`out` of each step of the draft that starts at a slot, fed with the data's tokens."""
        hidden_SD = self.combine(aux_TAD[: slot + 1])
        for step in range(depth):
            out_SD, state_SD = self.layer(torch.tensor(tokens[1 : slot + 2 + step]), hidden_SD)
            yield out_SD[-1]
            hidden_SD = torch.cat([hidden_SD, state_SD[-1:]])

    def logits(self, out_D: Tensor) -> Tensor:
        return self.weights["lm_head.weight"] @ out_D

    @torch.no_grad()
    def greedy_chain(self, tokens: list[int], aux_TAD: Tensor, slot: int) -> list[int]:
        """K draft tokens, each fed to the next step."""
        drafted = tokens[: slot + 2]
        hidden_SD = self.combine(aux_TAD[: slot + 1])
        for _ in range(K):
            out_SD, state_SD = self.layer(torch.tensor(drafted[1:]), hidden_SD)
            drafted = [*drafted, int(self.frozen.target_ids_U[self.logits(out_SD[-1]).argmax()])]
            hidden_SD = torch.cat([hidden_SD, state_SD[-1:]])
        return drafted[slot + 2 :]

    def unroll(self, document: Document, loss: str) -> tuple[Tensor, dict[tuple[int, int], Tensor], Tensor]:
        """Loss, `out` by (slot, step) and survival flags of a document, slot by slot."""
        tokens = document.tokens_T.tolist()
        total = torch.zeros((), dtype=torch.float64)
        outs: dict[tuple[int, int], Tensor] = {}
        flags_TK = torch.zeros(len(tokens), K, dtype=torch.bool)
        for slot in range(len(tokens)):
            predicted = range(slot + 2, min(slot + 2 + K, len(tokens)))
            depth = len(list(itertools.takewhile(lambda place: bool(document.supervised_T[place]), predicted)))
            alive = True
            for step, out_D in enumerate(self.chain(tokens, document.aux(), slot, depth)):
                outs[slot, step] = out_D.detach()
                logits_U = self.logits(out_D)
                last_D = served_norm(document.last_TD[slot + 1 + step].double(), self.frozen.norm_D.double())
                target_U = (self.frozen.lm_head_UD.double() @ last_D).softmax(-1)
                label = self.frozen.draft_ids_V[tokens[slot + 2 + step]]
                row = row_losses(logits_U[None], target_U[None], label[None], loss)[0]
                total = total + STEP_WEIGHT**step * row
                draft = int(self.frozen.target_ids_U[logits_U.argmax()])
                alive = alive and draft == tokens[slot + 2 + step]
                flags_TK[slot, step] = alive
        return total, outs, flags_TK


# ---- the unroll is what is served ------------------------------------------------------------------------


@ALL_NORMS
def test_unroll_equals_vllm_slot_by_slot(norms: dict[str, bool]) -> None:
    head, frozen = make_head(norms), make_frozen()
    documents = [make_document(head, frozen, 15, 4, seed=2), make_document(head, frozen, 11, 1, seed=3)]
    found = unroll(head, frozen, pack(*documents), loss="kl")
    served = [Served(head, frozen).unroll(document, "kl") for document in documents]
    outs = {
        (slot + start, step): out
        for (_, own, _), start in zip(served, (0, 15), strict=True)
        for (slot, step), out in own.items()
    }
    assert found.outs.keys() == outs.keys()
    for key, out in outs.items():
        torch.testing.assert_close(found.outs[key].double(), out, rtol=1e-5, atol=1e-5)
    flags_TK = torch.cat([flags for _, _, flags in served])
    assert torch.equal(found.output.survived_TK, flags_TK)
    assert flags_TK.any(0).all(), "some chain survives each step"
    assert not flags_TK[:, 0].all()
    assert found.output.survived_K.tolist() == flags_TK.sum(0).tolist()
    assert found.output.rows_K.tolist() == [sum(step == wanted for _, step in outs) for wanted in range(K)]
    total = sum(float(loss.detach()) for loss, _, _ in served)
    assert float(found.output.loss.detach()) == pytest.approx(total, rel=1e-5)


@SOME_NORMS
@pytest.mark.parametrize("loss", ["soft_ce", "lk", "lk_hybrid"])
def test_gradients_flow_through_all_steps_as_in_a_served_chain(norms: dict[str, bool], loss: str) -> None:
    head, frozen = make_head(norms), make_frozen()
    document = make_document(head, frozen, 12, 4, seed=4)
    unroll(head, frozen, pack(document), loss).output.loss.backward()
    served = Served(head, frozen)
    served.unroll(document, loss)[0].backward()
    for name, parameter in head.named_parameters():
        wanted, found = served.weights[name].grad, parameter.grad
        assert wanted is not None, name
        assert found is not None, name
        assert wanted.norm() > 0, name
        assert (found - wanted).norm() / wanted.norm() < 1e-3, name


@ALL_NORMS
def test_unroll_equals_decoding_with_the_cache(norms: dict[str, bool]) -> None:
    """A40: each slot's chain through `decode_step`, teacher-forced, after a prefill of the slots before it."""
    head, frozen = make_head(norms), make_frozen()
    document = make_document(head, frozen, 13, 3, seed=5)
    found = unroll(head, frozen, pack(document))
    embedded_TD, fused_TD = (
        frozen.embed(document.tokens_T),
        head.fuse(document.aux(), document.last_TD, frozen).detach(),
    )
    with torch.no_grad():
        for slot in range(1, 11):
            cache = DraftCache(head, 1, 16)
            positions = torch.arange(slot + 1)[None]
            out, state = decode_step(
                head, cache, embedded_TD[None, 1 : slot + 2], fused_TD[None, : slot + 1], positions
            )
            for step in range(K):
                if (slot, step) not in found.outs:
                    break
                torch.testing.assert_close(found.outs[slot, step], out[0, -1], rtol=1e-5, atol=1e-5)
                assert head.lm_head(out[0, -1]).argmax() == head.lm_head(found.outs[slot, step]).argmax()
                if slot + 2 + step < len(document):
                    fed = embedded_TD[None, slot + 2 + step, None]
                    out, state = decode_step(head, cache, fed, state[:, -1:], torch.tensor([[slot + 1 + step]]))
    assert {step for _, step in found.outs} == set(range(K))


def test_cache_is_rolled_back_by_writing_again() -> None:
    """Draft three tokens, take the true slots in place of them, draft again: as if nothing had been drafted."""
    head, frozen = make_head(), make_frozen()
    document = make_document(head, frozen, 10, 2, seed=6)
    embedded_TD, fused_TD = (
        frozen.embed(document.tokens_T)[None],
        head.fuse(document.aux(), document.last_TD, frozen).detach()[None],
    )

    def true_slots(cache: DraftCache, first: int, last: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, last)[None]
        return decode_step(head, cache, embedded_TD[:, first + 1 : last + 1], fused_TD[:, first:last], positions)

    with torch.no_grad():
        used, fresh = DraftCache(head, 1, 16), DraftCache(head, 1, 16)
        _, state = true_slots(used, 0, 5)
        for position in (5, 6, 7):
            _, state = decode_step(head, used, embedded_TD[:, :1], state[:, -1:], torch.tensor([[position]]))
        out_used, _ = true_slots(used, 5, 7)
        true_slots(fresh, 0, 5)
        out_fresh, _ = true_slots(fresh, 5, 7)
        assert torch.equal(out_used, out_fresh)


# ---- which slots are trained (C6) ------------------------------------------------------------------------


def c6_document(head: Eagle3, frozen: FrozenTarget, length: int = 7) -> Document:
    """Seven tokens, the answer at positions 3 to 6."""
    document = make_document(head, frozen, length, 0, seed=7)
    return replace(document, supervised_T=(torch.arange(length) >= 3) & (torch.arange(length) < 7))


def without_attention(head: Eagle3) -> Eagle3:
    """A head whose slots cannot influence each other, so that a gradient at a slot is that slot's own."""
    with torch.no_grad():
        head.midlayer.self_attn.o_proj.weight.zero_()
    return head


def slot_gradients(head: Eagle3, frozen: FrozenTarget, batch: HeadBatch, depth: int) -> Tensor:
    """Size of the loss's gradient with respect to the captured states of each position [T]."""
    batch = replace(batch, aux_TAD=batch.aux_TAD.clone().requires_grad_())
    head(batch, frozen, Objective(depth=depth, step_weight=STEP_WEIGHT)).loss.backward()
    assert batch.aux_TAD.grad is not None
    return batch.aux_TAD.grad.flatten(1).norm(dim=1)


@SOME_NORMS
@pytest.mark.parametrize("depth", [1, 3], ids=lambda depth: f"depth {depth}")
def test_first_draft_of_an_answer_is_trained_and_nothing_unsupervised_is(norms: dict[str, bool], depth: int) -> None:
    """Slot 2, the last prompt token's state with the first answer token, drafts the second: non-zero.

    Slot 1 drafts the first answer token, which serving takes from the target; it is trained along.
    """
    head, frozen = without_attention(make_head(norms)), make_frozen()
    gradient_T = slot_gradients(head, frozen, pack(c6_document(head, frozen)), depth)
    assert (gradient_T > 0).tolist() == [False, True, True, True, True, False, False]


def test_prompt_end_gets_a_gradient_with_attention_too_and_the_last_slots_none() -> None:
    head, frozen = make_head(), make_frozen()
    gradient_T = slot_gradients(head, frozen, pack(c6_document(head, frozen)), depth=3)
    assert (gradient_T > 0).tolist() == [True, True, True, True, True, False, False]


@pytest.mark.parametrize("place", [0, 1], ids=["packed first", "packed second"])
def test_alone_and_packed_give_the_same_gradients(place: int) -> None:
    head, frozen = make_head(), make_frozen()
    other = make_document(head, frozen, 9, 9, seed=8)  # nothing supervised, as padding would be
    document = c6_document(head, frozen)
    alone_T = slot_gradients(head, frozen, pack(document), depth=3)
    order = [document, other] if place == 0 else [other, document]
    packed_T = slot_gradients(head, frozen, pack(*order), depth=3)
    own, rest = (packed_T[:7], packed_T[7:]) if place == 0 else (packed_T[9:], packed_T[:9])
    torch.testing.assert_close(own, alone_T, rtol=1e-4, atol=1e-6)
    assert not rest.any()


def test_two_disjoint_answers_train_both_prompt_ends_and_no_chain_crosses_the_gap() -> None:
    """Answers at 3..5 and 9..11 of 14 tokens: slots 1..3 and 7..9; chains end with their answer."""
    head, frozen = without_attention(make_head()), make_frozen()
    document = make_document(head, frozen, 14, 0, seed=9)
    places = torch.arange(14)
    supervised_T = ((places >= 3) & (places < 6)) | ((places >= 9) & (places < 12))
    batch = pack(replace(document, supervised_T=supervised_T))
    slots = [mask.nonzero().squeeze(-1).tolist() for mask in batch.step_masks(K)]
    assert slots == [[1, 2, 3, 7, 8, 9], [1, 2, 7, 8], [1, 7], []]
    gradient_T = slot_gradients(head, frozen, batch, depth=K)
    assert gradient_T.nonzero().squeeze(-1).tolist() == [1, 2, 3, 7, 8, 9]
    output = unroll(head, frozen, batch).output
    assert output.rows_K.tolist() == [6, 4, 2, 0]
    assert output.loss_K[3] == 0


def test_step_masks_follow_the_predicted_token_within_its_document() -> None:
    """Documents of 5 tokens (answer 2..4) and 4 tokens (answer 1..3): no slot looks into the next document."""
    head, frozen = make_head(), make_frozen()
    batch = pack(make_document(head, frozen, 5, 2, seed=1), make_document(head, frozen, 4, 1, seed=2))
    slots = [mask.nonzero().squeeze(-1).tolist() for mask in batch.step_masks(K)]
    assert slots == [[0, 1, 2, 5, 6], [0, 1, 5], [0], []]


def test_documents_shorter_than_a_chain_have_no_slot() -> None:
    head, frozen = make_head(), make_frozen()
    batch = pack(*(make_document(head, frozen, length, 0, seed=length) for length in (2, 3, 2)))
    assert batch.step_masks(2).tolist() == [[False, False, True, *[False] * 4], [False] * 7]


# ---- nothing leaks ---------------------------------------------------------------------------------------


@SOME_NORMS
def test_a_document_does_not_see_the_one_before_it(norms: dict[str, bool], attention_way: str) -> None:
    """A37: other tokens and states there leave every number here unchanged, bit for bit."""
    head, frozen = make_head(norms), make_frozen()
    document = make_document(head, frozen, 12, 3, seed=10)
    results = []
    for seed in (11, 12):
        other = make_document(head, frozen, 9, 9, seed=seed)
        results.append(unroll(head, frozen, pack(other, document)))
    first, second = results
    assert torch.equal(first.output.loss, second.output.loss)
    assert torch.equal(first.output.loss_K, second.output.loss_K)
    assert torch.equal(first.output.survived_TK, second.output.survived_TK)
    assert all(torch.equal(out, second.outs[key]) for key, out in first.outs.items())


def test_all_ways_of_attention_agree_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A38: the logits of every slot and step; fp32 sums in another order differ in the last bits."""
    head, frozen = make_head(), make_frozen()
    batch = pack(*(make_document(head, frozen, length, 2, seed=length) for length in (9, 17, 5)))
    found = []
    for way in WAYS.values():
        monkeypatch.setattr(recursive, "unroll_attention", way)
        found.append(unroll(head, frozen, batch))
    for other in found[1:]:
        assert torch.equal(other.output.survived_TK, found[0].output.survived_TK)
        assert other.outs.keys() == found[0].outs.keys()
        for key, out in found[0].outs.items():
            torch.testing.assert_close(other.outs[key], out, rtol=1e-4, atol=1e-5)
    assert {step for _, step in found[0].outs} == set(range(K))


def test_a_document_does_not_see_the_one_after_it_nor_a_supervised_one() -> None:
    head, frozen = make_head(), make_frozen()
    document, *others = (make_document(head, frozen, 10, 3, seed=seed) for seed in (13, 14, 15))
    first, second = (unroll(head, frozen, pack(document, other)) for other in others)
    assert survived(first.output)[:10] == survived(second.output)[:10]
    own = [key for key in first.outs if key[0] < 10]
    assert len(own) > 20
    assert all(torch.equal(first.outs[key], second.outs[key]) for key in own)
    assert any(not torch.equal(first.outs[key], second.outs[key]) for key in first.outs if key[0] >= 10)


def test_order_and_packing_of_documents_do_not_change_the_sums() -> None:
    head, frozen = make_head(), make_frozen()
    documents = [make_document(head, frozen, 8 + seed, 3, seed=seed) for seed in range(4)]
    together = unroll(head, frozen, pack(*documents)).output
    total = float(together.loss.detach())
    turned = unroll(head, frozen, pack(*documents[::-1])).output
    alone = [unroll(head, frozen, pack(document)).output for document in documents]
    pairs = [unroll(head, frozen, pack(*documents[i : i + 2])).output for i in (0, 2)]
    for split in ([turned], alone, pairs):
        assert sum(float(one.loss.detach()) for one in split) == pytest.approx(total, rel=1e-5)
        assert torch.equal(sum(one.rows_K for one in split), together.rows_K)
        assert torch.equal(sum(one.survived_K for one in split), together.survived_K)
    assert [row for one in alone for row in survived(one)] == survived(together)
    by_document = [survived(together)[start : start + length] for start, length in pack(*documents).documents]
    assert [row for rows in by_document[::-1] for row in rows] == survived(turned)


@SOME_NORMS
def test_drafts_do_not_see_the_future(norms: dict[str, bool]) -> None:
    """A36: slot i at step j has seen tokens up to i + 1 + j and states up to i; all else may change."""
    head, frozen = make_head(norms), make_frozen()
    document = make_document(head, frozen, 14, 3, seed=16)
    before = unroll(head, frozen, pack(document))
    generator = torch.Generator().manual_seed(17)
    for slot, step in [(1, 0), (2, 0), (2, 3), (5, 1), (8, 2), (7, 3)]:
        tokens_T, aux_TAD = document.tokens_T.clone(), document.aux().clone()
        tokens_T[slot + 2 + step :] = (tokens_T[slot + 2 + step :] + 5) % V
        aux_TAD[slot + 1 :] = torch.randn(aux_TAD[slot + 1 :].shape, generator=generator)
        last_TD = torch.randn(document.last_TD.shape, generator=generator)
        changed = replace(document, tokens_T=tokens_T, aux_TAD=aux_TAD, last_TD=last_TD)
        after = unroll(head, frozen, pack(changed))
        assert torch.equal(after.outs[slot, step], before.outs[slot, step])
        assert not torch.equal(after.outs[slot + 1, step], before.outs[slot + 1, step])


@pytest.mark.parametrize("changed", ["token", "state"])
def test_drafts_do_see_all_of_the_past(changed: str) -> None:
    """The counterpart: each step's newest token, and the first position's state, do reach the draft."""
    head, frozen = make_head(), make_frozen()
    document = make_document(head, frozen, 12, 3, seed=18)
    before = unroll(head, frozen, pack(document))
    for slot, step in [(1, 0), (4, 2), (5, 3)]:
        tokens_T, aux_TAD = document.tokens_T.clone(), document.aux().clone()
        if changed == "token":
            tokens_T[slot + 1 + step] = (tokens_T[slot + 1 + step] + 1) % V
        else:
            aux_TAD[0] += 1
        after = unroll(head, frozen, pack(replace(document, tokens_T=tokens_T, aux_TAD=aux_TAD)))
        assert not torch.equal(after.outs[slot, step], before.outs[slot, step])


# ---- only surviving slots --------------------------------------------------------------------------------


def surviving(head: Eagle3, frozen: FrozenTarget, batch: HeadBatch) -> HeadOutput:
    output: HeadOutput = head(batch, frozen, Objective(depth=K, step_weight=STEP_WEIGHT, chains="surviving"))
    return output


def test_surviving_chains_give_the_same_flags_and_less_loss() -> None:
    head, frozen = make_head(), make_frozen()
    batch = pack(*(make_document(head, frozen, 20, 3, seed=seed) for seed in range(4)))
    everything, kept = unroll(head, frozen, batch).output, surviving(head, frozen, batch)
    assert torch.equal(kept.survived_TK, everything.survived_TK)
    assert everything.survived_K[-1] > 0
    assert torch.equal(kept.loss_K[0], everything.loss_K[0])
    assert (kept.loss_K[1:] < everything.loss_K[1:]).all()


def test_served_chains_are_the_surviving_ones_that_a_round_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "STILL_RIGHT", 1.0)
    head, frozen = make_head(), make_frozen()
    batch = pack(*(make_document(head, frozen, 20, 3, seed=seed) for seed in range(4)))
    kept = surviving(head, frozen, batch)
    served = head(batch, frozen, Objective(depth=K, step_weight=STEP_WEIGHT, chains="served"))
    starts_T = round_starts(kept.survived_TK[:, 0], batch.step_masks(K)[0], K, random.Random())
    skipped_T = batch.step_masks(K)[0] & ~starts_T
    assert (skipped_T & kept.survived_TK[:, 1]).any(), "a chain that only `surviving` runs"
    assert torch.equal(served.survived_TK[:, 0], kept.survived_TK[:, 0])
    assert torch.equal(served.survived_TK[:, 1:], kept.survived_TK[:, 1:] & starts_T[:, None])
    assert served.rows_K.tolist() == [int(kept.rows_K[0]), *(batch.step_masks(K)[1:] & starts_T).sum(1).tolist()]
    assert served.run_K[0] == kept.run_K[0]
    assert (served.run_K[1:] < kept.run_K[1:])[:1].all()
    assert torch.equal(served.loss_K[0], kept.loss_K[0])
    assert 0 < served.loss_K[1] < kept.loss_K[1]


@pytest.mark.parametrize(
    ("drawn", "starts"),
    [
        ("wwww", "^^^^"),
        ("rwrw", "^ ^ "),
        ("rrrrrrw", "^   ^  "),  # three are accepted, the target gives the fourth
        ("rrwwrrrr", "^  ^^   "),
        ("rrr", "^  "),
        (" rr  rw ww", " ^   ^  ^^"),  # each answer starts a round of its own
        ("    ", "    "),
    ],
)
def test_rounds_start_behind_the_first_wrong_draft(drawn: str, starts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "STILL_RIGHT", 1.0)
    hit_T, slot_T = (torch.tensor([letter in wanted for letter in drawn]) for wanted in ("r", "rw"))
    assert "".join("^" if one else " " for one in round_starts(hit_T, slot_T, 3, random.Random()).tolist()) == starts


def test_a_run_of_right_first_drafts_ends_by_chance() -> None:
    """First drafts come from the target's own states; those of a chain are right less often."""
    hit_T = torch.ones(40_000, dtype=torch.bool)
    starts = round_starts(hit_T, hit_T, 3, random.Random(0)).nonzero().squeeze(-1)
    share = chains.STILL_RIGHT
    assert float(starts.diff().float().mean()) == pytest.approx(2 + share + share**2, rel=0.01)
    assert set(starts.diff().tolist()) == {2, 3, 4}
    assert torch.equal(starts, round_starts(hit_T, hit_T, 3, random.Random(0)).nonzero().squeeze(-1))
    assert not torch.equal(starts, round_starts(hit_T, hit_T, 3, random.Random(1)).nonzero().squeeze(-1))


@pytest.mark.parametrize("length", [8, 20])
def test_surviving_chains_with_no_survivor_stops_after_the_first_step(length: int) -> None:
    head, frozen = make_head(), make_frozen()
    document = make_document(head, frozen, length, 3, seed=21)
    missed = replace(document, tokens_T=document.tokens_T // 2 * 2)  # even tokens cannot be drafted
    everything, kept = unroll(head, frozen, pack(missed)).output, surviving(head, frozen, pack(missed))
    assert not kept.survived_TK.any()
    assert not everything.survived_TK.any()
    assert kept.loss_K[1:].tolist() == [0, 0, 0]
    torch.testing.assert_close(kept.loss, everything.loss_K[0])


# ---- targets of the loss ---------------------------------------------------------------------------------


def test_target_distribution_is_the_targets_own_over_the_draft_vocabulary() -> None:
    frozen = make_frozen()
    last_RD = torch.randn(6, D, generator=torch.Generator().manual_seed(22)) * 3
    generator = torch.Generator().manual_seed(1)
    _, lm_head_VD = (torch.randn(V, D, generator=generator) for _ in range(2))
    normed = served_norm(last_RD.double(), frozen.norm_D.double())
    whole_RV = (normed @ (lm_head_VD * 0.3).double().T).softmax(-1)
    kept_RU = whole_RV[:, frozen.target_ids_U]
    expected = kept_RU / kept_RU.sum(-1, keepdim=True)
    states = frozen.distribution(last_RD, torch.float32)
    assert states.state_RE.dtype == torch.float32
    found = (states.state_RE @ states.lm_head_UE.T).softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


# ---- starting from the target ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTHEAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield open_target("builtin:tiny-random")


def test_initialised_head_reads_the_last_captured_state_as_the_targets_last_layer_does(tiny: Target) -> None:
    """q, k and v: the target's last layer's of the last captured state, and half of its of the token's embedding."""
    model: Any = tiny.load(torch.float32, "cpu")
    layer = model.model.layers[-1]
    with torch.no_grad():
        layer.input_layernorm.weight.copy_(torch.rand(tiny.hidden_size) + 0.5)
    last_layer = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    head = Eagle3(tiny.config, Eagle3Options(num_aux=A, draft_vocab_size=10))
    initialise_from_target(head, last_layer, tiny.final_norm_D, tiny.lm_head_VD[:10])
    generator = torch.Generator().manual_seed(23)
    aux_TAD = torch.randn(5, A, tiny.hidden_size, generator=generator)
    with torch.no_grad():
        fused_TD = head.fuse(aux_TAD, aux_TAD[:, -1], make_frozen())
        assert torch.equal(fused_TD, aux_TAD[:, -1])
        normed_TD = layer.input_layernorm(aux_TAD[:, -1])
        for seed in (24, 25):
            embedding_TD = torch.randn(5, tiny.hidden_size, generator=generator.manual_seed(seed))
            x_TI, residual_TD = head.enter(embedding_TD, fused_TD, torch.arange(5))
            assert torch.equal(residual_TD, aux_TAD[:, -1])
            for name in ("q_proj", "k_proj", "v_proj"):
                ours = getattr(head.midlayer.self_attn, name)(x_TI)
                read = getattr(layer.self_attn, name)
                theirs = read(normed_TD) + EMBEDDING_SHARE * read(layer.input_layernorm(embedding_TD))
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_initialised_head_computes_the_targets_last_layer_and_logits(tiny: Target) -> None:
    """A chain of nothing but copied parts: out of the head = final norm of the last layer, logits = the target's."""
    model: Any = tiny.load(torch.float32, "cpu")
    ids_U = torch.arange(0, tiny.vocab_size, 5)
    head = Eagle3(tiny.config, Eagle3Options(num_aux=1, draft_vocab_size=len(ids_U)))
    initialise_from_target(head, tiny.last_layer(), tiny.final_norm_D, tiny.lm_head_VD[ids_U])
    tokens_BT = torch.tensor([[5, 300, 17, 44, 200, 9]])
    with torch.no_grad():
        output = model(input_ids=tokens_BT, output_hidden_states=True)
        entering_BTD = output.hidden_states[tiny.num_layers - 1]
        fused = head.fuse(entering_BTD[0][:, None], entering_BTD[0], make_frozen())[None]
        positions = torch.arange(6)[None]
        out, _ = decode_step(head, DraftCache(head, 1, 8), torch.zeros_like(fused), fused, positions)
        logits = head.lm_head(out)
    torch.testing.assert_close(logits, output.logits[..., ids_U], rtol=1e-4, atol=1e-4)

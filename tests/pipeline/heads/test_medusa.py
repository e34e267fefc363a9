"""Medusa heads against vLLM's arithmetic restated slot by slot, and their drafts against the walk.

`Served` restates vllm/model_executor/models/medusa.py in plain float64 torch: one state at a time, no packs, no masks.

Shapes: T packed tokens, D hidden, V target vocabulary, U draft vocabulary, K draft steps.
"""

import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import InputError
from drafthead.eval.acceptance import walk
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.protocols import TargetPass
from drafthead.kernels.linear_soft_ce.reference import row_losses
from drafthead.pipeline.heads import chains
from drafthead.pipeline.heads.base import FrozenTarget, HeadBatch, HeadOutput, Objective
from drafthead.pipeline.heads.build import build_frozen_target, build_head
from drafthead.pipeline.heads.medusa import Medusa, MedusaOptions
from drafthead.pipeline.recipe import MedusaConfig
from drafthead.pipeline.target import Target, open_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.pipeline.heads.documents import Document, pack

V, U, D, K = 24, 12, 32, 4
EPS, STEP_WEIGHT, CONTEXT_WEIGHT = 1e-5, 0.7, 0.3
SHAPES: dict[str, dict[str, Any]] = {
    "shared lm_head": {"draft_vocab_size": U},
    "two layers": {"draft_vocab_size": U, "num_layers": 2},
    "bias": {"draft_vocab_size": U, "bias": True},
    "separate lm_heads": {"draft_vocab_size": V, "shared_lm_head": False},
}
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES)

# ---- making heads and data -------------------------------------------------------------------------------


def make_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=EPS,
    )


def make_head(shape: str = "shared lm_head", seed: int = 0) -> Medusa:
    """A head in which every parameter is random."""
    head = Medusa(make_config(), MedusaOptions(**{"num_heads": K, "num_layers": 1, **SHAPES[shape]}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(1.5 * torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return head


def make_frozen(shape: str = "shared lm_head", seed: int = 1) -> FrozenTarget:
    """Every second token can be drafted, or every one."""
    generator = torch.Generator().manual_seed(seed)
    embedding_VD, lm_head_VD = (torch.randn(V, D, generator=generator) for _ in range(2))
    norm_D = 1 + 0.3 * torch.randn(D, generator=generator)
    ids_U = torch.arange(V) if SHAPES[shape]["draft_vocab_size"] == V else torch.arange(0, V, 2) + 1
    return FrozenTarget(embedding_VD, norm_D, lm_head_VD * 0.3, ids_U, EPS)


def make_document(head: Medusa, frozen: FrozenTarget, length: int, context: int, seed: int = 0) -> Document:
    """Random data, in which some chains of drafts hit once, twice, ... K times."""
    generator = torch.Generator().manual_seed(seed)
    last_TD = torch.randn(length + K, D, generator=generator) * 2
    tokens = torch.randint(V, (2,), generator=generator).tolist()
    served = Served(head, frozen)
    while len(tokens) < length:
        hits = int(torch.randint(K + 1, (), generator=generator))
        tokens += served.drafts(last_TD[len(tokens) - 2])[:hits]
        tokens += torch.randint(V, (1,), generator=generator).tolist()
    return Document(
        tokens_T=torch.tensor(tokens[:length]),
        last_TD=last_TD[:length],
        supervised_T=torch.arange(length) >= context,
    )


def objective(**changes: Any) -> Objective:
    return Objective(**{"depth": K, "step_weight": STEP_WEIGHT, **changes})


# ---- vLLM's arithmetic, restated -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What `forward` should return for one document."""

    total: Tensor
    survived_TK: Tensor
    rows_K: Tensor
    overlap_K: Tensor


class Served:
    """The head as vLLM serves one request, in float64; `weights` are leaves with gradients."""

    def __init__(self, head: Medusa, frozen: FrozenTarget):
        self.options = head.options
        self.weights = {name: tensor.detach().double().requires_grad_() for name, tensor in head.state_dict().items()}
        self.frozen = frozen

    def normed(self, last_D: Tensor) -> Tensor:
        x = last_D.double()
        return x / torch.sqrt((x * x).mean() + EPS) * self.frozen.norm_D.double()

    def logits(self, last_D: Tensor, step: int) -> Tensor:
        w, x = self.weights, self.normed(last_D)
        for layer in range(self.options.num_layers):
            y = w[f"blocks.{step}.layers.{layer}.weight"] @ x
            if self.options.bias:
                y = y + w[f"blocks.{step}.layers.{layer}.bias"]
            x = x + y / (1 + torch.exp(-y))
        return w["lm_head.weight" if self.options.shared_lm_head else f"lm_heads.{step}.weight"] @ x

    @torch.no_grad()
    def drafts(self, last_D: Tensor) -> list[int]:
        """Target ids of all heads' first choices."""
        return [int(self.frozen.target_ids_U[self.logits(last_D, step).argmax()]) for step in range(K)]

    @torch.no_grad()
    def round_starts(self, document: Document, goal: Objective, opening: int) -> set[int]:
        """Slots whose chains go on: with `served` those from which a round would draft, by the first drafts alone."""
        tokens, supervised = document.tokens_T.tolist(), document.supervised_T.tolist()
        if goal.chains != "served":
            return set(range(len(tokens)))
        drawn = ""  # a letter for each slot: right, wrong, or none
        for slot in range(len(tokens)):
            place = slot + 2
            trained = place < len(tokens) and (supervised[place] or (goal.context_weight and place >= opening))
            right = trained and self.drafts(document.last_TD[slot])[0] == tokens[place]
            drawn += "r" if right else "w" if trained else " "
        round_ = re.compile(f"r{{0,{goal.depth}}}[rw]?")
        answers = [(one.start(), one.group()) for one in re.finditer("[rw]+", drawn)]
        return {start + one.start() for start, answer in answers for one in round_.finditer(answer) if one.group()}

    def unroll(self, document: Document, goal: Objective, opening: int = 0) -> Expected:
        """Slot by slot and step by step."""
        tokens, depth = document.tokens_T.tolist(), goal.depth
        total = torch.zeros((), dtype=torch.float64)
        flags_TK = torch.zeros(len(tokens), depth, dtype=torch.bool)
        rows_K, overlap_K = torch.zeros(depth, dtype=torch.long), torch.zeros(depth, dtype=torch.float64)
        supervised = document.supervised_T.tolist()
        starts = self.round_starts(document, goal, opening)
        for slot in range(len(tokens)):
            alive, all_supervised = True, True
            for step in range(depth):
                place = slot + 2 + step
                if place >= len(tokens) or not (supervised[place] or (goal.context_weight and place >= opening)):
                    break
                if goal.chains != "all" and not alive:
                    break
                if step and slot not in starts:
                    break
                all_supervised = all_supervised and supervised[place]
                logits_U = self.logits(document.last_TD[slot], step)
                own_D = self.normed(document.last_TD[place - 1])
                p_U = (self.frozen.lm_head_UD.double() @ own_D).softmax(-1)
                label = self.frozen.draft_ids_V[tokens[place]]
                row = row_losses(logits_U[None], p_U[None], label[None], goal.loss)[0]
                total = total + goal.step_weight**step * row * (1 if all_supervised else goal.context_weight)
                alive = alive and int(self.frozen.target_ids_U[logits_U.argmax()]) == tokens[place]
                flags_TK[slot, step] = alive
                if all_supervised:
                    overlap_K[step] += torch.minimum(p_U, logits_U.detach().softmax(-1)).sum()
            wanted = [place < len(tokens) and supervised[place] for place in range(slot + 2, slot + 2 + depth)]
            counted = [all(wanted[: step + 1]) and (not step or slot in starts) for step in range(depth)]
            rows_K += torch.tensor(counted).long()
        return Expected(total=total, survived_TK=flags_TK, rows_K=rows_K, overlap_K=overlap_K)


def assert_equal(found: HeadOutput, expected: list[Expected]) -> None:
    total = sum(float(one.total.detach()) for one in expected)
    assert float(found.loss.detach()) == pytest.approx(total, rel=1e-5)
    assert torch.equal(found.survived_TK, torch.cat([one.survived_TK for one in expected]))
    assert torch.equal(found.rows_K, sum(one.rows_K for one in expected))
    overlap_K = torch.stack([one.overlap_K for one in expected]).sum(0)
    torch.testing.assert_close(found.overlap_K.double(), overlap_K, rtol=1e-4, atol=1e-4)
    weight_K = STEP_WEIGHT ** torch.arange(len(found.loss_K))
    assert float((found.loss_K * weight_K).sum()) == pytest.approx(total, rel=1e-5)


# ---- training --------------------------------------------------------------------------------------------

GOALS = {
    "soft_ce": objective(),
    "kl": objective(loss="kl"),
    "lk": objective(loss="lk"),
    "lk_hybrid": objective(loss="lk_hybrid"),
    "hard_ce": objective(loss="hard_ce"),
    "only surviving": objective(chains="surviving"),
    "served": objective(chains="served"),
    "context too": objective(context_weight=CONTEXT_WEIGHT),
    "context of survivors": objective(context_weight=CONTEXT_WEIGHT, chains="surviving"),
    "context of served": objective(context_weight=CONTEXT_WEIGHT, chains="served"),
    "fewer steps than heads": objective(depth=2),
}


@pytest.mark.parametrize("goal", GOALS)
@ALL_SHAPES
def test_forward_equals_vllm_slot_by_slot_and_so_do_its_gradients(
    shape: str, goal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "STILL_RIGHT", 1.0)  # what is left to chance: test_eagle3.py
    head, frozen = make_head(shape), make_frozen(shape)
    documents = [make_document(head, frozen, 40, 6, seed=2), make_document(head, frozen, 11, 3, seed=3)]
    served = Served(head, frozen)
    expected = [served.unroll(document, GOALS[goal], opening=2) for document in documents]
    output = head(pack(*documents, opening=2), frozen, GOALS[goal])
    assert_equal(output, expected)
    assert output.survived_K.tolist() == sorted(output.survived_K.tolist(), reverse=True)
    assert output.survived_K[-1] > 0, "some chain survives all steps"
    output.loss.backward()
    sum(one.total for one in expected).backward()  # type: ignore[union-attr]
    for name, parameter in head.named_parameters():
        wanted, found = served.weights[name].grad, parameter.grad
        assert (wanted is None) is (found is None), name
        if wanted is not None and found is not None:
            assert wanted.norm() > 0, name
            assert (found - wanted).norm() / wanted.norm() < 1e-3, name


def test_survivors_are_those_of_a_naive_chain() -> None:
    """Flags of step j: drafts 0 to j all equal the text; a token outside the draft vocabulary is a miss."""
    head, frozen = make_head(), make_frozen()
    document = make_document(head, frozen, 30, 4, seed=5)
    served, tokens = Served(head, frozen), document.tokens_T.tolist()
    found = head(pack(document), frozen, objective()).survived_TK.tolist()
    for slot in range(2, 30 - 2 - K):
        drafts = served.drafts(document.last_TD[slot])
        assert found[slot] == [drafts[: step + 1] == tokens[slot + 2 : slot + 3 + step] for step in range(K)]
    even = replace(document, tokens_T=document.tokens_T // 2 * 2)
    output = head(pack(even), frozen, objective())
    assert not output.survived_TK.any()
    assert output.rows_K[0] > 0


def slot_gradients(head: Medusa, frozen: FrozenTarget, batch: HeadBatch, depth: int) -> Tensor:
    """Size of the loss's gradient with respect to the state of each position [T]."""
    batch = replace(batch, last_TD=batch.last_TD.clone().requires_grad_())
    head(batch, frozen, objective(depth=depth)).loss.backward()
    assert batch.last_TD.grad is not None
    return batch.last_TD.grad.norm(dim=1)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_mask_follows_the_predicted_token(depth: int) -> None:
    """Answer at 3 to 6: slot 2, the last prompt token's state, drafts the answer's second token."""
    head, frozen = make_head(), make_frozen()
    batch = pack(make_document(head, frozen, 7, 3, seed=7))
    assert (slot_gradients(head, frozen, batch, depth) > 0).tolist() == [False, *[True] * 4, False, False]


def test_packing_does_not_leak() -> None:
    head, frozen = make_head(), make_frozen()
    documents = [make_document(head, frozen, 8 + seed, 3, seed=seed) for seed in range(3)]
    other = make_document(head, frozen, 9, 9, seed=11)  # nothing supervised, as padding would be
    alone_T = torch.cat([slot_gradients(head, frozen, pack(document), K) for document in documents])
    for order in ([other, *documents], [*documents, other]):
        packed_T = slot_gradients(head, frozen, pack(*order), K)
        own, rest = (packed_T[9:], packed_T[:9]) if order[0] is other else (packed_T[:-9], packed_T[-9:])
        torch.testing.assert_close(own, alone_T, rtol=1e-4, atol=1e-6)
        assert not rest.any()
    together = head(pack(*documents), frozen, objective())
    singles = [head(pack(document), frozen, objective()) for document in documents]
    assert torch.equal(torch.cat([one.survived_TK for one in singles]), together.survived_TK)
    assert sum(float(one.loss.detach()) for one in singles) == pytest.approx(float(together.loss.detach()), rel=1e-5)


def test_a_document_does_not_see_the_one_before_it() -> None:
    """A37: other tokens and states there leave loss, flags and gradients here unchanged, bit for bit."""
    head, frozen = make_head(), make_frozen()
    document = make_document(head, frozen, 12, 3, seed=10)
    batches = [pack(make_document(head, frozen, 9, 9, seed=seed), document) for seed in (11, 12)]
    first, second = (head(batch, frozen, objective()) for batch in batches)
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.loss_K, second.loss_K)
    assert torch.equal(first.survived_TK, second.survived_TK)
    one, two = (slot_gradients(head, frozen, batch, K) for batch in batches)
    assert torch.equal(one, two)
    assert one[9:].any()


def test_surviving_chains_with_no_survivor_stops_after_the_first_step() -> None:
    head, frozen = make_head(), make_frozen()
    document = make_document(head, frozen, 20, 3, seed=21)
    missed = pack(replace(document, tokens_T=document.tokens_T // 2 * 2))  # even tokens cannot be drafted
    output = head(missed, frozen, objective(chains="surviving"))
    assert output.loss_K[1:].tolist() == [0, 0, 0]
    output.loss.backward()
    # zeros, not nothing: DDP waits for a gradient of every parameter
    assert [bool(parameter.grad.any()) for parameter in head.blocks.parameters()] == [True] + [False] * (K - 1)


def test_more_steps_than_heads_are_refused() -> None:
    head, frozen = make_head(), make_frozen()
    batch = pack(make_document(head, frozen, 20, 3))
    with pytest.raises(InputError, match=f"k={K + 1}: .*head.num_heads={K}"):
        head(batch, frozen, objective(depth=K + 1))
    with pytest.raises(InputError, match=f"k={K + 1}: .*head.num_heads={K}"):
        head.drafter(frozen).draft(K + 1)


# ---- drafting --------------------------------------------------------------------------------------------


def observed(head: Medusa, frozen: FrozenTarget, last_BQD: Tensor, count_B: Tensor) -> Any:
    batch, queries = last_BQD.shape[:2]
    drafter = head.drafter(frozen)
    drafter.start([[0]] * batch, 16)
    states = TargetPass(
        logits_BQV=torch.empty(batch, queries, V), aux_BQAD=torch.empty(batch, queries, 0, D), last_BQD=last_BQD
    )
    position_BQ = torch.arange(queries).expand(batch, -1)
    drafter.observe(torch.zeros(batch, queries, dtype=torch.long), states, position_BQ, count_B)
    return drafter


@ALL_SHAPES
def test_the_drafter_reads_the_last_real_slot_alone(shape: str) -> None:
    head, frozen = make_head(shape), make_frozen(shape)
    last_BQD = torch.randn(3, 4, D, generator=torch.Generator().manual_seed(31)) * 2
    count_B = torch.tensor([4, 1, 2])
    drafter = observed(head, frozen, last_BQD, count_B)
    served = Served(head, frozen)
    wanted = [served.drafts(last_BQD[row, count - 1]) for row, count in enumerate(count_B.tolist())]
    assert drafter.draft(K).tolist() == wanted
    assert drafter.draft(2).tolist() == [row[:2] for row in wanted]
    drafter.select(torch.tensor([2, 0]))
    assert drafter.draft(K).tolist() == [wanted[2], wanted[0]]


@ALL_SHAPES
def test_top_tokens_are_target_ids_by_falling_probability(shape: str) -> None:
    head, frozen = make_head(shape), make_frozen(shape)
    last_BQD = torch.randn(2, 1, D, generator=torch.Generator().manual_seed(32)) * 2
    drafter = observed(head, frozen, last_BQD, torch.tensor([1, 1]))
    top_BKC = drafter.top_tokens(5)
    assert top_BKC.shape == (2, K, 5)
    assert torch.equal(top_BKC[..., 0], drafter.draft(K))
    served = Served(head, frozen)
    for row, step in itertools.product(range(2), range(K)):
        order = served.logits(last_BQD[row, 0], step).argsort(descending=True)
        assert top_BKC[row, step].tolist() == frozen.target_ids_U[order[:5]].tolist()


@pytest.fixture(scope="module")
def repetitive(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random target that likes to repeat itself, so that drafts of its own next token often hit."""
    folder = tmp_path_factory.mktemp("target")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = make_config()
        config.tie_word_embeddings = True
        config.initializer_range = 0.25
        LlamaForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return Target(folder)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_the_greedy_loop_accepts_what_the_walk_over_its_text_says(repetitive: Target, noise: float) -> None:
    frozen = FrozenTarget(
        repetitive.embedding_VD, repetitive.final_norm_D, repetitive.lm_head_VD, torch.arange(0, V - 3), EPS
    )
    head = Medusa(repetitive.config, MedusaOptions(num_heads=K, num_layers=1, draft_vocab_size=V - 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head.lm_head.weight.copy_(frozen.lm_head_UD)
        for block in head.blocks:
            block.layers[0].weight.copy_(noise * torch.randn(D, D, generator=generator))
    target = HFTarget(repetitive.load(torch.float32, "cpu"), [])
    prompts = [torch.randint(V, (length,), generator=generator).tolist() for length in (1, 3, 6, 6, 9, 4, 5, 7)]
    written = 30
    plain = decode(target, None, prompts, 0, DecodeOptions(max_new_tokens=written + K, end_ids=[]))
    options = DecodeOptions(max_new_tokens=written, end_ids=[])
    answers = decode(target, head.drafter(frozen), prompts, K, options)
    for prompt, answer, longer in zip(prompts, answers, plain, strict=True):
        assert answer.tokens == longer.tokens[:written]
        tokens = torch.tensor([*prompt, *longer.tokens])
        aux, last = target.recorder.forward(tokens[None])
        batch = HeadBatch(
            tokens_T=tokens,
            aux_TAD=aux[0],
            last_TD=last[0],
            position_T=torch.arange(len(tokens)),
            supervised_T=torch.arange(len(tokens)) >= len(prompt),
            documents=[(0, len(tokens))],
        )
        with torch.inference_mode():
            survived_TK = head(batch, frozen, Objective(depth=K)).survived_TK
        end = len(prompt) + written - 1
        assert answer.accepted == walk(survived_TK, len(prompt) - 1, end, text_last=len(tokens) - 1)
    counts = {count for answer in answers for count in answer.accepted}
    assert {0, K} <= counts, f"rounds of all kinds, not only {counts}"


# ---- starting from the target ----------------------------------------------------------------------------


@pytest.fixture
def tiny(cache: Any) -> Target:
    return open_target("builtin:tiny-random")


def half(target: Target) -> DraftVocab:
    ids = torch.arange(0, target.vocab_size, 2)
    t2d = torch.zeros(target.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return DraftVocab(d2t=ids - torch.arange(len(ids)), t2d=t2d)


def test_a_fresh_head_drafts_the_targets_own_next_token(tiny: Target) -> None:
    frozen = build_frozen_target(tiny, half(tiny))
    head = build_head(MedusaConfig(type="medusa", num_heads=2, num_layers=2), tiny, frozen, 0, seed=0)
    assert isinstance(head, Medusa)
    assert {name for name, parameter in head.named_parameters() if parameter.requires_grad} == {
        f"blocks.{head}.layers.{layer}.weight" for head in (0, 1) for layer in (0, 1)
    }
    assert torch.equal(head.lm_head.weight, tiny.lm_head_VD[::2])
    last_BQD = torch.randn(3, 1, tiny.hidden_size)
    states = TargetPass(logits_BQV=torch.empty(0), aux_BQAD=torch.empty(0), last_BQD=last_BQD)
    drafter = head.drafter(frozen)
    drafter.observe(torch.zeros(3, 1, dtype=torch.long), states, torch.zeros(3, 1), torch.ones(3, dtype=torch.long))
    own_B = (frozen.normed(last_BQD[:, 0]) @ tiny.lm_head_VD[::2].T).argmax(-1) * 2
    assert torch.equal(drafter.draft(2), own_B[:, None].expand(-1, 2))


def test_separate_lm_heads_start_from_the_targets_and_need_its_whole_vocabulary(tiny: Target) -> None:
    config = MedusaConfig(type="medusa", num_heads=2, shared_lm_head=False, train_lm_head=True)
    with pytest.raises(InputError, match=f"draft_vocab.size={tiny.vocab_size}"):
        build_head(config, tiny, build_frozen_target(tiny, half(tiny)), 0, seed=0)
    whole = DraftVocab(
        d2t=torch.zeros(tiny.vocab_size, dtype=torch.long), t2d=torch.ones(tiny.vocab_size, dtype=torch.bool)
    )
    head = build_head(config, tiny, build_frozen_target(tiny, whole), 0, seed=0)
    state = head.state_dict()
    assert all(torch.equal(state[f"lm_heads.{number}.weight"], tiny.lm_head_VD) for number in (0, 1))
    assert all(parameter.requires_grad for parameter in head.parameters())

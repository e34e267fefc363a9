"""The tree loop against plain decoding, whole forward passes and naive walks; sampling against softmax.

Shapes: B requests, Q new tokens, N draft nodes, M = N + 1 rows, K draft steps, V vocabulary.
"""

import math
from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.protocols import TargetPass, TreeDrafter
from drafthead.eval.states import StateRecorder
from drafthead.eval.tree_decode import decode_tree
from drafthead.eval.tree_search import TreeShape, search_tree
from drafthead.eval.typical import Typical, accept_typical
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_tree.structure import PADDING, ROOT, tree_visibility
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.eval.speculation import (
    AUX,
    NO_END,
    Scripted,
    V,
    chi_square_p,
    make_eagle3,
    make_medusa,
    observed,
    pass_over,
    tokens_of,
)

CHAIN = TreeShape(parents=(ROOT, 0, 1), heads=(0, 1, 2), ranks=(0, 0, 0), expected_accept_length=1.0)
BUSHY = TreeShape(
    parents=(ROOT, ROOT, 0, 1, ROOT, 0, 2, 3, 6),
    heads=(0, 0, 1, 1, 0, 1, 2, 2, 3),
    ranks=(0, 1, 0, 0, 3, 1, 0, 1, 0),
    expected_accept_length=1.0,
)
SHALLOW = TreeShape(parents=BUSHY.parents[:8], heads=BUSHY.heads[:8], ranks=BUSHY.ranks[:8], expected_accept_length=1.0)
WIDE = TreeShape(parents=(ROOT,) * 4, heads=(0,) * 4, ranks=(0, 1, 2, 3), expected_accept_length=1.0)
NAMES = {"chain": CHAIN, "bushy": BUSHY, "wide": WIDE}
shapes = pytest.mark.parametrize("shape", NAMES.values(), ids=NAMES.keys())


class ScriptedTree(Scripted):
    """Knows the texts; at each place of a text one rank, or none, is right. Checks the states that it is shown."""

    max_depth = 4

    def __init__(self, texts: list[list[int]], ranks: list[list[int]], states: list[TargetPass] | None = None):
        super().__init__(texts, [])
        self.ranks = ranks
        self.states = states

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        super().observe(next_BQ, states, position_BQ, count_B)
        for row, request in enumerate(self.requests):
            if self.states is not None:
                count = int(count_B[row])
                place_Q = position_BQ[row, :count]
                true = self.states[request]
                torch.testing.assert_close(states.last_BQD[row, :count], true.last_BQD[0, place_Q], rtol=0, atol=2e-4)
                torch.testing.assert_close(states.aux_BQAD[row, :count], true.aux_BQAD[0, place_Q], rtol=0, atol=2e-4)

    def draft_tree(self, shape: TreeShape) -> Tensor:
        return torch.tensor(
            [
                [
                    self._ranked(request, slot + 2 + head, rank)
                    for head, rank in zip(shape.heads, shape.ranks, strict=True)
                ]
                for request, slot in zip(self.requests, self.slots, strict=True)
            ]
        )

    def _ranked(self, request: int, place: int, rank: int) -> int:
        text = self.texts[request]
        right = place < len(text) and self.ranks[request][place] == rank
        return text[place] if right else (text[min(place, len(text) - 1)] + 1 + rank) % V


def scripted_tree(model: Any, texts: list[list[int]], seed: int = 5) -> ScriptedTree:
    """Rank 0 is right every other time, the ranks 1 to 4 (4 is never drafted) share the rest."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1])
    ranks = [chances.multinomial(len(text), replacement=True, generator=generator).tolist() for text in texts]
    recorder = StateRecorder(model, AUX)
    return ScriptedTree(texts, ranks, [pass_over(recorder, text) for text in texts])


def longest_right_path(tokens: list[int], shape: TreeShape, ahead: list[int]) -> int:
    """How many nodes lie on the longest path that spells the text's next tokens."""
    depth_of = {ROOT: 0}
    for node, (parent, token) in enumerate(zip(shape.parents, tokens, strict=True)):
        depth = depth_of.get(parent)
        if depth is not None and depth < len(ahead) and ahead[depth] == token:
            depth_of[node] = depth + 1
    return max(depth_of.values())


# ---- the pass --------------------------------------------------------------------------------------------


def build(kind: str) -> Any:
    """Small targets whose attention differs: head dim 64 with one kv head for all, normed queries and keys."""
    common = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        if kind == "qwen3":
            config = Qwen3Config(**common, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
            return Qwen3ForCausalLM(config).eval().requires_grad_(False)
        shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
        config = LlamaConfig(**common, **shape, initializer_range=0.2)
        return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["llama head dim 64", "qwen3"])
def test_a_tree_pass_equals_whole_passes_over_every_path(kind: str, prompts: list[list[int]]) -> None:
    """Logits and states of each row, for prompts of different lengths; the cache is left as it was."""
    model = build(kind)
    target, known_B = HFTarget(model, AUX), torch.tensor([len(prompt) for prompt in prompts])
    target.start(prompts, max(known_B.tolist()) + 8)
    before = [layer.keys.clone() for layer in target.layers if layer.keys is not None]
    tokens_BM = torch.randint(V, (len(prompts), BUSHY.num_nodes + 1), generator=torch.Generator().manual_seed(2))
    parent_BN = BUSHY.parent_N("cpu").expand(len(prompts), -1)
    found = target.step_tree(tokens_BM, known_B, tree_visibility(parent_BN))
    assert all(torch.equal(layer.keys, old) for layer, old in zip(target.layers, before, strict=True))  # type: ignore[arg-type]
    assert model.config._attn_implementation == "sdpa", "put back"
    recorder = StateRecorder(model, AUX)
    for request, prompt in enumerate(prompts):
        for row in range(BUSHY.num_nodes + 1):
            path, node = [], row - 1
            while node != ROOT:
                path.insert(0, int(tokens_BM[request, node + 1]))
                node = BUSHY.parents[node]
            ids = [*prompt, int(tokens_BM[request, 0]), *path]
            logits_V = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(found.logits_BQV[request, row], logits_V, rtol=0, atol=1e-4)
            true = pass_over(recorder, ids)
            torch.testing.assert_close(found.last_BQD[request, row], true.last_BQD[0, -1], rtol=0, atol=1e-4)
            torch.testing.assert_close(found.aux_BQAD[request, row], true.aux_BQAD[0, -1], rtol=0, atol=1e-4)


def test_a_pass_after_a_kept_path_equals_plain_decoding(model: Any, target: HFTarget, prompts: list[list[int]]) -> None:
    known_B = torch.tensor([len(prompt) for prompt in prompts])
    target.start(prompts, max(known_B.tolist()) + 8)
    tokens_BM = torch.randint(V, (len(prompts), BUSHY.num_nodes + 1), generator=torch.Generator().manual_seed(3))
    parent_BN = BUSHY.parent_N("cpu").expand(len(prompts), -1)
    target.step_tree(tokens_BM, known_B, tree_visibility(parent_BN))
    path = [0, 2, 4, 8]  # the root, then nodes 1, 3, 7
    row_BQ = torch.tensor(path).expand(len(prompts), -1)
    target.keep_path(row_BQ, known_B[:, None] + torch.arange(4))
    result = target.step(torch.full((len(prompts), 1), 5), known_B[:, None] + 4)
    for request, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *tokens_BM[request, path].tolist(), 5]])
        logits_V = model(ids, use_cache=False).logits[0, -1]
        torch.testing.assert_close(result.logits_BQV[request, 0], logits_V, rtol=0, atol=1e-4)


def test_a_target_whose_attention_cannot_be_replaced_is_refused(
    target: HFTarget, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    known_B = torch.tensor([len(prompts[0])])
    target.start(prompts[:1], 20)
    monkeypatch.setattr(type(target.model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(InputError, match=r"eval\.tree: the attention of LlamaForCausalLM cannot be replaced"):
        target.step_tree(torch.zeros(1, 4, dtype=torch.long), known_B, tree_visibility(CHAIN.parent_N("cpu")[None]))


# ---- greedy ----------------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("batch", [1, 8], ids=lambda batch: f"batch {batch}")
@pytest.mark.parametrize("end", [[NO_END], [7, 11]], ids=["no end", "two end ids"])
def test_the_text_is_that_of_plain_decoding(
    model: Any, target: HFTarget, prompts: list[list[int]], shape: TreeShape, batch: int, end: list[int]
) -> None:
    options = DecodeOptions(max_new_tokens=17, end_ids=end)
    plain = decode(target, None, prompts[:batch], 0, options)
    drafters: list[TreeDrafter] = [make_eagle3(model)] + ([make_medusa(model)] if shape.depth <= 3 else [])
    for drafter in drafters:
        answers = decode_tree(target, drafter, prompts[:batch], shape, options)
        assert tokens_of(answers) == tokens_of(plain)
        assert [answer.finish_reason for answer in answers] == [answer.finish_reason for answer in plain]


@shapes
def test_accepted_counts_and_states_equal_a_walk_over_the_text(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]], shape: TreeShape
) -> None:
    """Many rounds, each with another path, some not ending in a leaf: a node kept in the wrong place of the cache
    would show in the states of every later round, which the drafter compares with whole passes."""
    drafter = scripted_tree(model, texts)
    answers = decode_tree(target, drafter, prompts, shape, DecodeOptions(max_new_tokens=17, end_ids=[NO_END]))
    counts = set()
    for request, (answer, prompt, text) in enumerate(zip(answers, prompts, texts, strict=True)):
        assert answer.tokens == text[len(prompt) :][:17]
        expected, slot = [], len(prompt) - 1
        while slot + 1 < len(prompt) + 16:
            drafter.requests, drafter.slots = [request], [slot]
            expected.append(longest_right_path(drafter.draft_tree(shape)[0].tolist(), shape, text[slot + 2 :]))
            slot += expected[-1] + 1
        assert answer.accepted == expected
        counts |= set(expected)
    assert counts == set(range(shape.depth + 1)), "paths of every length"


@pytest.mark.parametrize("k", [1, 3], ids=lambda k: f"k={k}")
def test_a_chain_as_a_tree_accepts_what_the_chain_loop_does(
    model: Any, target: HFTarget, prompts: list[list[int]], k: int
) -> None:
    shape = TreeShape(
        parents=tuple(range(-1, k - 1)), heads=tuple(range(k)), ranks=(0,) * k, expected_accept_length=1.0
    )
    options = DecodeOptions(max_new_tokens=17, end_ids=[4, 7])
    for drafter in (make_eagle3(model), make_medusa(model)):
        assert decode_tree(target, drafter, prompts, shape, options) == decode(target, drafter, prompts, k, options)


def test_a_tree_that_holds_the_chain_never_needs_more_rounds_on_average(
    model: Any, target: HFTarget, prompts: list[list[int]]
) -> None:
    options = DecodeOptions(max_new_tokens=17, end_ids=[NO_END])
    chain, tree = (decode_tree(target, make_eagle3(model), prompts, shape, options) for shape in (CHAIN, BUSHY))
    assert sum(len(answer.accepted) for answer in tree) < sum(len(answer.accepted) for answer in chain)


@pytest.mark.parametrize("make", [make_eagle3, make_medusa], ids=["eagle3", "medusa"])
def test_every_node_of_a_drafted_tree_follows_its_own_path(
    model: Any, prompts: list[list[int]], texts: list[list[int]], make: Any
) -> None:
    """A node's token is the one of its rank after its own ancestors, drafted as a chain by a drafter of its own."""
    drafter = observed(make, model, prompts, texts)
    shape = BUSHY if drafter.max_depth >= 4 else SHALLOW
    found_BN = drafter.draft_tree(shape)
    assert torch.equal(found_BN, drafter.draft_tree(shape)), "drafting leaves no traces"
    for request, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = observed(make, model, [prompt], [text])
        for node in range(shape.num_nodes):
            path, above = [], shape.parents[node]
            while above != ROOT:
                path.insert(0, int(found_BN[request, above]))
                above = shape.parents[above]
            top_KR = alone.rank_tokens(torch.tensor([[*path, 0]]), 4)[0]
            assert int(found_BN[request, node]) == int(top_KR[-1, shape.ranks[node]])


def test_a_searched_tree_runs(model: Any, target: HFTarget, prompts: list[list[int]]) -> None:
    shape = search_tree(torch.tensor([[0.4, 0.2, 0.1, 0.05]] * 3), nodes=20, depth=4)
    options = DecodeOptions(max_new_tokens=9, end_ids=[4, 7])
    answers = decode_tree(target, make_medusa(model), prompts, shape, options)
    assert tokens_of(answers) == tokens_of(decode(target, None, prompts, 0, options))


# ---- sampling --------------------------------------------------------------------------------------------

TEMPERATURE = 2.5


class AnyText(ScriptedTree):
    """Drafts around one text whatever was sampled."""

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        self.slots = position_BQ[torch.arange(len(count_B)), count_B - 1].tolist()


def sampled(
    target: HFTarget, prompt: list[int], text: list[int], draws: int, typical: Typical | None = None
) -> tuple[list[int], list[int]]:
    """First tokens, and the two after them as one number, of a tree round whose nodes hold the greedy text."""
    shape = TreeShape(
        parents=(ROOT, ROOT, 0, 0, 1), heads=(0, 0, 1, 1, 1), ranks=(0, 1, 0, 1, 0), expected_accept_length=1.0
    )
    drafter = AnyText([text] * draws, [[0] * len(text)] * draws)
    options = DecodeOptions(max_new_tokens=3, end_ids=[NO_END], temperature=TEMPERATURE, seed=11, typical=typical)
    answers = decode_tree(target, drafter, [prompt] * draws, shape, options)
    return [one.tokens[0] for one in answers], [one.tokens[1] * V + one.tokens[2] for one in answers]


def true_distributions(model: Any, prompt: list[int]) -> tuple[Tensor, Tensor]:
    """Of the first token, and of the two after it together [V * V]."""

    def probabilities(rows: list[list[int]]) -> Tensor:
        logits_BV: Tensor = model(torch.tensor(rows), use_cache=False).logits[:, -1]
        return (logits_BV.double() / TEMPERATURE).softmax(-1)

    first_V = probabilities([prompt])[0]
    second_VV = probabilities([[*prompt, a] for a in range(V)])
    third_VVV = probabilities([[*prompt, a, b] for a in range(V) for b in range(V)]).view(V, V, V)
    return first_V, torch.einsum("a,ab,abc->bc", first_V, second_VV, third_VVV).flatten()


def test_sampled_texts_follow_the_targets_softmax(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    first_V, pair_X = true_distributions(model, prompts[3])
    assert first_V.max() < 0.9, "there is something to sample"
    first, pairs = sampled(target, prompts[3], texts[3], draws=8000)
    assert chi_square_p(first, first_V) > 1e-3
    assert chi_square_p(pairs, pair_X) > 1e-3
    assert chi_square_p(pairs, pair_X.view(V, V).T.flatten()) < 1e-6, "the test has power"


def test_typical_acceptance_changes_the_distribution(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    """Why its numbers are labelled."""
    _, pair_X = true_distributions(model, prompts[3])
    _, pairs = sampled(target, prompts[3], texts[3], draws=2000, typical=Typical())
    assert chi_square_p(pairs, pair_X) < 1e-6


# ---- typical acceptance ----------------------------------------------------------------------------------


def typical_by_hand(
    logits_MV: Tensor, draft_N: list[int], parent_N: list[int], temperature: float, rule: Typical
) -> list[int]:
    """Nodes of the longest acceptable path, of the most likely one among equals."""
    best: tuple[int, float] = (0, 0.0)
    paths: dict[int, tuple[list[int], float]] = {ROOT: ([], 0.0)}
    kept: list[int] = []
    for node, (token, parent) in enumerate(zip(draft_N, parent_N, strict=True)):
        if parent == PADDING or parent not in paths:
            continue
        p_V = (logits_MV[parent + 1].double() / temperature).softmax(-1)
        entropy = -float((p_V * p_V.log()).sum())
        if float(p_V[token]) > min(rule.epsilon, rule.delta * math.exp(-entropy)):
            before, log_p = paths[parent]
            paths[node] = ([*before, node], log_p + math.log(p_V[token]))
            if (len(before) + 1, paths[node][1]) > best:
                best, kept = (len(before) + 1, paths[node][1]), paths[node][0]
    return kept


def test_typical_acceptance_equals_the_rule_by_hand() -> None:
    generator = torch.Generator().manual_seed(1)
    batch, nodes, vocab = 200, 7, 6
    logits_BMV = 2 * torch.randn(batch, nodes + 1, vocab, generator=generator)
    draft_BN = torch.randint(vocab, (batch, nodes), generator=generator)
    parent_BN = torch.stack([torch.randint(ROOT, node, (batch,), generator=generator) for node in range(nodes)], 1)
    parent_BN[::3, -2:] = PADDING
    rule = Typical(epsilon=0.2, delta=0.6)
    sampling = Sampling(
        temperature_B=torch.full((batch,), 0.8), seed_B=torch.arange(batch), position_B=torch.full((batch,), 3)
    )
    accepted_B, output_BM, path_BN = accept_typical(logits_BMV, draft_BN, parent_BN, sampling, rule)
    for request in range(batch):
        tokens, parents = draft_BN[request].tolist(), parent_BN[request].tolist()
        path = typical_by_hand(logits_BMV[request], tokens, parents, 0.8, rule)
        count = int(accepted_B[request])
        assert path_BN[request].tolist() == path + [-1] * (nodes - len(path))
        assert output_BM[request, :count].tolist() == [tokens[node] for node in path]
        assert 0 <= int(output_BM[request, count]) < vocab
        assert output_BM[request, count + 1 :].tolist() == [-1] * (nodes - count)
    assert accepted_B.unique().numel() > 3


def test_the_token_behind_a_typical_path_is_sampled_from_the_target() -> None:
    """Nothing is acceptable above a threshold of 1, so every token is the target's own."""
    draws = 4000
    logits_BMV = torch.randn(V, generator=torch.Generator().manual_seed(6)).expand(draws, 3, V)
    sampling = Sampling(
        temperature_B=torch.full((draws,), 1.3), seed_B=torch.arange(draws), position_B=torch.zeros(draws).long()
    )
    draft_BN, parent_BN = torch.tensor([[0, 1]]).expand(draws, -1), torch.tensor([[ROOT, 0]]).expand(draws, -1)
    rule = Typical(epsilon=1.0, delta=1e9)
    accepted_B, output_BM, _ = accept_typical(logits_BMV, draft_BN, parent_BN, sampling, rule)
    assert not accepted_B.any()
    p_V = (logits_BMV[0, 0].double() / 1.3).softmax(-1)
    assert chi_square_p(output_BM[:, 0].tolist(), p_V) > 1e-3


def test_a_loop_accepts_typically_as_a_chain_and_as_a_tree(
    model: Any, target: HFTarget, prompts: list[list[int]]
) -> None:
    """With a threshold of 0 every draft is kept."""
    options = DecodeOptions(
        max_new_tokens=13, end_ids=[NO_END], temperature=1.0, typical=Typical(epsilon=0.0, delta=0.0)
    )
    for answer in decode(target, make_eagle3(model), prompts, 3, options):
        assert answer.accepted == [3, 3, 3]
    for answer in decode_tree(target, make_eagle3(model), prompts, BUSHY, options):
        assert set(answer.accepted) == {4}


def test_typical_acceptance_without_sampling_is_refused() -> None:
    with pytest.raises(InputError, match=r"eval\.typical: .* temperature above 0"):
        DecodeOptions(max_new_tokens=3, end_ids=[], typical=Typical())

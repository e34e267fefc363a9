"""Tree verification: the definitions against loops and plain probabilities, the kernels against the definitions.

Shapes: B requests, N draft nodes, M = N + 1 rows (row 0 the root), V target vocabulary, U draft vocabulary.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from drafthead.kernels import philox
from drafthead.kernels.verify_greedy.op import verify_greedy
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.op import verify_sampling
from drafthead.kernels.verify_tree import reference
from drafthead.kernels.verify_tree.check import KINDS, TreeRound, compare, draw_children, random_parents, random_round
from drafthead.kernels.verify_tree.op import verify_tree_greedy, verify_tree_sampling
from drafthead.kernels.verify_tree.structure import PADDING, ROOT, tree_depth, tree_visibility
from torch import Tensor

from .distribution import CHUNK, DRAWS, Drawn, Toy, chi_square_p, p_values

# the interpreter's arithmetic over inf and NaN logits
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
IMPLEMENTATIONS = pytest.mark.parametrize("impl", ["reference", "triton"])
KIND = pytest.mark.parametrize("kind", KINDS)
INF, NAN = float("inf"), float("nan")


def generate(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- structure -------------------------------------------------------------------------------------------


def path_of(parents: list[int], row: int) -> list[int]:
    """Rows from the root to this one."""
    return [0] if row == 0 else [*path_of(parents, parents[row - 1] + 1), row]


@pytest.mark.parametrize("nodes", [0, 1, 2, 7, 63, 64])
def test_a_row_sees_itself_and_its_ancestors(device: str, nodes: int) -> None:
    parent_BN = random_parents(4, nodes, generate(nodes))
    if nodes > 2:
        parent_BN[1] = torch.arange(nodes) - 1
        parent_BN[2] = ROOT
    visible_BMM = tree_visibility(parent_BN.to(device))
    depth_BM = tree_depth(visible_BMM)
    for request, parents in enumerate(parent_BN.tolist()):
        for row in range(nodes + 1):
            missing = row > 0 and parents[row - 1] == PADDING
            path = [] if missing else path_of(parents, row)
            assert visible_BMM[request, row].nonzero()[:, 0].tolist() == path
            assert depth_BM[request, row] == max(len(path) - 1, 0)


def test_missing_nodes_may_stand_anywhere() -> None:
    visible_BMM = tree_visibility(torch.tensor([[ROOT, PADDING, 0, PADDING, 2]]))
    seen = [row.nonzero()[:, 0].tolist() for row in visible_BMM[0]]
    assert seen == [[0], [0, 1], [], [0, 1, 3], [], [0, 1, 3, 5]]


# ---- greedy ----------------------------------------------------------------------------------------------


def greedy_by_loop(logits: list[list[float]], draft: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """Output tokens and path: from row to row while a child holds the first largest logit's token."""
    output, path, row = [], [], 0
    while True:
        own = logits[row].index(max(logits[row]))
        output.append(own)
        children = [node for node in range(len(draft)) if parents[node] == row - 1 and draft[node] == own]
        if not children:
            return output, path
        path.append(children[0])
        row = children[0] + 1


def hit_half(logits_BMV: Tensor, parent_BN: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens every other of which is the argmax of its parent's row."""
    own_BN = logits_BMV.argmax(-1).gather(1, (parent_BN + 1).clamp_min(0))
    noise_BN = torch.randint(logits_BMV.shape[-1], parent_BN.shape, generator=generator)
    return torch.where(torch.rand(parent_BN.shape, generator=generator) < 0.5, own_BN, noise_BN)


@IMPLEMENTATIONS
@pytest.mark.parametrize("nodes", [0, 1, 12, 63], ids=lambda nodes: f"N={nodes}")
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_greedy_equals_a_loop(device: str, impl: str, nodes: int, ties: bool) -> None:
    generator = generate(nodes)
    batch = 120 // max(nodes, 6)
    logits_BMV = torch.randn(batch, nodes + 1, 5, generator=generator)
    logits_BMV = logits_BMV.round() if ties else logits_BMV
    parent_BN = random_parents(batch, nodes, generator)
    draft_BN = hit_half(logits_BMV, parent_BN, generator)
    inputs = [each.to(device) for each in (logits_BMV, draft_BN, parent_BN)]
    accepted_B, output_BM, path_BN = (each.tolist() for each in verify_tree_greedy(*inputs, impl=impl))
    for request in range(batch):
        rows = logits_BMV[request].tolist(), draft_BN[request].tolist(), parent_BN[request].tolist()
        output, path = greedy_by_loop(*rows)
        assert accepted_B[request] == len(path)
        assert output_BM[request] == output + [-1] * (nodes + 1 - len(output))
        assert path_BN[request] == path + [-1] * (nodes - len(path))
    assert nodes < 2 or max(accepted_B) > 1


@IMPLEMENTATIONS
def test_greedy_on_a_chain_is_verify_greedy(device: str, impl: str) -> None:
    """With ties, NaN and inf, and ragged lengths."""
    given = random_round(generate(1), (9, 5, 40), dtype=torch.float16, special=True)
    given = replace(given, parent_BN=(torch.arange(5) - 1).repeat(9, 1))
    num_draft_B = torch.arange(9) % 6
    given.parent_BN[torch.arange(5) >= num_draft_B[:, None]] = PADDING
    given = replace(given, draft_BN=hit_half(given.logits_BMV, given.parent_BN, generate(2))).to(device)
    plain = (given.logits_BMV, given.draft_BN)
    accepted_B, output_BM, path_BN = verify_tree_greedy(*plain, given.parent_BN, impl=impl)
    chain_B, chain_BQ, mask_BK = verify_greedy(*plain, num_draft_B.to(device), impl=impl)
    assert torch.equal(accepted_B, chain_B)
    assert torch.equal(output_BM, chain_BQ)
    assert torch.equal(path_BN, torch.where(mask_BK, torch.arange(5, device=device), -1))


# ---- sampling, one request at a time -----------------------------------------------------------------------


def sampling(batch: int, device: str = "cpu", temperature: float = 1.0) -> Sampling:
    return Sampling(
        temperature_B=torch.full((batch,), temperature, device=device),
        seed_B=torch.arange(batch, device=device) * 7919,
        position_B=torch.full((batch,), 3, device=device),
    )


@IMPLEMENTATIONS
@KIND
def test_sampling_on_a_chain_is_verify_sampling(device: str, impl: str, kind: str) -> None:
    """The same tokens, by the same random numbers."""
    batch, nodes = 10, 4
    given = random_round(generate(1), (batch, nodes, 30), kind)
    num_draft_B = torch.arange(batch) % (nodes + 1)
    parent_BN = (torch.arange(nodes) - 1).repeat(batch, 1)
    parent_BN[torch.arange(nodes) >= num_draft_B[:, None]] = PADDING
    draft_BN = given.draft_BN
    if given.draft_BMU is not None:
        draft_BN = draw_children(given.draft_BMU, parent_BN, given.target_ids_U, generate(2))
    given = replace(given, parent_BN=parent_BN, draft_BN=draft_BN).to(device)
    accepted_B, output_BM, _ = verify_tree_sampling(**given.arguments(), impl=impl)  # type: ignore[arg-type]
    probs_BKU = None if given.draft_BMU is None else given.draft_BMU[:, :-1]
    chain = (given.logits_BMV, given.draft_BN, num_draft_B.to(device), given.sampling, probs_BKU, given.target_ids_U)
    chain_B, chain_BQ, _ = verify_sampling(*chain, impl=impl)
    assert torch.equal(accepted_B, chain_B)
    assert torch.equal(output_BM, chain_BQ)
    assert 0 < accepted_B.sum() < num_draft_B.sum()


@IMPLEMENTATIONS
@KIND
def test_temperature_zero_is_the_greedy_walk(device: str, impl: str, kind: str) -> None:
    given = random_round(generate(5), (8, 9, 7), kind).to(device)
    given = replace(given, sampling=sampling(8, device, temperature=0.0))
    found = verify_tree_sampling(**given.arguments(), impl=impl)  # type: ignore[arg-type]
    greedy = verify_tree_greedy(given.logits_BMV, given.draft_BN, given.parent_BN, impl=impl)
    assert all(torch.equal(one, other) for one, other in zip(found, greedy, strict=True))
    assert found[0].any()


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", ["whole support", "same distribution", "one token"])
def test_a_child_that_must_be_accepted_is(device: str, impl: str, case: str) -> None:
    """Children that are all there is, a child drawn from the target's own distribution, a vocabulary of one."""
    batch, vocab = 16, 1 if case == "one token" else 3
    logits_BMV = torch.randn(1, 4, vocab, generator=generate(3)).repeat(batch, 1, 1).to(device)
    parent_BN = torch.tensor([[ROOT, ROOT, ROOT]], device=device).repeat(batch, 1)
    draft_BN = torch.tensor([[0, 1, 2]], device=device).repeat(batch, 1) % vocab
    probs_BMU = logits_BMV.softmax(-1) if case == "same distribution" else None
    found = verify_tree_sampling(logits_BMV, draft_BN, parent_BN, sampling(batch, device), probs_BMU, impl=impl)
    assert found[0].tolist() == [1] * batch
    assert torch.equal(found[1][:, 0], draft_BN.gather(1, found[2][:, :1])[:, 0])
    assert case == "whole support" or (found[2][:, 0] == 0).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("probs", [False, True], ids=["chosen", "dense"])
def test_a_refused_token_is_never_put_out(device: str, impl: str, probs: bool) -> None:
    """Nor accepted as a later sibling; tokens outside the vocabulary are refused and change nothing."""
    batch = 24
    generator = generate(4)
    logits_BMV = torch.randn(batch, 5, 4, generator=generator).to(device)
    parent_BN = torch.full((batch, 4), ROOT, device=device)
    draft_BN = torch.tensor([[9, 2, 2, -5]], device=device).repeat(batch, 1)
    probs_BMU = torch.tensor([0.1, 0.1, 0.7, 0.1], device=device).expand(batch, 5, -1) if probs else None
    given = (sampling(batch, device), probs_BMU)
    _, output_BM, path_BN = verify_tree_sampling(logits_BMV, draft_BN, parent_BN, *given, impl=impl)
    assert set(path_BN[:, 0].tolist()) == {-1, 1}
    assert (output_BM[path_BN[:, 0] < 0, 0] != 2).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("off", [-0.01, 0.01], ids=["just enough", "just too little"])
def test_what_is_left_of_q_is_exact(device: str, impl: str, off: float) -> None:
    """The second child's chance rests on a ten-millionth of q, which 1 - q(x_1) in fp32 misses by a fifth."""
    given = sampling(12, device)
    step_B = torch.zeros(12, dtype=torch.long, device=device)
    uniform_B = philox.uniform(given.seed_B, given.position_B, step_B, philox.ACCEPT, 2)[:, 1]
    left = 1e-7
    q_V = torch.tensor([1 - left, left / 2, left / 2, 0.0], device=device)
    # after the first child, which p lacks: p(x_2) over q(x_2) / left = 1/2
    second_B = (uniform_B * (1 - off) / 2).clamp_max(0.49)
    p_BV = torch.stack([second_B * 0, second_B, second_B * 0, 1 - second_B], 1)
    logits_BMV = p_BV.log()[:, None].repeat(1, 3, 1)
    draft_BN = torch.tensor([[0, 1]], device=device).repeat(12, 1)
    parent_BN = torch.full((12, 2), ROOT, device=device)
    found = verify_tree_sampling(logits_BMV, draft_BN, parent_BN, given, q_V.expand(12, 3, -1), impl=impl)
    assert found[0].tolist() == [int(off < 0)] * 12


def test_a_request_does_not_depend_on_its_neighbours(device: str) -> None:
    for kind in KINDS:
        given = random_round(generate(6), (4, 5, 300), kind).to(device)
        whole = verify_tree_sampling(**given.arguments(), impl="triton")  # type: ignore[arg-type]
        for rows in ([2], [3, 0, 1]):
            part = given.map(lambda tensor, rows=rows: tensor[rows])  # type: ignore[misc]
            found = verify_tree_sampling(**part.arguments(), impl="triton")  # type: ignore[arg-type]
            assert all(torch.equal(one, other[rows]) for one, other in zip(found, whole, strict=True))


def test_other_seeds_and_positions_give_other_tokens() -> None:
    given = random_round(generate(7), (1, 0, 5000)).map(lambda tensor: tensor.repeat(64, *[1] * (tensor.ndim - 1)))
    same = sampling(64)
    for changed in (
        same,
        replace(same, seed_B=same.seed_B * 0, position_B=torch.arange(64)),
        replace(same, seed_B=torch.arange(64) << 40),
    ):
        found = verify_tree_sampling(given.logits_BMV, given.draft_BN, given.parent_BN, changed)
        assert len(set(found[1][:, 0].tolist())) > 32


# ---- kernels -----------------------------------------------------------------------------------------------


@KIND
@pytest.mark.parametrize("vocab", [1, 63, 4100], ids=lambda vocab: f"V={vocab}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_any_vocabulary_and_dtype(device: str, kind: str, vocab: int, dtype: torch.dtype) -> None:
    compare(random_round(generate(vocab), (2, 5, vocab), kind, dtype=dtype), device)


@KIND
@pytest.mark.parametrize(("batch", "nodes"), [(0, 3), (0, 0), (2, 0), (1, 1), (1, 63)])
def test_any_tree(device: str, kind: str, batch: int, nodes: int) -> None:
    found = compare(random_round(generate(nodes), (batch, nodes, 50), kind), device)
    assert [list(each.shape) for each in found] == [[batch], [batch, nodes + 1], [batch, nodes]]


@KIND
def test_every_row_starts_anew(device: str, kind: str) -> None:
    """Nothing of the siblings refused above is left after a step down."""
    given = random_round(generate(12), (12, 6, 6), kind)
    given = replace(given, parent_BN=torch.tensor([[ROOT, ROOT, ROOT, 1, 1, 2]]).repeat(12, 1))
    if given.draft_BMU is not None:
        draft_BN = draw_children(given.draft_BMU, given.parent_BN, given.target_ids_U, generate(13))
        given = replace(given, draft_BN=draft_BN)
    found = compare(given, device)
    assert (found[2][:, 0] > 0).sum() > 1


@KIND
def test_infinities_nan_and_cuts(device: str, kind: str) -> None:
    compare(random_round(generate(8), (3, 4, 60), kind, filtered=True, special=True), device)


def test_a_real_vocabulary(device: str) -> None:
    compare(random_round(generate(9), (2, 8, 32000), "sparse", dtype=torch.bfloat16), device)


@pytest.mark.slow
@KIND
def test_a_large_vocabulary(device: str, kind: str) -> None:
    shape = (2, 10, 151936) if device == "cuda" else (1, 2, 151936)
    compare(random_round(generate(10), shape, kind, filtered=True, dtype=torch.bfloat16), device)


@KIND
def test_any_strides(device: str, kind: str) -> None:
    def vocabulary_outermost(tensor: Tensor) -> Tensor:
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1) if tensor.ndim == 3 else tensor

    def with_gaps(tensor: Tensor) -> Tensor:
        if tensor.ndim == 1:
            return tensor.repeat_interleave(2)[::2]
        return torch.nn.functional.pad(tensor, (3, 2))[..., 3:-2]

    given = random_round(generate(11), (3, 6, 75), kind)
    plain = compare(given, device)
    for lay_out in (vocabulary_outermost, with_gaps):
        strided = given.map(lay_out)
        assert not strided.logits_BMV.is_contiguous()
        assert all(torch.equal(one, other) for one, other in zip(compare(strided, device), plain, strict=True))


# ---- lossless ----------------------------------------------------------------------------------------------

TREE = (ROOT, ROOT, 0, 0, 1)
"""Two children of the root; two of the first, one of the second."""


@dataclass(frozen=True, kw_only=True)
class Forest:
    """Rounds of the same tree for a toy target, and what came of them."""

    drawn: Drawn
    accepted_B: Tensor


def grow(toy: Toy, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draft tokens of `TREE`, and the logits and draft probabilities of its rows, which depend on the token before."""
    logits, draft, ids = toy.logits(), toy.draft(), toy.target_ids()
    depth_M = tree_depth(tree_visibility(torch.tensor([TREE])))[0]
    token_BM = torch.zeros(batch, len(TREE) + 1, dtype=torch.long)
    for row, depth in enumerate(depth_M.tolist()):
        children = [node + 1 for node, parent in enumerate(TREE) if parent + 1 == row]
        if children:
            q_B1U = draft[depth, token_BM[:, row, None]]
            siblings_BN = torch.full((batch, len(children)), ROOT)
            token_BM[:, children] = draw_children(q_B1U, siblings_BN, ids, None if toy.name == "chosen" else generator)
    # nothing is drawn from the last rows
    q_BMU = draft[depth_M.clamp_max(toy.steps - 1), token_BM]
    return token_BM[:, 1:], logits[depth_M, token_BM], q_BMU


def draw(toy: Toy, draws: int = DRAWS, device: str = "cpu") -> Drawn:
    """Draft and verify many rounds, as requests with seeds of their own; later tokens are the target's own."""
    parts = []
    for start in range(0, draws, CHUNK):
        batch = min(CHUNK, draws - start)
        generator = generate(start)
        draft_BN, logits_BMV, q_BMU = grow(toy, batch, generator)
        given = TreeRound(
            logits_BMV=logits_BMV,
            draft_BN=draft_BN,
            parent_BN=torch.tensor(TREE).repeat(batch, 1),
            sampling=replace(sampling(batch), seed_B=torch.arange(start, start + batch)),
            draft_BMU=None if toy.name == "chosen" else q_BMU,
            target_ids_U=None if toy.name == "chosen" else toy.target_ids(),
        ).to(device)
        accepted_B, output_BM, _ = verify_tree_sampling(**given.arguments())  # type: ignore[arg-type]
        parts.append(Drawn(accepted_B=accepted_B.cpu(), token_BQ=complete(toy, output_BM[:, :3].cpu(), generator)))
    return Drawn(
        accepted_B=torch.cat([part.accepted_B for part in parts]), token_BQ=torch.cat([part.token_BQ for part in parts])
    )


def complete(toy: Toy, token_BQ: Tensor, generator: torch.Generator) -> Tensor:
    probs = toy.probs()
    for query in range(1, toy.steps + 1):
        own_B = torch.multinomial(probs[query, token_BQ[:, query - 1]], 1, generator=generator)[:, 0]
        token_BQ[:, query] = torch.where(token_BQ[:, query] < 0, own_B, token_BQ[:, query])
    return token_BQ


TOYS = {name: Toy(name=name, kind="sparse" if name == "sparse" else "dense", vocab=5, seed=2) for name in KINDS}
"""A chosen draft takes the most likely tokens of the dense one."""


def first_acceptance(toy: Toy) -> float:
    """Probability that a child of the root is accepted, over all pairs of children."""
    p = toy.probs()[0, 0].tolist()
    q = toy.draft_over_target()[0, 0].tolist()
    if toy.name == "chosen":
        return sum(p[token] for token in sorted(range(len(q)), key=q.__getitem__)[-2:])
    total = 0.0
    for one, two in itertools.permutations(range(len(q)), 2):
        if q[one] * q[two] == 0:
            continue
        chance = q[one] * q[two] / (1 - q[one])
        accept = min(1.0, p[one] / q[one])
        rest = [max(here - there, 0.0) for here, there in zip(p, q, strict=True)]
        again = min(1.0, rest[two] / sum(rest) / (q[two] / (1 - q[one])))
        total += chance * (accept + (1 - accept) * again)
    return total


@KIND
def test_the_output_follows_the_target(device: str, kind: str) -> None:
    """First tokens, pairs and triples; on a CPU by the reference, which the kernel equals request by request."""
    drawn = draw(TOYS[kind], device=device)
    assert min(p_values(drawn, TOYS[kind])) > 1e-3 / (3 * len(KINDS))
    rate = first_acceptance(TOYS[kind])
    deviation = (rate * (1 - rate) / DRAWS) ** 0.5
    assert abs(float((drawn.accepted_B > 0).double().mean()) - rate) < 4 * deviation


def p_stays(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    return p_BV


def p_is_not_normalized(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    return (p_BV - q_BV).clamp_min(0)


def q_stays(q_BV: Tensor, x_BV: Tensor) -> Tensor:
    return q_BV


def q_is_not_normalized(q_BV: Tensor, x_BV: Tensor) -> Tensor:
    return q_BV * (1 - x_BV)


@pytest.mark.parametrize(
    ("kind", "part", "wrong"),
    [
        ("chosen", "residual", p_stays),
        ("chosen", "residual", p_is_not_normalized),
        ("dense", "residual", p_stays),
        ("dense", "residual", p_is_not_normalized),
        ("dense", "without", q_stays),
        ("dense", "without", q_is_not_normalized),
        ("sparse", "without", q_is_not_normalized),
    ],
)
def test_the_same_test_rejects(
    monkeypatch: pytest.MonkeyPatch, kind: str, part: str, wrong: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """With a tenth of the draws."""
    monkeypatch.setattr(reference, part, wrong)
    assert min(p_values(draw(TOYS[kind], draws=DRAWS // 10), TOYS[kind])) < 1e-6


def test_siblings_of_a_chosen_draft_are_no_sample() -> None:
    """Chosen children judged as if they had been drawn are not lossless, which the same test sees."""
    toy = TOYS["dense"]
    batch = DRAWS // 5
    _, logits_BMV, q_BMU = grow(toy, 1, generate(0))
    draft_BN = draw_children(q_BMU, torch.tensor([TREE[:2]]), None, None).expand(batch, -1)
    parent_BN = torch.tensor(TREE[:2]).expand(batch, -1)
    wide = [each[:, :3].expand(batch, -1, -1) for each in (logits_BMV, q_BMU)]
    found = verify_tree_sampling(wide[0], draft_BN, parent_BN, sampling(batch), wide[1])
    counts_V = found[1][:, 0].bincount(minlength=toy.vocab)
    assert chi_square_p(counts_V, batch * toy.probs()[0, 0]) < 1e-6


# ---- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_BMV": torch.zeros(2, 4)}, r"wanted \[B, N \+ 1, V\]"),
        ({"logits_BMV": torch.zeros(2, 4, 0)}, "V at least 1"),
        ({"draft_BN": torch.zeros(2, 4, dtype=torch.long)}, "shapes do not fit"),
        ({"draft_BN": torch.zeros(2, 3)}, r"draft tokens of torch\.float32"),
        ({"parent_BN": torch.zeros(1, 3, dtype=torch.long)}, "shapes do not fit"),
        ({"parent_BN": torch.zeros(2, 3, dtype=torch.bool)}, r"parents of torch\.bool"),
        ({"parent_BN": torch.zeros(2, 3, dtype=torch.long, device="meta")}, "parents on meta"),
        ({"draft_BMU": torch.zeros(2, 3, 6)}, "wanted a row for the root and one for each node"),
        ({"draft_BMU": torch.zeros(2, 4, 5)}, "draft probabilities"),
        ({"draft_BMU": None, "target_ids_U": torch.arange(3)}, "without draft probabilities"),
        ({"sampling": sampling(3)}, "temperature_B"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    fine = random_round(generate(), (2, 3, 6))
    verify_tree_sampling(**fine.arguments())  # type: ignore[arg-type]
    changed = replace(fine, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        verify_tree_sampling(**changed.arguments())  # type: ignore[arg-type]
    if change.keys() <= {"logits_BMV", "draft_BN", "parent_BN"}:
        with pytest.raises(ValueError, match=message):
            verify_tree_greedy(changed.logits_BMV, changed.draft_BN, changed.parent_BN)


def test_the_kernels_take_no_float64(device: str) -> None:
    given = random_round(generate(), (2, 3, 6), "chosen").to(device)
    given = replace(given, logits_BMV=given.logits_BMV.double())
    with pytest.raises(ValueError, match=r"torch\.float64: the kernel takes"):
        verify_tree_sampling(**given.arguments(), impl="triton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torch\.float64: the kernel takes"):
        verify_tree_greedy(given.logits_BMV, given.draft_BN, given.parent_BN, impl="triton")

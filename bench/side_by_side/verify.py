"""Cases of `verify_greedy`, `verify_sampling` and `verify_block`: against vLLM's sampler and plain torch.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary.
"""

import math
from collections.abc import Callable, Iterator

import torch
from drafthead.kernels.verify_block.op import verify_block
from drafthead.kernels.verify_greedy import reference
from drafthead.kernels.verify_greedy.op import verify_greedy
from drafthead.kernels.verify_sampling.check import Round
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.op import verify_sampling
from side_by_side.measure import Case, Contender, our_name, plain
from side_by_side.vllm_sampler import vllm_run
from torch import Tensor

Verify = Callable[..., tuple[Tensor, Tensor, Tensor]]
Shape = tuple[int, int, int]
TINY = ((16, 3, 1000),)
SHAPES = ((64, 8, 151936), (8, 4, 32000), (64, 4, 49152))
CPU_SAMPLING_SHAPES = ((8, 8, 151936), *SHAPES[1:])
"""The reference works on [B, Q, V] in float64, 64 x 8 x 151936 of which take 600 MB each."""
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9
VARIANTS = (
    ("certain drafts", False, False),
    ("sampled drafts", True, False),
    (f"certain drafts, top-k {TOP_K}, top-p {TOP_P}", False, True),
)
"""Name, whether drafts come with probabilities, whether top-k and top-p are set."""


def greedy_cases(device: str, quick: bool) -> Iterator[Case]:
    """One case a shape; all must give the same tokens."""
    for shape in TINY if quick else SHAPES:
        yield _greedy_case(shape, device)


def sampling_cases(device: str, quick: bool) -> Iterator[Case]:
    """Every variant at every shape."""
    for given, what in _rounds(device, quick):
        yield _sampled_case(verify_sampling, sample_in_torch, given, what, vllm="vLLM")


def block_cases(device: str, quick: bool) -> Iterator[Case]:
    """As `sampling_cases`; vLLM's V1 sampler has no block rule, so it does the simpler thing."""
    for given, what in _rounds(device, quick):
        yield _sampled_case(verify_block, sample_block_in_torch, given, what, vllm="vLLM, token by token")


def _greedy_case(shape: Shape, device: str) -> Case:
    given = draw_greedy(shape, device)
    arguments = (given.logits_BQV, given.draft_BK, given.num_draft_B)
    return Case(
        what=_in_words(shape),
        ours=Contender(name=our_name(device), prepare=plain(lambda: verify_greedy(*arguments)[1])),
        peers=(
            Contender(name="vLLM", prepare=lambda: vllm_run(given)),
            Contender(name="torch", prepare=plain(lambda: reference.verify_greedy(*arguments)[1])),
        ),
        agrees=lambda expected, found: torch.equal(expected, found.to(expected.dtype)),
        num_bytes=given.logits_BQV.nbytes,
    )


def _rounds(device: str, quick: bool) -> Iterator[tuple[Round, str]]:
    shapes = CPU_SAMPLING_SHAPES if device == "cpu" else SHAPES
    for shape in TINY if quick else shapes:
        for what, has_probs, filtered in VARIANTS:
            yield draw_sampled(shape, device, has_probs, filtered), f"{_in_words(shape)}, {what}"


def _sampled_case(op: Verify, in_torch: Callable[[Round], Tensor], given: Round, what: str, vllm: str) -> Case:
    arguments = given.arguments()
    return Case(
        what=what,
        ours=Contender(name=our_name(given.logits_BQV.device.type), prepare=plain(lambda: op(**arguments)[1])),
        peers=(
            Contender(name=vllm, prepare=lambda: vllm_run(given)),
            Contender(name="torch", prepare=plain(lambda: in_torch(given))),
        ),
        agrees=equally_long,
        num_bytes=given.logits_BQV.nbytes + _bytes_of_q(given, all_rows=op is verify_block),
    )


def _in_words(shape: Shape) -> str:
    return f"{' x '.join(map(str, shape))} bf16"


def _bytes_of_q(given: Round, all_rows: bool) -> int:
    """Draft probabilities: one row a request, where it was rejected; the block rule sums over all of them."""
    if given.draft_BKU is None:
        return 0
    read = given.draft_BKU if all_rows else given.draft_BKU[:, 0]
    return int(read.nbytes)


def equally_long(expected_BQ: Tensor, found_BQ: Tensor) -> bool:
    """Whether two random outputs have as many tokens on average, within five standard errors."""
    one_B, other_B = ((output_BQ >= 0).sum(-1).double() for output_BQ in (expected_BQ, found_BQ))
    error = ((one_B.var() + other_B.var()) / len(one_B)).sqrt()
    return bool((one_B.mean() - other_B.mean()).abs() <= 5 * error)


# ---- inputs ----------------------------------------------------------------------------------------------


def draw_logits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Rows as a language model's: one token with some 60 % of the probability, a long tail with the rest."""
    device = generator.device
    logits = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
    likely = torch.randint(shape[-1], (*shape[:-1], 1), device=device, generator=generator)
    # the others' exponentials sum to about V exp(1 / (2 T^2))
    return logits.scatter_(-1, likely, TEMPERATURE * (math.log(shape[-1]) + 0.5 / TEMPERATURE**2 + 0.4))


def draw_greedy(shape: Shape, device: str) -> Round:
    """Drafts four of five of which are right."""
    generator = torch.Generator(device).manual_seed(0)
    logits_BQV = draw_logits(shape, generator)
    wrong_BK = torch.randint(shape[-1], (shape[0], shape[1] - 1), device=device, generator=generator)
    is_right_BK = torch.rand(wrong_BK.shape, device=device, generator=generator) < 0.8
    return Round(
        logits_BQV=logits_BQV,
        draft_BK=torch.where(is_right_BK, logits_BQV[:, :-1].argmax(-1), wrong_BK),
        num_draft_B=torch.full((shape[0],), shape[1] - 1, device=device),
        sampling=sampling_of(shape[0], 0.0, False, device),
        draft_BKU=None,
        target_ids_U=None,
    )


def draw_sampled(shape: Shape, device: str, has_probs: bool, filtered: bool) -> Round:
    """Drafts from a distribution near the target's, or its own most likely tokens."""
    generator = torch.Generator(device).manual_seed(0)
    logits_BQV = draw_logits(shape, generator)
    draft_BK, draft_BKU = logits_BQV[:, :-1].argmax(-1), None
    if has_probs:
        noise_BKV = torch.randn(logits_BQV[:, 1:].shape, device=device, generator=generator)
        draft_BKU = (noise_BKV.mul_(0.5) + logits_BQV[:, :-1]).softmax(-1)
        draft_BK = draft_BKU.flatten(0, 1).multinomial(1, generator=generator).view(draft_BK.shape)
    return Round(
        logits_BQV=logits_BQV,
        draft_BK=draft_BK,
        num_draft_B=torch.full((shape[0],), shape[1] - 1, device=device),
        sampling=sampling_of(shape[0], TEMPERATURE, filtered, device),
        draft_BKU=draft_BKU,
        target_ids_U=None,
    )


def sampling_of(batch: int, temperature: float, filtered: bool, device: str) -> Sampling:
    """The same settings for all, different seeds."""
    return Sampling(
        temperature_B=torch.full((batch,), temperature, device=device),
        seed_B=torch.arange(batch, device=device),
        position_B=torch.zeros(batch, dtype=torch.long, device=device),
        top_k_B=torch.full((batch,), TOP_K, device=device) if filtered else None,
        top_p_B=torch.full((batch,), TOP_P, device=device) if filtered else None,
    )


# ---- plain torch -----------------------------------------------------------------------------------------


def target_probs(logits_BQV: Tensor, sampling: Sampling) -> Tensor:
    """softmax in fp32 after temperature, top-k and top-p by sorting."""
    scaled_BQV = logits_BQV.float() / sampling.temperature_B[:, None, None]
    if sampling.top_k_B is None or sampling.top_p_B is None:
        return torch.softmax(scaled_BQV, -1)
    sorted_BQV, ids_BQV = scaled_BQV.sort(-1, descending=True)
    rank_V = torch.arange(logits_BQV.shape[-1], device=logits_BQV.device)
    sorted_BQV.masked_fill_(rank_V >= sampling.top_k_B[:, None, None], float("-inf"))
    probs_BQV = sorted_BQV.softmax(-1)
    before_BQV = probs_BQV.cumsum(-1) - probs_BQV
    sorted_BQV.masked_fill_(before_BQV >= sampling.top_p_B[:, None, None], float("-inf"))
    return torch.softmax(scaled_BQV.scatter_(-1, ids_BQV, sorted_BQV), -1)


def sample_in_torch(given: Round) -> Tensor:
    """Rejection sampling as one would write it."""
    p_BQV = target_probs(given.logits_BQV, given.sampling)
    steps = given.draft_BK.shape[1]
    chance_BK = _of_tokens(p_BQV[:, :-1], given.draft_BK)
    if given.draft_BKU is not None:
        chance_BK = chance_BK / _of_tokens(given.draft_BKU, given.draft_BK)
    accepted_B = (torch.rand_like(chance_BK) < chance_BK).long().cumprod(-1).sum(-1)
    row_B, step_B = torch.arange(len(p_BQV), device=p_BQV.device), accepted_B.clamp_max(steps - 1)
    p_BV = p_BQV[row_B, accepted_B]
    if given.draft_BKU is None:
        left_BV = p_BV.scatter(-1, given.draft_BK[row_B, step_B][:, None], 0)
    else:
        left_BV = (p_BV - given.draft_BKU[row_B, step_B]).clamp_min(0)
    token_B = torch.where((accepted_B < steps)[:, None], left_BV, p_BV).multinomial(1)[:, 0]
    return _compose(given.draft_BK, accepted_B, token_B)


def sample_block_in_torch(given: Round) -> Tensor:
    """Block verification as one would write it, over dense draft probabilities."""
    p_BQV = target_probs(given.logits_BQV, given.sampling)
    q_BKV = given.draft_BKU
    if q_BKV is None:
        q_BKV = torch.zeros_like(p_BQV[:, :-1]).scatter_(-1, given.draft_BK[..., None], 1)
    ratio_BK = _of_tokens(p_BQV[:, :-1], given.draft_BK) / _of_tokens(q_BKV, given.draft_BK)
    joint = [torch.ones_like(ratio_BK[:, 0])]
    for ratio_B in ratio_BK.unbind(1):
        joint.append((joint[-1] * ratio_B).clamp_max(1))
    joint_BQ = torch.stack(joint, 1)
    left_BK = (joint_BQ[:, 1:-1, None] * p_BQV[:, 1:-1] - q_BKV[:, 1:]).clamp_min(0).sum(-1)
    chance_BK = torch.cat([left_BK / (left_BK + 1 - joint_BQ[:, 1:-1]), joint_BQ[:, -1:]], 1)
    count_K = torch.arange(1, len(joint), device=p_BQV.device)
    accepted_B = ((torch.rand_like(chance_BK) < chance_BK) * count_K).amax(-1)
    row_B = torch.arange(len(p_BQV), device=p_BQV.device)
    factor_B1 = joint_BQ.gather(1, accepted_B[:, None])
    p_BV, q_BV = p_BQV[row_B, accepted_B], q_BKV[row_B, accepted_B.clamp_max(len(count_K) - 1)]
    left_BV = (factor_B1 * p_BV - q_BV).clamp_min(0)
    token_B = torch.where((accepted_B < len(count_K))[:, None], left_BV, p_BV).multinomial(1)[:, 0]
    return _compose(given.draft_BK, accepted_B, token_B)


def _of_tokens(probs_BKV: Tensor, draft_BK: Tensor) -> Tensor:
    return probs_BKV.gather(-1, draft_BK[..., None])[..., 0]


def _compose(draft_BK: Tensor, accepted_B: Tensor, token_B: Tensor) -> Tensor:
    index_Q = torch.arange(draft_BK.shape[1] + 1, device=draft_BK.device)
    output_BQ = torch.nn.functional.pad(draft_BK, (0, 1)).where(index_Q < accepted_B[:, None], -1)
    return output_BQ.scatter_(1, accepted_B[:, None], token_B[:, None])

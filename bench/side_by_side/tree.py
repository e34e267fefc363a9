"""Cases of `verify_tree` and `tree_attention`: against plain torch; vLLM verifies no trees.

Shapes: B requests, N draft nodes, M = N + 1 rows, V target vocabulary, H heads, G kv heads, P head dim, L cache slots.
"""

from collections.abc import Iterator

import torch
from drafthead.kernels.tree_attention.op import tree_attention
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_tree import reference
from drafthead.kernels.verify_tree.op import verify_tree_greedy, verify_tree_sampling
from drafthead.kernels.verify_tree.structure import tree_visibility
from side_by_side.measure import Case, Contender, Run, our_name, plain
from side_by_side.verify import TEMPERATURE, draw_logits, equally_long, sampling_of
from torch import Tensor

Shape = tuple[int, int, int]
TINY = ((16, 7, 1000),)
SHAPES = ((8, 63, 151936), (1, 63, 32000), (64, 15, 49152))
CPU_SHAPES = ((1, 63, 32000), (8, 15, 49152))
"""B, N, V; the reference of sampling is float64 throughout."""

TINY_HEADS, TINY_CACHES = (3, 1, 64), ((2, 7, 40),)
HEADS, CACHES = (32, 8, 128), ((1, 63, 4096), (8, 63, 4096), (32, 15, 8192))
CPU_HEADS, CPU_CACHES = (9, 3, 64), ((1, 63, 1024), (8, 15, 1024))
"""H, G, P of Llama 3.1 8B on CUDA, of SmolLM2-135M on a CPU; B, N, L of each case."""


def binary_tree(batch: int, nodes: int, device: str) -> Tensor:
    """Parents of trees in which every node has two children, level by level."""
    parent_N = torch.arange(nodes, device=device) // 2 - 1
    return parent_N.expand(batch, nodes).contiguous()


# ---- verification ----------------------------------------------------------------------------------------


def verify_cases(device: str, quick: bool) -> Iterator[Case]:
    """Greedy and sampled, each at every shape; children are the two most likely tokens of their parent."""
    shapes = CPU_SHAPES if device == "cpu" else SHAPES
    for shape in TINY if quick else shapes:
        yield _greedy_case(shape, device)
        yield _sampled_case(shape, device)


def draw_tree(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, tokens and parents."""
    batch, nodes, vocab = shape
    logits_BMV = draw_logits((batch, nodes + 1, vocab), torch.Generator(device).manual_seed(0))
    parent_BN = binary_tree(batch, nodes, device)
    best_BM2 = logits_BMV.topk(2).indices
    is_second_N1 = (torch.arange(nodes, device=device) % 2)[:, None]
    best_BN2 = best_BM2.gather(1, (parent_BN + 1)[..., None].expand(batch, nodes, 2))
    draft_BN = best_BN2.gather(-1, is_second_N1.expand(batch, nodes, 1))[..., 0]
    return logits_BMV, draft_BN, parent_BN


def _greedy_case(shape: Shape, device: str) -> Case:
    arguments = draw_tree(shape, device)
    return Case(
        what=f"{' x '.join(map(str, shape))} bf16, greedy",
        ours=Contender(name=our_name(device), prepare=plain(lambda: verify_tree_greedy(*arguments)[1])),
        peers=(Contender(name="torch", prepare=plain(lambda: reference.verify_tree_greedy(*arguments)[1])),),
        agrees=torch.equal,
        num_bytes=arguments[0].nbytes,
    )


def _sampled_case(shape: Shape, device: str) -> Case:
    arguments = draw_tree(shape, device)
    sampling = sampling_of(shape[0], TEMPERATURE, False, device)
    return Case(
        what=f"{' x '.join(map(str, shape))} bf16, certain children",
        ours=Contender(name=our_name(device), prepare=plain(lambda: verify_tree_sampling(*arguments, sampling)[1])),
        peers=(Contender(name="torch", prepare=plain(lambda: sample_tree_in_torch(*arguments, sampling))),),
        # a batch of one has no average
        agrees=equally_long if shape[0] > 1 else lambda expected, found: True,
        num_bytes=arguments[0].nbytes,
    )


def sample_tree_in_torch(logits_BMV: Tensor, draft_BN: Tensor, parent_BN: Tensor, sampling: Sampling) -> Tensor:
    """Multi-round sampling in fp32 as one would write it: a rejected child leaves p, the next one is tried."""
    p_BMV = (logits_BMV.float() / sampling.temperature_B[:, None, None]).softmax(-1)
    batch, nodes = draft_BN.shape
    row_B = torch.zeros(batch, dtype=torch.long, device=draft_BN.device)
    left_BV = p_BMV[:, 0]
    accepted_BN = torch.zeros_like(draft_BN, dtype=torch.bool)
    uniform_BN = torch.rand(batch, nodes, device=draft_BN.device)
    for node in range(nodes):
        token_B1 = draft_BN[:, node, None]
        chance_B = left_BV.gather(1, token_B1)[:, 0] / left_BV.sum(-1)
        tried_B = parent_BN[:, node] + 1 == row_B
        taken_B = tried_B & (uniform_BN[:, node] < chance_B)
        accepted_BN[:, node] = taken_B
        without_BV = torch.where(tried_B[:, None], left_BV.scatter(1, token_B1, 0), left_BV)
        left_BV = torch.where(taken_B[:, None], p_BMV[:, node + 1], without_BV)
        row_B = torch.where(taken_B, node + 1, row_B)
    order_BN = (~accepted_BN).long().argsort(stable=True, dim=-1)
    path_BN = draft_BN.gather(1, order_BN)
    index_M, count_B1 = torch.arange(nodes + 1, device=draft_BN.device), accepted_BN.sum(-1, keepdim=True)
    output_BM = torch.nn.functional.pad(path_BN, (0, 1)).where(index_M < count_B1, -1)
    return output_BM.scatter_(1, count_B1, left_BV.multinomial(1))


# ---- attention -------------------------------------------------------------------------------------------


def attention_cases(device: str, quick: bool) -> Iterator[Case]:
    """Full caches, bf16."""
    heads = TINY_HEADS if quick else CPU_HEADS if device == "cpu" else HEADS
    for cache in TINY_CACHES if quick else CPU_CACHES if device == "cpu" else CACHES:
        yield _attention_case(heads, cache, device)


def _attention_case(heads: Shape, sizes: Shape, device: str) -> Case:
    (num_heads, groups, size), (batch, nodes, slots) = heads, sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(length: int, count: int) -> Tensor:
        shape = (batch, length, count, size)
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    query_BMHP = normal(nodes + 1, num_heads)
    cache, tree = ((normal(length, groups), normal(length, groups)) for length in (slots, nodes + 1))
    length_B = torch.full((batch,), slots, device=device)
    visible_BMM = tree_visibility(binary_tree(batch, nodes, device))
    return Case(
        what=f"{batch} requests, {nodes} nodes, {slots} cached, heads {num_heads}/{groups} x {size}, bf16",
        ours=Contender(
            name=our_name(device),
            prepare=plain(lambda: tree_attention(query_BMHP, cache, length_B, tree, visible_BMM)),
        ),
        peers=(
            Contender(name="torch, masked SDPA", prepare=lambda: _masked_sdpa(query_BMHP, cache, tree, visible_BMM)),
        ),
        agrees=lambda expected, found: torch.allclose(expected, found, rtol=0.02, atol=0.02),
        num_bytes=sum(part.nbytes for part in (*cache, *tree)) + 2 * query_BMHP.nbytes,
    )


def _masked_sdpa(
    query_BMHP: Tensor, cache: tuple[Tensor, Tensor], tree: tuple[Tensor, Tensor], visible_BMM: Tensor
) -> Run:
    """Keys, values and mask are joined beforehand, which a real loop would have to do in each round."""
    key_BGXP, value_BGXP = (torch.cat(pair, 1).transpose(1, 2).contiguous() for pair in zip(cache, tree, strict=True))
    seen_B1MX = torch.nn.functional.pad(visible_BMM, (cache[0].shape[1], 0), value=True)[:, None]
    query_BHMP = query_BMHP.transpose(1, 2).contiguous()

    def run() -> Tensor:
        output_BHMP = torch.nn.functional.scaled_dot_product_attention(
            query_BHMP, key_BGXP, value_BGXP, attn_mask=seen_B1MX, enable_gqa=True
        )
        return output_BHMP.transpose(1, 2)

    return run

"""A pass by the roofline model: a published table to every printed digit, and what caches and experts change."""

from dataclasses import replace

import pytest
from drafthead.data.errors import InputError
from drafthead.eval.economics import Rates, geometric_tokens
from drafthead.eval.plan import RooflineCost
from drafthead.eval.roofline import DEVICES, ModelSize, Roofline, find_device

EIGHT_B = ModelSize(dense_parameters=8e9)
ON_H100 = Roofline(model=EIGHT_B, device=DEVICES["h100-sxm"])
WHEN_IT_HURTS = """
    1           4.78           5.73          209         484    2.31x
    8           4.78           5.73         1675        3871    2.31x
   32           4.78           5.73         6700       15483    2.31x
   64           4.78           6.13        13400       28942    2.16x
  128           4.78          11.31        26800       31387    1.17x
  256           4.78          21.66        53600       32771    0.61x
"""
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}


def test_the_table_of_when_it_hurts() -> None:
    k, cost = 4, RooflineCost(draft=0.05, roofline=ON_H100)
    printed = []
    for batch in (1, 8, 32, 64, 128, 256):
        plain = 1e3 * ON_H100.step_s(batch)
        round_ms = plain * cost(batch, k)
        alone, drafted = batch / plain * 1e3, batch * geometric_tokens(0.7, k) / round_ms * 1e3
        printed.append(
            f"{batch:5d}  {plain:13.2f}  {round_ms:13.2f}  {alone:11.0f}  {drafted:10.0f}  {drafted / alone:6.2f}x"
        )
    assert printed == WHEN_IT_HURTS.strip("\n").split("\n")
    assert f"{ON_H100.compute_bound_tokens():.0f}" == "295"


@pytest.mark.parametrize(("alpha", "printed"), [(0.3, "1.19"), (0.1, "0.93")])
def test_low_acceptance_hurts_at_batch_1_already(alpha: float, printed: str) -> None:
    cost = RooflineCost(draft=0.05, roofline=ON_H100)
    assert f"{Rates(conditional=(alpha,)).tokens(4) / cost(1, 4):.2f}" == printed


def test_a_round_without_drafts_is_a_plain_step() -> None:
    assert RooflineCost(draft=0.3, roofline=ON_H100)(100, 0) == 1


def test_sizes_of_a_dense_config() -> None:
    """8.03 B parameters less the input embedding's 0.53 B; 128 KiB of cache a token."""
    size = ModelSize.of_config(LLAMA_8B)
    assert size.dense_parameters == pytest.approx(8.03e9 - 128256 * 4096, rel=1e-3)
    assert size.kv_bytes_per_token == 131072
    assert size.num_experts == 0
    assert size.weight_bytes(1) == size.weight_bytes(1000) == 2 * size.dense_parameters


def test_sizes_of_a_mixture_of_experts() -> None:
    """30.5 B parameters, 3.3 B of them active, both with the input embedding's 0.31 B."""
    size = ModelSize.of_config(QWEN3_30B_A3B)
    embedding = 151936 * 2048
    assert size.dense_parameters + embedding + 128 * size.expert_parameters == pytest.approx(30.5e9, rel=0.01)
    assert size.flops_per_token(0) / 2 + embedding == pytest.approx(3.35e9, rel=0.01)
    assert size.weight_bytes(1) == pytest.approx(size.flops_per_token(0)), "one token reads its own experts alone"


def test_draft_tokens_make_a_mixture_read_more_experts() -> None:
    size = ModelSize.of_config(QWEN3_30B_A3B)
    assert size.experts_touched(1) == pytest.approx(8)
    assert size.experts_touched(2) == pytest.approx(8 + 120 * 8 / 128)
    assert size.experts_touched(10_000) == pytest.approx(128)
    mixed = RooflineCost(draft=0, roofline=Roofline(model=size, device=DEVICES["h100-sxm"]))
    dense = RooflineCost(draft=0, roofline=ON_H100)
    assert dense(1, 4) == 1
    assert mixed(1, 4) > 2.5, "a dense target verifies four draft tokens for nothing, this one does not"


def test_long_contexts_share_one_reading_of_the_cache_among_a_requests_rows() -> None:
    size = replace(EIGHT_B, kv_bytes_per_token=131072)
    long = Roofline(model=size, device=DEVICES["h100-sxm"], context=8192)
    assert long.step_s(32) == pytest.approx((16e9 + 32 * 8192 * 131072) / 3.35e12)
    assert long.step_s(32, rows=5) == long.step_s(32)
    assert RooflineCost(draft=0, roofline=long)(64, 4) < RooflineCost(draft=0, roofline=ON_H100)(64, 4)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(InputError, match=r"device: 'tpu' is not in the table; one of a100-80gb, "):
        find_device("tpu")
    with pytest.raises(InputError, match="latent attention"):
        ModelSize.of_config({**LLAMA_8B, "kv_lora_rank": 512})
    with pytest.raises(InputError, match="lacks 'hidden_size'"):
        ModelSize.of_config({"vocab_size": 10})

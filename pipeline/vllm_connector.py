"""The KV connector that hands out hidden states which vLLM's `extract_hidden_states` keeps in its paged cache.

vLLM imports it by module path (`kv_connector_module_path`), in the engine's own process; `capture_vllm.py` starts that
and reads what is written here: `{folder}/{key}.safetensors` with `states` [T, L, D] (L layer ids, ascending) and
`token_ids` [T], whole or absent.

Notable: states are taken from the cache when a request has finished, by its own blocks, so neither chunked prefill nor
preemption nor the other requests of a batch matter; slots that were read become zero, so that one which nobody wrote
again is a zero state, which capture refuses. vLLM's own example connector needs CUDA streams; this one copies at once.

Facts: vllm 0.32, distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from drafthead.data.files import write_atomically
from safetensors.torch import save_file
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec


@dataclass(frozen=True)
class Finished:
    """A request whose states lie in the cache."""

    key: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class FinishedRequests(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers, with each step."""

    by_id: dict[str, Finished] = field(default_factory=dict)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Write the states of each finished request; nothing is ever loaded.

    A request says `kv_transfer_params={"key": ..., "output": bool}`: the file's name, and whether the states of output
    tokens are wanted too. The newest output token never was an input, so it has none.

    Raises:
        ValueError: Prefix caching is on; cached tokens would not be computed, and have no states.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("StatesConnector: prefix caching shortens samples; set enable_prefix_caching=False")
        self.folder = Path(self._kv_transfer_config.get_from_extra_config("folder", None))
        groups = kv_cache_config.kv_cache_groups
        self.group = find_group([group.kv_cache_spec for group in groups])
        self.block_size = groups[self.group].kv_cache_spec.block_size
        self.finished: dict[str, Finished] = {}
        self.is_writer = True
        self.cache_NLBD: Tensor | None = None

    # ---- in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> FinishedRequests:
        finished, self.finished = self.finished, {}
        return FinishedRequests(finished)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks until a worker has read them (True), and tell the client where the states will lie."""
        wanted = request.kv_transfer_params or {}
        if "key" not in wanted or not block_ids:
            return False, None
        computed = list(request.all_token_ids)[:-1] if wanted.get("output") else list(request.prompt_token_ids)
        self.finished[request.request_id] = Finished(wanted["key"], computed, list(block_ids))
        return True, {"states_path": str(self.path_of(wanted["key"]))}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self.group] if self.group < len(block_ids) else [])

    # ---- in the workers

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        (name,) = layers
        self.cache_NLBD = kv_caches[name]
        if self.cache_NLBD.shape[2] != self.block_size:
            raise ValueError(
                f"StatesConnector: blocks of {self.block_size} tokens, but the cache has {self.cache_NLBD.shape[2]}"
            )
        self.is_writer = get_tensor_model_parallel_rank() == 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished_count(self) -> int:
        """One worker writes, so one reports."""
        return 1

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Write the states of what has finished since the last step; their blocks are free afterwards."""
        metadata = self._get_connector_metadata()
        if not self.is_writer or not metadata.by_id:
            return None, None
        for request in metadata.by_id.values():
            self.write(request)
        return set(metadata.by_id), None

    def write(self, request: Finished) -> None:
        assert self.cache_NLBD is not None
        states_TLD = take_states(self.cache_NLBD, request.block_ids, len(request.token_ids))
        tensors = {"states": states_TLD, "token_ids": torch.tensor(request.token_ids)}
        write_atomically(self.path_of(request.key), lambda temporary: save_file(tensors, temporary))

    def path_of(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return None


def find_group(specs: list[Any]) -> int:
    """Which group of the paged cache holds the states: one of its own, or the only one there is.

    Raises:
        ValueError: They share a group with some layers of several (targets with latent attention).
    """
    holding = [number for number, spec in enumerate(specs) if isinstance(spec, HiddenStateCacheSpec)]
    if len(holding) == 1:
        return holding[0]
    if len(specs) == 1:
        return 0
    raise ValueError(f"StatesConnector: cannot tell which of {len(specs)} cache groups holds the states of this target")


def take_states(cache_NLBD: Tensor, block_ids: list[int], length: int) -> Tensor:
    """States [T, L, D] of the first `length` slots of a request's blocks, on the CPU; the slots become zero.

    `cache_NLBD`: blocks, captured layers, slots of a block, hidden (extract_hidden_states.py:basic_cache).
    """
    blocks = torch.tensor(block_ids, device=cache_NLBD.device)
    found_NBLD = cache_NLBD[blocks].transpose(1, 2)
    states_TLD = found_NBLD.flatten(0, 1)[:length].cpu().contiguous()
    cache_NLBD[blocks] = 0
    return states_TLD

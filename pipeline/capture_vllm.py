"""Capture through vLLM: states of whole rows, by the engine that also serves, for targets that need its parallelism.

Notable: a row is one request with one new token, so that its states are those of a prompt, whatever else runs beside
it; the token that vLLM chose is held against norm + lm_head of the last state, for every row. `vllm_connector.py` hands
the states out, by files in a scratch folder, where those of a few batches lie at a time.
"""

import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from drafthead.data.encoding import Row
from drafthead.data.errors import GateError, InputError
from drafthead.eval.engine import Engine, EngineConfig, Request, Result, is_available
from drafthead.pipeline.state_logits import LOGIT_TOLERANCE, StateLogits
from drafthead.pipeline.target import Target
from safetensors.torch import load_file
from torch import Tensor

States = list[tuple[Tensor, Tensor]]

BATCHES_IN_FLIGHT = 3
"""One that runs, one that waits for it, one that is being stored."""


def extraction_settings(layers: list[int], scratch: Path) -> dict[str, Any]:
    """The two settings of vLLM by which it keeps the states of `layers`, ascending, and our connector writes them."""
    ids = {"eagle_aux_hidden_state_layer_ids": layers}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": ids},
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "drafthead.pipeline.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"folder": str(scratch)},
        },
    }


class VllmStates:
    """A vLLM that computes states; a context manager.

    Raises:
        InputError: vLLM is not installed, or does not start with this target; the message names the way round it.
    """

    def __init__(
        self,
        target: Target,
        layers: list[int],
        *,
        compute: torch.dtype,
        stored: torch.dtype,
        longest: int,
        kv_cache_gib: int,
        log_path: Path,
    ):
        """`layers`: ids of the aux states. `longest`: tokens of the longest row to come."""
        if not is_available():
            raise InputError("vllm is not installed: run `make setup`, or set capture.backend=transformers")
        limit = int(target.config.max_position_embeddings)
        if longest >= limit:
            raise InputError(
                f"capture.backend=vllm: a row of {longest:,} tokens leaves no room for vLLM's own one within the "
                f"{limit:,} positions of {target.path}; set encode.max_length={limit - 1}, or "
                f"capture.backend=transformers"
            )
        self.stored = stored
        ids = sorted({*layers, target.num_layers})
        self.places = [ids.index(layer) for layer in layers]
        self.scratch = Path(tempfile.mkdtemp(prefix="drafthead-states-"))
        config = EngineConfig(
            model=str(target.path),
            dtype=str(compute).removeprefix("torch."),  # type: ignore[arg-type]
            max_model_len=longest + 1,
            kv_cache_gib=kv_cache_gib,
            **extraction_settings(ids, self.scratch),
        )
        self.engine = Engine(config, log_path)
        self.gate = TokenGate(target, LOGIT_TOLERANCE[config.dtype])
        self.asked = 0

    def __enter__(self) -> "VllmStates":
        try:
            self.engine.__enter__()
        except InputError as error:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise InputError(f"{error}; capture.backend=transformers needs no vLLM") from None
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.__exit__(*error)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def begin(self, rows: list[Row]) -> None:
        """Nothing to do: every row is run whole."""

    def check(self, row: Row, last_TD: Tensor) -> None:
        """Nothing to do: the token that vLLM chose was held against the state of every row as it came."""

    def record_all(self, batches: list[list[Row]]) -> Iterator[tuple[list[Row], States]]:
        """States of the batches, in their order: of each row aux [T, A, D] and last [T, D], on the CPU.

        Raises:
            GateError: What came back is not the states of that row.
        """
        to_come = iter(batches)
        waiting = deque[dict[str, Row]]()
        arrived: dict[str, tuple[Tensor, Tensor]] = {}
        for _ in range(BATCHES_IN_FLIGHT):
            self._submit(next(to_come, []), waiting)
        for result in self.engine.results():
            row = next(batch[result.key] for batch in waiting if result.key in batch)
            arrived[result.key] = self._read(row, result)
            while waiting and arrived.keys() >= waiting[0].keys():
                batch = waiting.popleft()
                self._submit(next(to_come, []), waiting)
                yield list(batch.values()), [arrived.pop(key) for key in batch]

    def _submit(self, batch: list[Row], waiting: deque[dict[str, Row]]) -> None:
        if not batch:
            return
        keys = [str(self.asked + number) for number in range(len(batch))]
        self.asked += len(batch)
        waiting.append(dict(zip(keys, batch, strict=True)))
        for key, row in waiting[-1].items():
            self.engine.submit(
                Request(key=key, prompt_ids=row.input_ids, max_new_tokens=1, kv_transfer_params={"key": key})
            )

    def _read(self, row: Row, result: Result) -> tuple[Tensor, Tensor]:
        states_TLD = read_states(row, Path(str(result.states_path)))
        newest_D = states_TLD[-1, -1]
        if bool(torch.isfinite(newest_D).all()):  # otherwise capture counts the row among the unusable ones
            self.gate.check(row, newest_D, result.token_ids[0])
        stored_TLD = states_TLD.to(self.stored)
        return stored_TLD[:, self.places], stored_TLD[:, -1].clone()


def read_states(row: Row, path: Path) -> Tensor:
    """States [T, L, D] of a row, from the file that the connector wrote, which goes.

    Raises:
        GateError: They belong to other tokens, or to fewer.
    """
    found = load_file(path)
    path.unlink()
    if found["token_ids"].tolist() != row.input_ids:
        raise GateError("FeatureGate", f"row {row.key}", f"vLLM gave the states of other tokens ({path.name})")
    if len(found["states"]) != len(row.input_ids):
        raise GateError(
            "FeatureGate", f"row {row.key}", f"vLLM gave {len(found['states'])} states for {len(row.input_ids)} tokens"
        )
    return found["states"]


class TokenGate:
    """The token that vLLM chose after a row is the one that norm + lm_head of the row's last state put first."""

    def __init__(self, target: Target, tolerance: float):
        """`tolerance`: how far behind the largest logit it may lie, as a share of the largest |logit|."""
        self.logits = StateLogits(target)
        self.tolerance = tolerance

    def check(self, row: Row, last_D: Tensor, token: int) -> None:
        """Look at the state of a row's newest position.

        Raises:
            GateError: Another token scores higher by more than rounding explains.
        """
        logits_V = self.logits(last_D)
        behind = (logits_V.max() - logits_V[token]) / logits_V.abs().max()
        if not behind <= self.tolerance:
            raise GateError(
                "FeatureGate",
                f"row {row.key}",
                f"vLLM chose token {token}, which norm + lm_head of the captured last state put {behind:.3g} of the "
                f"largest logit behind another (allowed: {self.tolerance}); the state is not the one before the final "
                f"norm, or not this row's",
            )

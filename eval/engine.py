"""A real vLLM engine in a process of its own, fed and read line by line.

vLLM keeps its memory and threads until its process ends, so each engine gets one. Requests may be added
while others run (the second turn of a conversation starts as soon as its first is answered), and every
finished request is reported at once, so that callers can write it down and survive a kill.

    python -m drafthead.eval.engine CONFIG.json      # the child; started by `Engine`, never by hand
"""

import contextlib
import glob
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from drafthead.data.errors import InputError

PREFIX = "vllm:spec_decode_num_"
STEPS_KEPT = 65_536
"""Steps that the child remembers until it is asked for them."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine is started; the names are vLLM's."""

    model: str
    """Folder of the target, as `vllm serve` would get it."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    """Tokens of one step; longer prompts are run in pieces. 4,096, or a whole prompt, unless given."""
    kv_cache_gib: int = 2
    """Key-value cache on a CPU; on CUDA vLLM measures its own."""
    seed: int = 0
    """Of the engine as a whole: the CPU build fails on per-request seeds."""
    speculative_config: dict[str, Any] | None = None
    lockstep: bool = False
    """After each result the engine waits until the caller has seen it and asked for what follows. The batches of its
    steps, which decide the last bits of the logits, are then the same each time that the same is asked for."""
    kv_transfer_config: dict[str, Any] | None = None
    """A connector that hands out what the engine computes (`pipeline/vllm_connector.py`)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as token ids; `temperature` 0 is greedy."""

    key: str
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    kv_transfer_params: dict[str, Any] | None = None
    """What the connector is to do with this request."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the engine wrote: its own token ids, end-of-turn included when it was produced."""

    key: str
    token_ids: list[int]
    finish_reason: str
    """vLLM's: `stop` or `length`."""
    seconds: float
    states_path: str | None = None
    """File that the connector has written for this request."""
    accepted: list[int] = field(default_factory=list)
    """Draft tokens kept, round by round, as the counters count them: passes without a draft are no rounds."""
    drafted: list[int] = field(default_factory=list)
    """Draft tokens proposed in each of these rounds."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the engine that gave tokens."""

    seconds: float
    """Steps without tokens since the one before included."""
    num_requests: int
    num_first: int
    """Requests whose first tokens these were: their prompts ran in this step."""
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class DraftCounters:
    """vLLM's `spec_decode` counters since the engine started (v1/spec_decode/metrics.py)."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def since(self, earlier: "DraftCounters") -> "DraftCounters":
        before = earlier.num_accepted_tokens_per_pos or [0] * len(self.num_accepted_tokens_per_pos)
        return DraftCounters(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
            num_accepted_tokens_per_pos=[
                now - then for now, then in zip(self.num_accepted_tokens_per_pos, before, strict=True)
            ],
        )


def is_available() -> bool:
    return importlib.util.find_spec("vllm") is not None


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """The child's environment: all cores and Intel's OpenMP on a CPU (measured: docs/performance.md)."""
    environment = dict(os.environ)
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_cache_gib)
    environment["VLLM_NO_USAGE_STATS"] = "1"
    environment.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    openmp = sorted(glob.glob(os.path.join(sys.prefix, "lib", "libiomp5.so")))
    if openmp and "libiomp5" not in environment.get("LD_PRELOAD", ""):
        environment["LD_PRELOAD"] = ":".join(filter(None, [openmp[0], environment.get("LD_PRELOAD")]))
    return environment


class Engine:
    """Start vLLM, `submit` requests, iterate `results`; a context manager.

    Raises:
        InputError: vLLM is not installed, or its process ended; the message names the log that says why.
    """

    def __init__(self, config: EngineConfig, log_path: Path):
        self.config = config
        self.log_path = log_path
        self.outstanding = 0
        self.waits = config.lockstep
        """Whether the child waits to be told to go on."""

    def __enter__(self) -> "Engine":
        if not is_available():
            raise InputError("vllm is not installed: run `make setup`, or set respond.engine=transformers")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump(asdict(self.config), file)
        self.config_path = Path(file.name)
        self.log = open(self.log_path, "a", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drafthead.eval.engine", file.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=engine_environment(self.config),
        )
        self._read()  # the child's `ready`
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            _pipe(self.process.stdin).close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.config_path.unlink(missing_ok=True)

    def submit(self, request: Request) -> None:
        self._write({"add": asdict(request)})
        self.outstanding += 1

    def results(self) -> Iterator[Result]:
        """Yield finished requests until none is outstanding; more may be submitted meanwhile."""
        while self.outstanding:
            if self.waits:
                self._write({"go": True})
            message = self._read()
            self.waits = self.config.lockstep and message["is_last"]
            self.outstanding -= 1
            yield Result(**message["result"])

    def generate(self, requests: Iterable[Request]) -> Iterator[Result]:
        """All requests at once, in the order in which they finish."""
        for request in requests:
            self.submit(request)
        return self.results()

    def generate_one_by_one(self, requests: Iterable[Request]) -> Iterator[Result]:
        """One request at a time: batch 1, for timing."""
        for request in requests:
            self.submit(request)
            yield from self.results()

    def counters(self) -> DraftCounters:
        self._write({"counters": True})
        return DraftCounters(**self._read()["counters"])

    def steps(self) -> list[Step]:
        """Steps since the engine was last asked for them; while no request is outstanding."""
        self._write({"steps": True})
        return [Step(**one) for one in self._read()["steps"]]

    def _write(self, message: dict[str, Any]) -> None:
        try:
            pipe = _pipe(self.process.stdin)
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _read(self) -> dict[str, Any]:
        line = _pipe(self.process.stdout).readline()
        if not line:
            raise self._failure()
        message: dict[str, Any] = json.loads(line)
        return message

    def _failure(self) -> InputError:
        self.process.wait()
        self.log.flush()
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line.strip() for line in lines if "Error" in line] or lines[-1:] or ["no output"]
        return InputError(
            f"vLLM stopped with exit code {self.process.returncode} while serving {self.config.model}: "
            f"{errors[-1][:300]} (whole log: {self.log_path})"
        )


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


# ---- the child -------------------------------------------------------------------------------------------


def _read_stdin(inbox: "queue.Queue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        inbox.put(json.loads(line))
    os._exit(0)  # the parent closed the pipe or died: nobody waits for results


def _counters(engine: Any) -> DraftCounters:
    values = {metric.name: metric for metric in engine.get_metrics() if metric.name.startswith(PREFIX)}
    if PREFIX + "drafts" not in values:
        return DraftCounters()
    return DraftCounters(
        num_drafts=values[PREFIX + "drafts"].value,
        num_draft_tokens=values[PREFIX + "draft_tokens"].value,
        num_accepted_tokens=values[PREFIX + "accepted_tokens"].value,
        num_accepted_tokens_per_pos=list(values[PREFIX + "accepted_tokens_per_pos"].values),
    )


class StepLog:
    """Times the engine's steps and counts the tokens that each gives."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=STEPS_KEPT)
        self.seconds = 0.0
        self.known: dict[str, int] = {}
        """Tokens so far of each request that is going on."""

    def run(self, step: Callable[[], list[Any]]) -> list[Any]:
        """Run one step of vLLM's engine; its outputs hold each request's tokens from the first on."""
        start = time.perf_counter()
        outputs = step()
        self.seconds += time.perf_counter() - start
        if outputs:
            before = [self.known.pop(one.request_id, 0) for one in outputs]
            now = [len(one.outputs[0].token_ids) for one in outputs]
            self.known |= {one.request_id: count for one, count in zip(outputs, now, strict=True) if not one.finished}
            self.steps.append(
                Step(
                    seconds=self.seconds,
                    num_requests=len(outputs),
                    num_first=before.count(0),
                    num_tokens=sum(now) - sum(before),
                )
            )
            self.seconds = 0.0
        return outputs


def serve_requests(config: EngineConfig, emit: IO[str]) -> None:
    """Load the engine, then answer the parent until its pipe closes."""
    from vllm import LLM, RequestOutput, SamplingParams

    llm = LLM(
        model=config.model,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(config.max_model_len, 4096),
        seed=config.seed,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=config.speculative_config,
        per_request_spec_decode_metrics="detailed" if config.speculative_config else "none",
        kv_transfer_config=config.kv_transfer_config,
    )
    engine = llm.llm_engine
    started: dict[str, float] = {}
    log = StepLog()

    def send(message: dict[str, Any]) -> None:
        emit.write(json.dumps(message) + "\n")
        emit.flush()

    def handle(message: dict[str, Any]) -> None:
        if "counters" in message:
            send({"counters": asdict(_counters(engine))})
            return
        if "steps" in message:
            send({"steps": [asdict(one) for one in log.steps]})
            log.steps.clear()
            return
        request = Request(**message["add"])
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_new_tokens,
            detokenize=False,
            extra_args=request.kv_transfer_params and {"kv_transfer_params": request.kv_transfer_params},
        )
        started[request.key] = time.perf_counter()
        engine.add_request(request.key, {"prompt_token_ids": request.prompt_ids}, params)

    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_stdin, args=(inbox,), daemon=True).start()
    send({"ready": True})
    unwritten: list[Result] = []
    waits = config.lockstep
    while True:
        while waits:
            message = inbox.get()
            waits = "go" not in message
            if waits:
                handle(message)
        if not engine.has_unfinished_requests() and not unwritten:
            handle(inbox.get())
        while not inbox.empty():
            handle(inbox.get())
        finished = unwritten
        for output in log.run(engine.step):
            if output.finished:
                assert isinstance(output, RequestOutput)
                completion = output.outputs[0]
                drafts = completion.spec_decode_metrics
                result = Result(
                    key=output.request_id,
                    token_ids=list(completion.token_ids),
                    finish_reason=completion.finish_reason or "length",
                    seconds=time.perf_counter() - started.pop(output.request_id),
                    states_path=(output.kv_transfer_params or {}).get("states_path"),
                    accepted=drafts.per_step_accepted if drafts else [],
                    drafted=drafts.per_step_drafted if drafts else [],
                )
                finished.append(result)
        # a connector writes in the step after the one in which a request ends
        unwritten = [one for one in finished if one.states_path and not os.path.exists(one.states_path)]
        told = [one for one in finished if one not in unwritten]
        for number, result in enumerate(told, start=1):
            send({"result": asdict(result), "is_last": number == len(told)})
        waits = config.lockstep and bool(told)


def main() -> None:
    config = EngineConfig(**json.loads(Path(sys.argv[1]).read_text()))
    emit = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to the log, not between the results
    serve_requests(config, emit)


if __name__ == "__main__":
    main()

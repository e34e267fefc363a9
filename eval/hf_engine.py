"""The fallback engine: transformers' own generate, with the interface of `eval.engine.Engine`."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from drafthead.eval.engine import Request, Result


class TransformersEngine:
    """Collects requests and answers them in batches of equal sampling settings and similar length."""

    def __init__(self, load: Callable[[], Any], end_of_turn_ids: list[int], batch_size: int, seed: int):
        self.load = load
        self.end_ids = end_of_turn_ids
        self.batch_size = batch_size
        self.seed = seed
        self.waiting: list[Request] = []

    def __enter__(self) -> "TransformersEngine":
        self.model = self.load()
        torch.manual_seed(self.seed)
        return self

    def __exit__(self, *_: object) -> None:
        del self.model

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def generate(self, requests: Iterable[Request]) -> Iterator[Result]:
        for request in requests:
            self.submit(request)
        return self.results()

    def results(self) -> Iterator[Result]:
        """Yield finished requests until none waits; more may be submitted meanwhile."""
        while self.waiting:
            self.waiting.sort(key=lambda one: (_sampling(one), one.max_new_tokens, len(one.prompt_ids)))
            alike = [one for one in self.waiting if _sampling(one) == _sampling(self.waiting[0])]
            batch = alike[: self.batch_size]
            self.waiting = self.waiting[len(batch) :]
            yield from self._answer(batch)

    def _answer(self, batch: list[Request]) -> list[Result]:
        start = time.perf_counter()
        width = max(len(request.prompt_ids) for request in batch)
        pad = self.end_ids[0]
        ids = torch.tensor([[pad] * (width - len(request.prompt_ids)) + request.prompt_ids for request in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in batch])
        sampling = {}
        if batch[0].temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": batch[0].temperature,
                "top_p": batch[0].top_p,
                "top_k": 0,
            }
        with torch.inference_mode():
            output = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=max(request.max_new_tokens for request in batch),
                eos_token_id=self.end_ids,
                pad_token_id=pad,
                **(sampling or {"do_sample": False}),
            )
        seconds = time.perf_counter() - start
        return [
            self._result(request, row[width:].tolist(), seconds) for request, row in zip(batch, output, strict=True)
        ]

    def _result(self, request: Request, tokens: list[int], seconds: float) -> Result:
        tokens = tokens[: request.max_new_tokens]
        ends = [place for place, token in enumerate(tokens) if token in self.end_ids]
        finish = "stop" if ends else "length"
        kept = tokens[: ends[0] + 1] if ends else tokens
        return Result(key=request.key, token_ids=kept, finish_reason=finish, seconds=seconds)


def _sampling(request: Request) -> tuple[float, float]:
    """What all requests of a batch must share."""
    return request.temperature, request.top_p

"""The speculative loop over prompts: a run's target with its trained head, or with a drafter that needs none.

The head is one drafter among others; what is measured with the loop is said in `evaluate.py`, `serve_check.py`,
`compare.py` and `cost.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.eval.decode import Answer, DecodeOptions, OnProgress, decode
from drafthead.eval.protocols import Drafter, TreeDrafter
from drafthead.eval.recomputed_target import loop_target
from drafthead.eval.tree_accuracy import Text, measure_accuracy
from drafthead.eval.tree_decode import decode_tree
from drafthead.eval.tree_dynamic import DynamicTree
from drafthead.eval.tree_search import TreeShape, search_tree
from drafthead.eval.typical import NEEDS_SAMPLING, Typical
from drafthead.pipeline.drafters import KINDS, DrafterSpec, Surroundings, prepare_drafter
from drafthead.pipeline.heads.trained import LoadedHead
from drafthead.pipeline.progress import progress
from drafthead.pipeline.recipe import TreeConfig, TypicalConfig
from drafthead.pipeline.run_dir import Run
from torch import Tensor

MAX_K = 16
BATCH_TOKENS = 32_768
"""Prompt tokens of one batch, padding included: bounds the caches."""
TREE_ROWS = 512
"""Rows of one target pass over trees: bounds the logits."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What a user may change for one evaluation."""

    k: int
    temperature: float
    max_new_tokens: int
    limit: int | None
    tree: TreeConfig | None = None
    typical: TypicalConfig | None = None
    temperatures: tuple[float, ...] = ()
    """The chain is measured at these as well."""
    drafter: DrafterSpec | None = None
    """Drafts instead of the run's trained head."""

    def __post_init__(self) -> None:
        if self.typical is not None and self.temperature == 0:
            raise InputError(NEEDS_SAMPLING)
        if self.drafter is not None and self.tree is not None:
            raise InputError(f"--tree: {self.drafter.kind} drafts chains alone; leave out --tree or --drafter")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as a server would see it."""

    domain: str
    ids: list[int]


class SpeculativeLoop:
    """A target and a drafter, over prompts batched by length."""

    def __init__(self, run: Run, model: Any = None, spec: DrafterSpec | None = None):
        """The run's target, with its trained head or with another drafter.

        Args:
            run: The run.
            model: The target in `eval.dtype`, where it is loaded already.
            spec: Drafts instead of the head, which the run then need not have.
        """
        settings = run.recipe.eval
        self.batch_size = settings.batch_size
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, settings.dtype)
        self._trained = LoadedHead.load(run, self.device, dtype) if spec is None else None
        target = run.served_target
        model = target.load(dtype, self.device) if model is None else model
        self.target = loop_target(model, [] if self._trained is None else self._trained.aux_layers)
        self.end_ids = target.end_of_turn_ids
        self.seed = run.recipe.run.seed
        self.is_ordered = spec is not None and KINDS[spec.kind].remembers
        if spec is not None:
            around = Surroundings(
                target=target,
                in_loop=self.target,
                device=self.device,
                dtype=dtype,
                max_model_len=run.recipe.serve_check.max_model_len,
            )
            self._new_drafter = prepare_drafter(spec, around)

    @property
    def trained(self) -> LoadedHead:
        """The trained head.

        Raises:
            InputError: Another drafter was asked for.
        """
        if self._trained is None:
            raise InputError("this drafter has no trained head, which trees are drafted by; leave out --drafter")
        return self._trained

    @property
    def drafter(self) -> Drafter:
        """A drafter that has seen nothing yet."""
        return self._new_drafter() if self._trained is None else self._trained.drafter()

    @property
    def tree_drafter(self) -> TreeDrafter:
        return self.trained.drafter()

    def generate(
        self, prompts: list[Prompt], options: EvalOptions, *, k: int, typical: Typical | None = None
    ) -> list[Answer]:
        """Answers in the order of the prompts; plain decoding for k = 0."""
        settings = self._settings(options, typical)
        drafter = self.drafter if k else None
        ordered = self.is_ordered and k > 0

        def one_batch(ids: list[list[int]], numbers: list[int], on_progress: OnProgress) -> list[Answer]:
            return decode(self.target, drafter, ids, k, settings.of(numbers), on_progress=on_progress)

        what = f"eval k={k}" if k else "eval plain"
        return self._in_batches(prompts, what, self.batch_size, one_batch, ordered=ordered)

    def generate_tree(
        self,
        prompts: list[Prompt],
        options: EvalOptions,
        shape: TreeShape | DynamicTree,
        typical: Typical | None = None,
    ) -> list[Answer]:
        """Answers in the order of the prompts, by a tree of drafts a round."""
        settings = self._settings(options, typical)
        drafter = self.tree_drafter
        size = min(self.batch_size, TREE_ROWS // (shape.num_nodes + 1))
        kind = "dynamic" if isinstance(shape, DynamicTree) else "static"

        def one_batch(ids: list[list[int]], numbers: list[int], on_progress: OnProgress) -> list[Answer]:
            return decode_tree(self.target, drafter, ids, shape, settings.of(numbers), on_progress=on_progress)

        return self._in_batches(prompts, f"eval {kind} tree of {shape.num_nodes}", size, one_batch)

    def search_tree(self, texts: list[Text], config: TreeConfig) -> tuple[TreeShape, Tensor]:
        """The best tree by the accuracies [K, R] on these texts, and the accuracies."""
        drafter = self.tree_drafter
        depth = min(config.depth, drafter.max_depth)
        with progress(len(texts), "eval ranks", "text") as bar:
            batches = ([texts[one] for one in some] for some in _batches([x.ids for x in texts], self.batch_size))
            accuracy_KR = measure_accuracy(self.target, drafter, batches, depth, on_progress=bar.update)
        return search_tree(accuracy_KR, config.nodes, depth), accuracy_KR

    def _settings(self, options: EvalOptions, typical: Typical | None) -> DecodeOptions:
        return DecodeOptions(
            max_new_tokens=options.max_new_tokens,
            end_ids=self.end_ids,
            temperature=options.temperature,
            seed=self.seed,
            typical=typical,
        )

    def _in_batches(
        self,
        prompts: list[Prompt],
        what: str,
        size: int,
        one_batch: Callable[[list[list[int]], list[int], OnProgress], list[Answer]],
        ordered: bool = False,
    ) -> list[Answer]:
        """`ordered`: one prompt after the other, as they come."""
        answers: dict[int, Answer] = {}
        one_by_one = ([number] for number in range(len(prompts)))
        with progress(len(prompts), what, "prompt") as bar:
            for numbers in one_by_one if ordered else _batches([prompt.ids for prompt in prompts], size):
                found = one_batch([prompts[number].ids for number in numbers], numbers, bar.update)
                answers.update(zip(numbers, found, strict=True))
        return [answers[number] for number in range(len(prompts))]


def _batches(rows: list[list[int]], size: int) -> Iterator[list[int]]:
    """Numbers of rows that are run together, the longest first."""
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    while order:
        taken = max(1, min(size, BATCH_TOKENS // len(rows[order[0]])))
        yield order[:taken]
        order = order[taken:]

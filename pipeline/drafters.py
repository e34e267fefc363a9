"""Drafters without a trained head: what `--drafter SPEC` may say, how each is built, and what vLLM calls it.

    drafthead eval runs/eagle3 --drafter ngram:prompt_lookup_min=2,prompt_lookup_max=4

A spec is a kind and, behind a colon, its options as name=value; the option that a kind cannot do without (a model's
folder) may stand there by itself. A new kind is an entry of `KINDS`.
"""

import difflib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.data.vocab_match import Vocabulary, find_mismatches
from drafthead.eval.drafters.draft_model import DraftModel, DraftModelOptions
from drafthead.eval.drafters.ngram import NgramDrafter, NgramOptions
from drafthead.eval.drafters.shared_vocab import SharedVocabulary
from drafthead.eval.drafters.skip_layers import SkipLayers, SkipLayersOptions
from drafthead.eval.drafters.suffix import SuffixDrafter, SuffixOptions
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.protocols import Drafter, TargetModel
from drafthead.pipeline.target import Target
from drafthead.pipeline.vocab_check import find_folder, read_vocabulary
from pydantic import TypeAdapter, ValidationError

NewDrafter = Callable[[], Drafter]
"""Makes a drafter that has seen nothing yet: one for each measurement, for some remember answers across batches."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a drafter may be built from."""

    target: Target
    """The served target's folder."""
    in_loop: TargetModel
    """The same target, as the loop runs it."""
    device: str
    dtype: torch.dtype
    max_model_len: int
    """Of the server whose drafts are predicted."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of drafter."""

    options: type[Any]
    """A frozen dataclass of plain values, which checks them."""
    prepare: Callable[[Any, Surroundings], NewDrafter]
    """Loads, once, what all its drafters share."""
    serve: Callable[[Any, int], dict[str, Any] | None]
    """vLLM's speculative config for these options and k; None where vLLM cannot serve it."""
    main: str | None = None
    """The option that may stand behind the colon without its name."""
    remembers: bool = False
    """Drafts depend on earlier answers: measured one prompt after the other, in their order."""
    package: str | None = None
    """Python package that vLLM needs for it and does not bring along."""


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """A drafter as the user named it."""

    kind: str
    options: Any
    """Of the type that `KINDS[kind].options` names."""

    def __str__(self) -> str:
        values = [f"{name}={value}" for name, value in asdict(self.options).items() if value is not None]
        return ":".join([self.kind, *filter(None, [",".join(values)])])


def _from_text(drafter: Callable[[Any, int], Drafter]) -> Callable[[Any, Surroundings], NewDrafter]:
    """Drafters that read tokens alone, up to the server's longest text."""
    return lambda options, around: lambda: drafter(options, around.max_model_len)


def _serve_by(method: str) -> Callable[[Any, int], dict[str, Any]]:
    """Options that have vLLM's names."""
    return lambda options, k: {"method": method, "num_speculative_tokens": k, **asdict(options)}


DRAFT_MODEL = "--drafter draft-model"


def _prepare_draft_model(options: DraftModelOptions, around: Surroundings) -> NewDrafter:
    folder = find_folder(DRAFT_MODEL, options.model)
    ours, theirs = read_vocabulary(around.target.path), read_vocabulary(folder)
    shared = None
    if options.use_heterogeneous_vocab:
        shared = SharedVocabulary.of(ours, theirs, around.device)
        tokens = f"{shared.num_shared} of the target's {ours.size} tokens ({shared.share_of_target:.1%})"
        print(f"draft model {options.model}: it can draft {tokens}, those that both vocabularies have", file=sys.stderr)
    else:
        check_same_tokens(ours, theirs, options.model)
    model = Target(folder).load(around.dtype, around.device)
    drafter = DraftModel(model, shared)
    return lambda: drafter


def check_same_tokens(target: Vocabulary, draft: Vocabulary, name: str) -> None:
    """Refuse a draft model whose ids mean other texts, or whose vocabulary vLLM refuses for its size.

    Raises:
        InputError: Naming what differs, both values, and the option that does without.
    """
    rules = {one["rule"]: one["message"] for one in find_mismatches(target, draft)}
    sizes = f"{target.size} tokens in the target, {draft.size} in the draft model, which vLLM refuses"
    message = rules.get("token_texts") or (sizes if target.size != draft.size else None)
    if message:
        raise InputError(f"{DRAFT_MODEL} {name}: {message}; add ,use_heterogeneous_vocab=true")


def _serve_draft_model(options: DraftModelOptions, k: int) -> dict[str, Any]:
    folder = find_folder(DRAFT_MODEL, options.model)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": k}
    return {**config, "use_heterogeneous_vocab": True} if options.use_heterogeneous_vocab else config


def _prepare_skip_layers(options: SkipLayersOptions, around: Surroundings) -> NewDrafter:
    target = around.in_loop
    if not isinstance(target, HFTarget):
        raise InputError("--drafter skip-layers: it reads the target's cache, and this target has none")
    drafter = SkipLayers(target, options.ids)
    return lambda: drafter


KINDS: dict[str, Kind] = {
    "draft-model": Kind(
        options=DraftModelOptions, prepare=_prepare_draft_model, serve=_serve_draft_model, main="model"
    ),
    "skip-layers": Kind(
        options=SkipLayersOptions, prepare=_prepare_skip_layers, serve=lambda options, k: None, main="layers"
    ),
    "ngram": Kind(options=NgramOptions, prepare=_from_text(NgramDrafter), serve=_serve_by("ngram")),
    "suffix": Kind(
        options=SuffixOptions,
        prepare=_from_text(SuffixDrafter),
        serve=_serve_by("suffix"),
        remembers=True,
        package="arctic-inference",
    ),
}


def parse_drafter(text: str) -> DrafterSpec:
    """Read a spec.

    Raises:
        InputError: Names what is unknown and the nearest valid name, or the value that cannot be.
    """
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise InputError(f"--drafter {text}: unknown kind {name!r}; did you mean {_nearest(name, list(KINDS))}?")
    kind = KINDS[name]
    valid = [field.name for field in fields(kind.options)]
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals and kind.main is not None and kind.main not in given:
            key, value = kind.main, part
        elif not equals:
            raise InputError(f"--drafter {text}: {part!r} has no value; write {_nearest(part, valid)}=...")
        if key not in valid:
            raise InputError(f"--drafter {text}: unknown option {key}; did you mean {_nearest(key, valid)}?")
        if key in given:
            raise InputError(f"--drafter {text}: {key} is given twice; give it once")
        given[key] = value
    try:
        return DrafterSpec(kind=name, options=TypeAdapter(kind.options).validate_python(given))
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "value_error":  # what the options themselves refuse
            raise InputError(f"--drafter {text}: {problem['ctx']['error']}") from None
        field = ".".join(str(part) for part in problem["loc"][:1])
        if problem["type"] == "missing":
            raise InputError(f"--drafter {text}: {field} is missing; write {name}:{field}=...") from None
        raise InputError(f"--drafter {text}: {field}={problem['input']}: {problem['msg'].lower()}") from None


def prepare_drafter(spec: DrafterSpec, around: Surroundings) -> NewDrafter:
    """Load what the drafter needs; the result makes drafters that have seen nothing yet."""
    return KINDS[spec.kind].prepare(spec.options, around)


def speculative_config(spec: DrafterSpec, k: int) -> dict[str, Any] | None:
    """vLLM's `--speculative-config` for this drafter; None where vLLM cannot serve it."""
    return KINDS[spec.kind].serve(spec.options, k)


def _nearest(name: str, valid: list[str]) -> str:
    return difflib.get_close_matches(name, valid, n=1, cutoff=0.0)[0]

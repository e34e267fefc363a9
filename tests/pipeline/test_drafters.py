"""Drafters without a trained head: what a user may write, a run that has prompts alone, and a real vLLM beside it."""

import importlib.util
import json
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.data.sources import PROMPTS
from drafthead.eval.drafters.ngram import NgramOptions
from drafthead.eval.drafters.suffix import SuffixOptions
from drafthead.eval.engine import is_available
from drafthead.pipeline.drafters import KINDS, DrafterSpec, parse_drafter, speculative_config
from drafthead.pipeline.evaluate import evaluate_prompts, load_prompts
from drafthead.pipeline.loop import EvalOptions
from drafthead.pipeline.recipe import TreeConfig, TypicalConfig
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.serve_check import check_prompts

from tests.conftest import MakeRun

CommandLine = Any
NEW_TOKENS = 24
LOOKUP = "ngram:prompt_lookup_min=2,prompt_lookup_max=4"


# ---- what may be written ---------------------------------------------------------------------------------


def test_a_spec_names_a_kind_and_its_options() -> None:
    assert parse_drafter("ngram") == DrafterSpec(kind="ngram", options=NgramOptions())
    given = parse_drafter(LOOKUP)
    assert given == DrafterSpec(kind="ngram", options=NgramOptions(prompt_lookup_min=2, prompt_lookup_max=4))
    assert str(given) == LOOKUP
    suffix = parse_drafter("suffix:suffix_decoding_max_tree_depth=12,suffix_decoding_min_token_prob=0.25")
    assert suffix.options == SuffixOptions(suffix_decoding_max_tree_depth=12, suffix_decoding_min_token_prob=0.25)
    assert parse_drafter(str(suffix)) == suffix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngrm", "unknown kind 'ngrm'; did you mean ngram?"),
        ("sufix:", "unknown kind 'sufix'; did you mean suffix?"),
        ("ngram:prompt_lookup_mx=3", "unknown option prompt_lookup_mx; did you mean prompt_lookup_max?"),
        ("suffix:max_tree_depth=3", "unknown option max_tree_depth; did you mean suffix_decoding_max_tree_depth?"),
        ("ngram:3", "'3' has no value; write prompt_lookup_min=..."),
        ("ngram:prompt_lookup_max", "'prompt_lookup_max' has no value; write prompt_lookup_max=..."),
        ("ngram:prompt_lookup_max=two", "prompt_lookup_max=two: input should be a valid integer"),
        ("ngram:prompt_lookup_max=2,prompt_lookup_max=3", "prompt_lookup_max is given twice"),
        ("ngram:prompt_lookup_min=4,prompt_lookup_max=2", "from 1 on, and min not above max"),
        ("suffix:suffix_decoding_min_token_prob=1.5", "suffix_decoding_min_token_prob=1.5: from 0 to 1"),
    ],
)
def test_what_cannot_be_meant_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_drafter(text)
    assert str(error.value).startswith(f"--drafter {text}: ")
    assert message in str(error.value)


def test_vllm_gets_its_own_names_and_no_more() -> None:
    config = speculative_config(parse_drafter("ngram:prompt_lookup_max=3"), 4)
    assert config == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 3,
    }
    if is_available():
        from vllm.config import SpeculativeConfig

        for kind in ("ngram", "suffix"):
            found = speculative_config(parse_drafter(kind), 2)
            assert found is not None
            assert found.keys() <= SpeculativeConfig.__dataclass_fields__.keys()
            assert found["method"] in KINDS


# ---- a run that has nothing but prompts ------------------------------------------------------------------


@pytest.fixture
def only_prompts(make_run: MakeRun) -> Run:
    run = make_run("only-prompts")
    run.run_stage("prompts")
    return run


def options_of(spec: str, **settings: Any) -> EvalOptions:
    given = {"k": 3, "temperature": 0.0, "max_new_tokens": NEW_TOKENS, "limit": 4, "drafter": parse_drafter(spec)}
    return EvalOptions(**{**given, **settings})


@pytest.mark.parametrize("spec", [LOOKUP, "suffix"])
def test_a_run_without_a_head_is_evaluated_with_a_drafter(only_prompts: Run, spec: str) -> None:
    chosen = load_prompts(only_prompts, None, 4, NEW_TOKENS)
    report = evaluate_prompts(only_prompts, chosen, options_of(spec))
    assert report == evaluate_prompts(only_prompts, chosen, options_of(spec)), "nothing is remembered across calls"
    assert report["identical_to_plain"] == "4/4"
    assert report["drafter"].startswith(spec)
    assert report["speculative_config"]["num_speculative_tokens"] == 3
    assert 0 < report["drafts"] < report["passes"], "some passes have no draft"
    assert report["drafts"] < report["draft_tokens"] < 3 * report["drafts"], "some drafts are short"
    assert 1 < report["tokens_per_pass"] < report["mean_acceptance_length"]
    assert report["draft_acceptance_rate"] > sum(report["per_position"]) / 3


def test_a_sampled_evaluation_takes_typical_acceptance_and_no_tree(only_prompts: Run) -> None:
    chosen = load_prompts(only_prompts, None, 4, NEW_TOKENS)
    settings = {"temperature": 1.0, "typical": TypicalConfig(epsilon=0.0)}
    report = evaluate_prompts(only_prompts, chosen, options_of("ngram:prompt_lookup_max=1", **settings))
    chain = report["typical"]["chain"]
    assert chain["draft_acceptance_rate"] == 1, "at epsilon 0 every draft is kept"
    assert chain["drafts"] < chain["passes"]
    with pytest.raises(InputError, match="ngram drafts chains alone"):
        options_of(LOOKUP, tree=TreeConfig())


def test_the_command_line_takes_a_drafter(drafthead: CommandLine, only_prompts: Run) -> None:
    given = ("--prompts", PROMPTS / "lookup.jsonl", "--max-new-tokens", "9", "--limit", "4", "--json")
    done = drafthead("eval", only_prompts.path, "--drafter", LOOKUP, "--k", "9", *given)
    assert done.code == 0, done.stderr
    report = done.json()
    assert (report["k"], report["drafter"]) == (9, LOOKUP)
    assert set(report["by_domain"]) == {"one change", "open writing"}
    assert not (only_prompts.path / "eval").exists(), "the run's files stay as they are"
    for extra, message in (
        (("--drafter", "ngrm"), "--drafter ngrm: unknown kind 'ngrm'; did you mean ngram?"),
        (("--drafter", "ngram", "--k", "17"), "--k 17: at most 16 draft tokens"),
        (("--drafter", "ngram", "--tree", "7"), "--tree: ngram drafts chains alone; leave out --tree or --drafter"),
    ):
        refused = drafthead("eval", only_prompts.path, *extra)
        assert refused.code == 2
        assert refused.complaints == [f"drafthead: {message}"]


def test_the_shipped_prompts_are_as_many_edits_as_stories() -> None:
    rows = [json.loads(line) for line in (PROMPTS / "lookup.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["domain"] for row in rows] == ["one change"] * 8 + ["open writing"] * 8
    assert len({row["id"] for row in rows}) == len({row["turns"][0] for row in rows}) == 16


def test_what_vllm_cannot_serve_is_said_before_anything_is_served(only_prompts: Run) -> None:
    if importlib.util.find_spec("arctic_inference"):
        pytest.skip("arctic-inference is installed")
    chosen = load_prompts(only_prompts, None, 2, NEW_TOKENS)
    with pytest.raises(InputError, match="--drafter suffix: vLLM needs the package arctic-inference for it"):
        check_prompts(only_prompts, chosen, [3], NEW_TOKENS, parse_drafter("suffix"))


# ---- a real vLLM -----------------------------------------------------------------------------------------


@pytest.mark.serve
@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
@pytest.mark.parametrize("spec", [LOOKUP, "suffix"])
def test_vllm_counts_what_was_predicted(only_prompts: Run, spec: str) -> None:
    if spec == "suffix":
        pytest.importorskip("arctic_inference.suffix_decoding", reason="arctic-inference is not installed")
    chosen = load_prompts(only_prompts, None, 4, NEW_TOKENS)
    report = check_prompts(only_prompts, chosen, [3], NEW_TOKENS, parse_drafter(spec))
    assert report["ok"], report["failures"]
    assert report["identical_to_plain"] == "4/4"
    predicted, served = report["predicted"], report["served"]
    for name in ("drafts", "per_position", "draft_acceptance_rate", "mean_acceptance_length"):
        assert served[name] == predicted[name]
    assert served["drafts"] > 0
    assert served["mean_acceptance_length"] > 1
    for domain, numbers in predicted["by_domain"].items():
        assert served["by_domain"][domain]["per_position"] == numbers["per_position"]

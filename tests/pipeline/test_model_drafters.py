"""`--drafter draft-model` and `skip-layers` on a run's target: what they are given, what they refuse, vLLM's config."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.eval.engine import is_available
from drafthead.pipeline.drafters import parse_drafter, speculative_config
from drafthead.pipeline.evaluate import evaluate_prompts, load_prompts
from drafthead.pipeline.loop import EvalOptions
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.serve_check import check_prompts
from safetensors.torch import load_file, save_file


def evaluate_with(run: Run, spec: str) -> dict[str, Any]:
    options = EvalOptions(k=3, temperature=0.0, max_new_tokens=10, limit=3, drafter=parse_drafter(spec))
    return evaluate_prompts(run, load_prompts(run, None, 3, 10), options)


@pytest.fixture(scope="module")
def reordered(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with its tokens in another order: the same texts under other ids."""
    folder = tmp_path_factory.mktemp("reordered")
    shutil.copytree(tiny_run.target.path, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    order = torch.randperm(config["vocab_size"], generator=torch.Generator().manual_seed(2))
    new_id = {int(old): new for new, old in enumerate(order)}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {token: new_id[old] for token, old in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = new_id[added["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][order].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_the_target_drafts_for_itself(tiny_run: Run, cache: Path) -> None:
    folder = tiny_run.target.path
    report = evaluate_with(tiny_run, f"draft-model:{folder}")
    assert report["identical_to_plain"] == "3/3"
    assert report["mean_acceptance_length"] == 4
    assert report["speculative_config"] == {
        "method": "draft_model",
        "model": str(folder.resolve()),
        "num_speculative_tokens": 3,
    }


@pytest.mark.slow
def test_a_model_with_other_ids_drafts_through_the_common_tokens(
    tiny_run: Run, cache: Path, reordered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"--drafter draft-model .*: token 5 is .* add ,use_heterogeneous_vocab=true"):
        evaluate_with(tiny_run, f"draft-model:{reordered}")
    report = evaluate_with(tiny_run, f"draft-model:{reordered},use_heterogeneous_vocab=true")
    assert report["identical_to_plain"] == "3/3"
    assert 2 < report["mean_acceptance_length"] < 4, "a random target also writes padding, which has no text"
    assert report["speculative_config"]["use_heterogeneous_vocab"] is True
    tokens = json.loads((reordered / "tokenizer.json").read_text())["model"]["vocab"]
    assert f"it can draft {len(tokens)} of the target's 512 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_the_target_without_some_layers_drafts(tiny_run: Run, cache: Path) -> None:
    report = evaluate_with(tiny_run, "skip-layers:3-4+6")
    assert report["identical_to_plain"] == "3/3"
    assert 1 <= report["mean_acceptance_length"] < 4
    assert report["speculative_config"] is None
    assert "vLLM cannot serve it" in report["method"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("draft-model", r"--drafter draft-model: model is missing; write draft-model:model="),
        ("skip-layers:a", r"--drafter skip-layers:a: layers=a: layer ids and ranges joined by \+"),
        ("skip-layers", r"layers is missing"),
        ("skip-layers:8-20,layer=3", r"unknown option layer; did you mean layers\?"),
    ],
    ids=["no model", "no layers", "nothing", "unknown option"],
)
def test_wrong_specs_are_one_line(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_drafter(spec)


def test_a_draft_model_that_is_not_there_is_refused(tiny_run: Run, cache: Path) -> None:
    with pytest.raises(InputError, match="--drafter draft-model /nowhere: no such folder"):
        evaluate_with(tiny_run, "draft-model:/nowhere")


def test_a_layer_that_the_target_lacks_is_refused(tiny_run: Run, cache: Path) -> None:
    with pytest.raises(InputError, match="no layer 8; its layers are 0 to 7"):
        evaluate_with(tiny_run, "skip-layers:7-8")


def test_no_config_of_vllm_skips_layers() -> None:
    assert speculative_config(parse_drafter("skip-layers:1"), 3) is None


# ---- a real vLLM -----------------------------------------------------------------------------------------


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
def test_vllm_drafts_with_a_model_of_other_ids_as_predicted(tiny_run: Run, cache: Path, reordered: Path) -> None:
    spec = parse_drafter(f"draft-model:{reordered},use_heterogeneous_vocab=true")
    report = check_prompts(tiny_run, load_prompts(tiny_run, None, 4, 16), [3], 16, spec)
    assert report["ok"], report["failures"]
    assert report["identical_to_plain"] == "4/4"
    assert report["served"]["mean_acceptance_length"] > 2
    for name in ("drafts", "per_position", "mean_acceptance_length"):
        assert report["served"][name] == report["predicted"][name]

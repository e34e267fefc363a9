"""`drafthead compare`: side by side as each run alone; refused where prompts or targets are not the same."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml
from drafthead.data.errors import InputError
from drafthead.eval.acceptance import summarize
from drafthead.pipeline.compare import CompareOptions, check_comparable, common_prompts, compare, run_names
from drafthead.pipeline.compare_plot import axis_end
from drafthead.pipeline.compare_table import render_comparison
from drafthead.pipeline.run_dir import Run, open_run
from drafthead.pipeline.stages import STAGES

RATES = ("per_position", "conditional", "mean_acceptance_length", "mean_of_requests_acceptance_length", "drafts")


@pytest.fixture(scope="session")
def other_run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny run again, half of its lm_head's rows three times as large: the same prompts, other drafts."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("others") / "other"
    shutil.copytree(tiny_run.path, path, symlinks=True)
    tensors = load_file(path / "train" / "head.safetensors")
    tensors["lm_head.weight"][::2] *= 3
    save_file(tensors, path / "train" / "head.safetensors")
    return open_run(path, STAGES, [])


def changed(run: Run, folder: Path, name: str, **sections: Any) -> Run:
    """A copy of a run with other settings in its recipe, its stages finished as they are."""
    path = folder / name
    shutil.copytree(run.path, path, symlinks=True)
    values = yaml.safe_load((path / "recipe.yaml").read_text())
    for section, settings in sections.items():
        values[section] = {**values[section], **settings} if isinstance(settings, dict) else settings
    (path / "recipe.yaml").write_text(yaml.safe_dump(values))
    return open_run(path, STAGES, [])


@pytest.fixture(scope="session")
def report(tiny_run: Run, other_run: Run, cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTHEAD_CACHE", str(cache_folder))
        return compare([tiny_run, other_run], CompareOptions(), out)


def test_a_run_has_the_numbers_of_its_own_evaluation(report: Any, tiny_run: Run) -> None:
    """The loop is deterministic, so what is measured anew equals what the stage measured with the same settings."""
    alone, ours = tiny_run.report("eval"), report["runs"][0]
    for name in (*RATES, "by_domain", "identical_to_plain"):
        assert ours[name] == alone[name], name
    assert report["prompts"] == alone["prompts"]
    assert (report["k"], report["max_new_tokens"], report["dtype"]) == (3, 24, "float32")


def test_heads_are_told_apart(report: Any) -> None:
    first, second = report["runs"]
    assert [first["name"], second["name"]] == ["tiny", "other"]
    assert first["drafts"] != second["drafts"] or first["per_position"] != second["per_position"]
    assert second["identical_to_plain"] == first["identical_to_plain"], "a draft changes no text"


def test_costs_and_sizes(report: Any, tiny_run: Run) -> None:
    for run in report["runs"]:
        assert run["head"] == "eagle3"
        assert run["draft_cost"] == pytest.approx(run["draft_s"] / run["verify_s"])
        assert run["speedup"] == pytest.approx(run["plain_ms_per_token"] / run["speculative_ms_per_token"])
        assert 0 < run["draft_s"] < 1
        assert 0 < run["verify_s"] < 1
        assert run["draft_vocab_size"] == 256
        assert run["trained_tokens"] == tiny_run.report("train")["tokens"]
        fc, attention, mlp, norms, lm_head = 3 * 64 * 64, (64 + 32 + 32) * 128 + 64 * 64, 3 * 64 * 128, 4 * 64, 256 * 64
        assert run["trained_parameters"] == fc + attention + mlp + norms + lm_head


def test_what_is_written(report: Any) -> None:
    plot = Path(report["plot"])
    assert json.loads((plot.parent / "compare.json").read_text()) == report
    assert sorted(path.name for path in plot.parent.iterdir()) == ["compare.json", "compare.svg"]
    drawing = ElementTree.parse(plot).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    bars = [bar for bar in drawing.findall("svg:rect", space) if bar.find("svg:title", space) is not None]
    heights = {
        title.text: float(bar.get("height", 0)) for bar in bars if (title := bar.find("svg:title", space)) is not None
    }
    assert len(heights) == 2 * report["k"]
    full = heights_of_one(report, heights)
    for run in report["runs"]:
        for position, rate in enumerate(run["per_position"]):
            label = f"{run['name']}, position {position + 1}: {rate:.3f}"
            assert heights[label] == pytest.approx(full * rate, abs=0.06)
    written = plot.read_text()
    assert all(text not in written for text in ("href", "<script", "url(", "@import")), "self-contained"


def heights_of_one(report: Any, heights: dict[str | None, float]) -> float:
    domains = len(report["runs"][0]["by_domain"])
    assert max(heights.values()) <= max(220, 24 * (1 + domains))
    return max(220, 24 * (1 + domains))


def test_the_tables_have_a_row_per_run_and_per_domain(report: Any) -> None:
    text = render_comparison(report)
    lines = text.splitlines()
    for run in report["runs"]:
        assert sum(line.startswith(f"{run['name']} ") for line in lines) == 2
        assert f"{run['mean_acceptance_length']:.3f}" in text
    for domain in report["runs"][0]["by_domain"]:
        assert any(line.startswith(f"{domain} ") for line in lines)
    assert max(len(line) for line in lines if "plot:" not in line) < 160


def test_nothing_measured_is_shown_as_nothing(report: Any, tmp_path: Path) -> None:
    from drafthead.pipeline.compare_plot import render_svg

    empty = summarize([], 3)
    runs = [{**one, **empty, "by_domain": {"a & b <c>": empty}, "draft_s": None} for one in report["runs"]]
    drawing = render_svg({**report, "runs": runs})
    ElementTree.fromstring(drawing)
    assert "a &amp; b &lt;c&gt;" in drawing
    assert render_comparison({**report, "runs": runs})
    assert [axis_end(lengths) for lengths in ([], [1.2], [1.5], [2.01])] == [1.5, 1.5, 1.5, 2.5]


# ---- refusals


def test_one_run_or_the_same_twice(tiny_run: Run) -> None:
    with pytest.raises(InputError, match="one run alone"):
        check_comparable([tiny_run], CompareOptions())
    with pytest.raises(InputError, match="given twice"):
        check_comparable([tiny_run, tiny_run], CompareOptions())


def test_another_target(tiny_run: Run, tiny_target: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_target, tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    other = changed(tiny_run, tmp_path, "other", target=str(tmp_path / "target"))
    with pytest.raises(InputError, match=r"stage draft-vocab has not finished"):
        check_comparable([tiny_run, other], CompareOptions())
    for name in ("draft-vocab", "train"):  # as if trained
        shutil.copytree(tiny_run.folder(name), other.folder(name), dirs_exist_ok=True)
    with pytest.raises(InputError, match=rf"different targets: .*{tiny_run.target.fingerprint}.*{tmp_path}/target"):
        check_comparable([tiny_run, other], CompareOptions())


def test_an_unfinished_run(tiny_run: Run, make_run: Any) -> None:
    fresh = make_run("fresh")
    with pytest.raises(InputError, match=rf"stage train has not finished; run `drafthead train {fresh.path}`"):
        check_comparable([tiny_run, fresh], CompareOptions())


@pytest.mark.parametrize(("name", "value"), [("k", 2), ("max_new_tokens", 8), ("limit", 2)])
def test_settings_on_which_the_recipes_differ(
    name: str, value: int, tiny_run: Run, tmp_path: Path, cache: Path
) -> None:
    other = changed(tiny_run, tmp_path, "other", eval={name: value})
    ours = getattr(tiny_run.recipe.eval, name)
    flag = name.replace("_", "-")
    with pytest.raises(InputError, match=rf"eval\.{name} is {ours} in .*tiny and {value} in .*other; give --{flag}"):
        check_comparable([tiny_run, other], CompareOptions())
    settings = check_comparable([tiny_run, other], CompareOptions(**{name: value}))
    assert getattr(settings, name) == value


def test_prompts_that_are_rendered_otherwise(tiny_run: Run, tmp_path: Path, cache: Path) -> None:
    other = changed(tiny_run, tmp_path, "other", serve_check={"max_model_len": 200})
    settings = check_comparable([tiny_run, other], CompareOptions())
    with pytest.raises(InputError, match=r"same prompts \(serve_check\.max_model_len: 1024 .*tiny, 200 .*other\)"):
        common_prompts([tiny_run, other], None, settings)


def test_names_are_distinct(tiny_run: Run, tmp_path: Path, cache: Path) -> None:
    again = changed(tiny_run, tmp_path, "tiny")
    assert run_names([tiny_run, again]) == [str(tiny_run.path), str(again.path)]


# ---- the command


def test_the_command_with_a_file_of_prompts(tiny_run: Run, other_run: Run, drafthead: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Name a river.", "domain": "mine"}\n{"prompt": "And a price?"}\n')
    paths = (tiny_run.path, other_run.path)
    done = drafthead(
        "compare", *paths, "--prompts", "mine.jsonl", "--k", 2, "--max-new-tokens", 6, "--out", "here", "--json"
    )
    assert done.code == 0, done.stderr
    found = done.json()
    assert (found["prompts"], found["k"], found["max_new_tokens"]) == (2, 2, 6)
    assert found["prompts_file"] == "mine.jsonl"
    assert set(found["runs"][0]["by_domain"]) == {"mine", "all"}
    assert json.loads((tmp_path / "here" / "compare.json").read_text()) == found
    done = drafthead("compare", tiny_run.path)
    assert done.code == 2
    assert done.complaints == [
        f"drafthead: {tiny_run.path}: one run alone; give two or more run directories to compare"
    ]

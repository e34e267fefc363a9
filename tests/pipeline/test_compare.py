"""`drafthead compare`: the numbers of each run alone, drafters beside heads; other prompts or targets are refused."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, sha256_of, write_json
from drafthead.eval.intervals import summarize_with_intervals
from drafthead.pipeline import compare_times
from drafthead.pipeline.compare import compare
from drafthead.pipeline.compare_contestants import CompareOptions, check_comparable, common_prompts, run_names
from drafthead.pipeline.compare_plot import axis_end
from drafthead.pipeline.compare_table import render_comparison
from drafthead.pipeline.run_dir import Run, open_run
from drafthead.pipeline.stages import STAGES

RATES = ("per_position", "conditional", "mean_acceptance_length", "mean_of_requests_acceptance_length", "drafts")
LENGTHS = ("mean_acceptance_length", "mean_of_requests_acceptance_length", "tokens_per_pass")


@pytest.fixture(scope="session")
def other_run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny run again, half of its lm_head's rows three times as large: the same prompts, other drafts."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("others") / "other"
    shutil.copytree(tiny_run.path, path, symlinks=True)
    tensors = load_file(path / "train" / "head.safetensors")
    tensors["lm_head.weight"][::2] *= 3
    save_file(tensors, path / "train" / "head.safetensors")
    manifest = read_json(path / "train" / "manifest.json")
    manifest["sha256"]["head.safetensors"] = sha256_of(path / "train" / "head.safetensors")
    write_json(path / "train" / "manifest.json", manifest)
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
        patch.setattr(compare_times, "TIMED_PROMPTS", 2)
        options = CompareOptions(drafters=("ngram:prompt_lookup_min=1",), temperatures=(0.0, 1.0))
        return compare([tiny_run, other_run], options, out)


def test_a_run_has_the_numbers_of_its_own_evaluation(report: Any, tiny_run: Run) -> None:
    """The loop is deterministic, so what is measured anew equals what the stage measured with the same settings."""
    alone, ours = tiny_run.report("eval"), report["runs"][0]
    for name in (*RATES, "by_domain", "by_context_length", "identical_to_plain"):
        assert ours[name] == alone[name], name
    assert report["prompts"] == alone["prompts"]
    assert (report["k"], report["max_new_tokens"], report["dtype"]) == (3, 24, "float32")


def test_heads_are_told_apart(report: Any) -> None:
    first, second, _ = report["runs"]
    assert [first["name"], second["name"]] == ["tiny", "other"]
    assert first["drafts"] != second["drafts"] or first["per_position"] != second["per_position"]
    assert second["identical_to_plain"] == first["identical_to_plain"], "a draft changes no text"


def test_a_drafter_has_what_a_head_has_but_for_its_training(report: Any) -> None:
    head, _, drafter = report["runs"]
    assert drafter.keys() == head.keys()
    assert [name for name, value in drafter.items() if value is None and head[name] is not None] == [
        "path",
        "head",
        "trained_parameters",
        "draft_vocab_size",
        "trained_tokens",
    ]
    assert (drafter["kind"], drafter["name"]) == ("drafter", "ngram:prompt_lookup_min=1")
    assert drafter["drafter"].startswith("ngram:prompt_lookup_min=1,")
    assert drafter["identical_to_plain"] == head["identical_to_plain"], "a draft changes no text"
    assert drafter["passes"] > drafter["drafts"] > 0, "passes without a draft are no rounds"
    assert drafter["tokens_per_pass"] < drafter["mean_acceptance_length"]
    assert head["passes"] == head["drafts"]


def test_every_length_lies_in_its_interval(report: Any) -> None:
    for run in (one for section in report["temperatures"] for one in section["runs"]):
        for numbers in (run, *run["by_domain"].values()):
            for name in LENGTHS:
                ends = numbers[f"{name}_interval"]
                assert ends is None or ends[0] <= numbers[name] <= ends[1]
            assert (numbers["tokens_per_pass_interval"] is None) == (numbers["prompts"] < 2)
        for rate, (low, high) in zip(run["per_position"], run["per_position_interval"], strict=True):
            assert 0 <= low <= rate <= high <= 1
        for name in ("mean_ms_per_token", "mean_speedup"):
            low, high = run[f"{name}_interval"]
            assert low < run[name] < high


def test_winners_are_held_against_everyone(report: Any) -> None:
    by_length, by_time = report["winners"]["tokens_per_pass"], report["winners"]["decode_time"]
    names = {run["name"] for run in report["runs"]}
    assert {by_length["best"], *(one["name"] for one in by_length["against"])} == names
    assert {by_time["best"], *(one["name"] for one in by_time["against"])} == names | {"plain decoding"}
    assert (by_length["prompts"], by_time["prompts"]) == (report["prompts"], report["timed_prompts"])
    lengths = {run["name"]: run["tokens_per_pass"] for run in report["runs"]}
    assert by_length["best"] == max(lengths, key=lambda name: lengths[name])
    for one in by_length["against"]:
        assert one["difference"] == pytest.approx(lengths[by_length["best"]] - lengths[one["name"]])


def test_each_temperature_is_a_section(report: Any) -> None:
    greedy, sampled = report["temperatures"]
    assert (greedy["temperature"], sampled["temperature"]) == (0, 1)
    assert {name: report[name] for name in greedy} == greedy, "the first one's numbers stand at the top"
    assert [run["identical_to_plain"] for run in sampled["runs"]] == [None] * 3
    assert sampled["runs"][0]["per_position"] != greedy["runs"][0]["per_position"]
    assert Path(sampled["plot"]).name == "compare-temperature-1.svg"
    assert "temperature 1," in Path(sampled["plot"]).read_text()


def test_costs_and_sizes(report: Any, tiny_run: Run) -> None:
    for run in report["runs"][:2]:
        assert run["head"] == "eagle3"
        assert run["draft_cost"] == pytest.approx(run["draft_s"] / run["verify_s"])
        assert run["speedup"] == pytest.approx(run["plain_ms_per_token"] / run["speculative_ms_per_token"])
        assert run["mean_speedup"] == pytest.approx(report["mean_plain_ms_per_token"] / run["mean_ms_per_token"])
        assert 0 < run["draft_s"] < 1
        assert 0 < run["verify_s"] < 1
        assert run["draft_vocab_size"] == 256
        assert run["trained_tokens"] == tiny_run.report("train")["tokens"]
        fc, attention, mlp, norms, lm_head = 3 * 64 * 64, (64 + 32 + 32) * 128 + 64 * 64, 3 * 64 * 128, 4 * 64, 256 * 64
        assert run["trained_parameters"] == fc + attention + mlp + norms + lm_head


def test_what_is_written(report: Any) -> None:
    plot = Path(report["plot"])
    assert json.loads((plot.parent / "compare.json").read_text()) == report
    assert sorted(path.name for path in plot.parent.iterdir()) == [
        "compare-temperature-1.svg",
        "compare.json",
        "compare.svg",
    ]
    drawing = ElementTree.parse(plot).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    bars = [bar for bar in drawing.findall("svg:rect", space) if bar.find("svg:title", space) is not None]
    heights = {
        title.text: float(bar.get("height", 0)) for bar in bars if (title := bar.find("svg:title", space)) is not None
    }
    assert len(heights) == 3 * report["k"]
    full = heights_of_one(report, heights)
    for run in report["runs"]:
        for position, rate in enumerate(run["per_position"]):
            label = f"{run['name']}, position {position + 1}: {rate:.3f}"
            assert heights[label] == pytest.approx(full * rate, abs=0.06)
    bars_of_error = {
        float(line.get("y1", 0)) - float(line.get("y2", 0))
        for line in drawing.findall("svg:line", space)
        if line.get("stroke") == "black"
    }
    for run in report["runs"]:
        for low, high in run["per_position_interval"]:
            assert any(abs(size - full * (high - low)) < 0.11 for size in bars_of_error)
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
        assert sum(line.startswith(f"{run['name']} ") for line in lines) == 3 * len(report["temperatures"])
        low, high = run["tokens_per_pass_interval"]
        assert f"{run['tokens_per_pass']:.3f} [{low:.3f}, {high:.3f}]" in text
    for group in (
        *report["runs"][0]["by_domain"],
        *(f"{one['from']}-" for one in report["runs"][0]["by_context_length"]),
    ):
        assert any(line.startswith(group) for line in lines)
    assert sum(line.startswith("no winner by ") or " wins by " in line for line in lines) == 4
    for section in report["temperatures"]:  # what the speed-ups below it are over
        assert f"plain decoding: mean ms/token {section['mean_plain_ms_per_token']:.1f} [" in text
    assert lines[-2:] == [f"plot: {section['plot']}" for section in report["temperatures"]]
    assert max(len(line) for line in lines if "plot:" not in line and "win" not in line) < 160


def test_nothing_measured_is_shown_as_nothing(report: Any, tmp_path: Path) -> None:
    from drafthead.pipeline.compare_plot import render_svg

    empty = {**summarize_with_intervals([], 3), "tokens_per_pass": None, "passes": 0, "by_context_length": []}
    runs = [{**one, **empty, "by_domain": {"a & b <c>": empty}, "draft_s": None} for one in report["runs"]]
    drawing = render_svg({**report, "runs": runs})
    ElementTree.fromstring(drawing)
    assert "a &amp; b &lt;c&gt;" in drawing
    assert render_comparison({**report, "temperatures": [{**report["temperatures"][0], "runs": runs}]})
    assert [axis_end(lengths) for lengths in ([], [1.2], [1.5], [2.01])] == [1.5, 1.5, 1.5, 2.5]


# ---- refusals


def test_one_run_or_the_same_twice(tiny_run: Run, cache: Path) -> None:
    with pytest.raises(InputError, match="one run alone"):
        check_comparable([tiny_run], CompareOptions())
    assert check_comparable([tiny_run], CompareOptions(drafters=("ngram",))).k == 3
    with pytest.raises(InputError, match="given twice"):
        check_comparable([tiny_run, tiny_run], CompareOptions())
    with pytest.raises(InputError, match=r"--drafter ngram:prompt_lookup_min=5: given twice"):
        check_comparable([tiny_run], CompareOptions(drafters=("ngram", "ngram:prompt_lookup_min=5")))
    with pytest.raises(InputError, match=r"--drafter ngrm: unknown kind"):
        check_comparable([tiny_run], CompareOptions(drafters=("ngrm",)))


def test_another_target(tiny_run: Run, tiny_target: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_target, tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    other = changed(tiny_run, tmp_path, "other", target=str(tmp_path / "target"))
    with pytest.raises(InputError, match=r"stage draft-vocab has finished with other settings"):
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
    given = ("--prompts", "mine.jsonl", "--k", 2, "--max-new-tokens", 6, "--temperature", "0.7", "--drafter", "ngram")
    done = drafthead("compare", tiny_run.path, other_run.path, *given, "--out", "here", "--json")
    assert done.code == 0, done.stderr
    found = done.json()
    assert (found["prompts"], found["k"], found["max_new_tokens"], found["temperature"]) == (2, 2, 6, 0.7)
    assert [run["name"] for run in found["runs"]] == ["tiny", "other", "ngram"]
    assert found["prompts_file"] == "mine.jsonl"
    assert set(found["runs"][0]["by_domain"]) == {"mine", "all"}
    assert json.loads((tmp_path / "here" / "compare.json").read_text()) == found
    done = drafthead("compare", tiny_run.path)
    assert done.code == 2
    assert done.complaints == [
        f"drafthead: {tiny_run.path}: one run alone; give two or more run directories to compare, or --drafter ngram "
        "beside it"
    ]
    done = drafthead("compare", tiny_run.path, "--drafter", "ngram", "--temperature", "0,0")
    assert done.code == 2
    assert "'0,0': give each temperature once" in done.stderr

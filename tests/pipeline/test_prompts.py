"""Prompts: what goes into training, what is held out, and what the target writes itself."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drafthead.data import sources
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, read_jsonl
from drafthead.data.template import Template
from drafthead.eval.engine import Request, Result
from drafthead.pipeline import prompts as prompting
from drafthead.pipeline.prompts import (
    SelfSample,
    collect_prompts,
    file_hashes,
    spread,
    usable_texts,
    user_turn_ids,
)
from drafthead.pipeline.run_dir import Run

MakeRun = Any


def jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def questions(folder: Path, name: str, count: int, **extra: Any) -> Path:
    rows = [{"id": f"{name}-{i}", "prompt": f"{name} question number {i}?", **extra} for i in range(count)]
    return jsonl(folder / f"{name}.jsonl", rows)


def collected(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Training and held-out rows, and the report."""
    run.run_stage("prompts")
    folder = run.folder("prompts")
    rows = [read_jsonl(folder / f"{split}.jsonl") for split in ("train", "heldout")]
    return rows[0], rows[1], read_json(folder / "report.json")


def first_texts(rows: list[dict[str, Any]]) -> set[str]:
    return {" ".join(row["messages"][0]["content"].lower().split()) for row in rows}


# ---- training and held-out


def test_limits_hold_per_source_and_in_all(make_run: MakeRun, tmp_path: Path) -> None:
    sources = [
        {"source": str(questions(tmp_path, "a", 9)), "limit": 4},
        {"source": str(questions(tmp_path, "b", 9)), "limit": 5},
        {"source": str(questions(tmp_path, "c", 2))},
    ]
    heldout = [{"source": str(questions(tmp_path, "h", 9)), "limit": 3}]
    settings = {"sources": sources, "limit": 10, "heldout": heldout, "heldout_limit": 2}
    train, held, report = collected(make_run("r", f"prompts={json.dumps(settings)}"))
    taken = Counter(row["source"] for row in train)
    assert taken == Counter(report["sources"])
    assert len(train) == report["train"] == 10
    assert all(taken[source["source"]] <= source.get("limit", 2) for source in sources)
    assert len(held) == report["heldout"] == 2
    assert len({row["id"] for row in [*train, *held]}) == 12


def test_shares_are_parts_of_the_limit(make_run: MakeRun, tmp_path: Path) -> None:
    a, b = questions(tmp_path, "a", 20), questions(tmp_path, "b", 20)
    settings = {
        "sources": [{"source": str(a), "share": 0.25}, {"source": str(b)}],
        "limit": 12,
        "heldout": [{"source": "builtin"}],
    }
    _, _, report = collected(make_run("r", f"prompts={json.dumps(settings)}"))
    assert report["sources"] == {str(a): 3, str(b): 9}


def test_shares_are_met_after_what_is_held_out_is_gone(make_run: MakeRun, tmp_path: Path) -> None:
    a, b = questions(tmp_path, "a", 20), questions(tmp_path, "b", 20)
    held = jsonl(tmp_path / "h.jsonl", [{"prompt": f"a question number {i}?"} for i in range(10)])
    settings = {
        "sources": [{"source": str(a), "share": 0.5}, {"source": str(b), "share": 0.5}],
        "limit": 20,
        "heldout": [{"source": str(held)}],
    }
    train, _, report = collected(make_run("r", f"prompts={json.dumps(settings)}"))
    assert report["sources"] == report["requested"] == {str(a): 10, str(b): 10}
    assert Counter(row["source"] for row in train) == report["sources"]
    assert (report["warnings"], report["dropped"]) == ([], {"also held out": 10})


def test_a_source_that_falls_short_of_its_share_is_said(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = questions(tmp_path, "a", 2), questions(tmp_path, "b", 20)
    sources = [{"source": str(a), "share": 0.5}, {"source": str(b), "share": 0.5}]
    settings = {"sources": sources, "limit": 20, "heldout": 0.1}
    _, _, report = collected(make_run("r", f"prompts={json.dumps(settings)}"))
    assert (report["sources"], report["requested"]) == ({str(a): 2, str(b): 10}, {str(a): 10, str(b): 10})
    (warning,) = report["warnings"]
    assert warning.startswith(f"{a} gave 2 of the 10 ")
    assert f"WARNING: prompts: {warning}" in capsys.readouterr().err


def test_a_conversation_without_a_user_is_counted(make_run: MakeRun, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "assistant", "content": "hello"}]}, {"prompt": "a b"}, {"prompt": "c d"}]
    source = {"source": str(jsonl(tmp_path / "rows.jsonl", rows))}
    train, held, report = collected(make_run("r", f"prompts={json.dumps({'sources': [source], 'heldout': 0.5})}"))
    assert (len(train), len(held), report["dropped"]) == (1, 1, {"no user message": 1})


def test_a_held_out_prompt_is_never_trained_on(make_run: MakeRun, tmp_path: Path) -> None:
    train_file = jsonl(
        tmp_path / "train.jsonl",
        [
            {"prompt": "What  IS a river?"},
            {"turns": ["what is a river?", "And a lake?"]},
            {"prompt": "What is a bridge?"},
        ],
    )
    held_file = jsonl(tmp_path / "held.jsonl", [{"prompt": "What is a river?"}])
    settings = {"sources": [{"source": str(train_file)}], "heldout": [{"source": str(held_file)}]}
    train, held, report = collected(make_run("r", f"prompts={json.dumps(settings)}"))
    assert first_texts(train) == {"what is a bridge?"}
    assert first_texts(held) == {"what is a river?"}
    assert report["dropped"] == {"also held out": 2}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_held_out_share_keeps_equal_first_texts_on_one_side(share: float, make_run: MakeRun, tmp_path: Path) -> None:
    rows = [{"turns": [f"Question {i % 10}?", f"More about {i}?"]} for i in range(30)]
    source = {"source": str(jsonl(tmp_path / "rows.jsonl", rows))}
    settings = {"sources": [source], "heldout": share}
    train, held, _ = collected(make_run("r", f"prompts={json.dumps(settings)}"))
    assert len(train) + len(held) == 30
    assert not first_texts(train) & first_texts(held)
    assert abs(len(held) - share * 30) <= 3


def test_the_builtin_set_is_known_by_its_folders_alone(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file of prompts beside them must not make every run's answers those of another set."""
    shutil.copytree(sources.PROMPTS, tmp_path / "prompts")
    monkeypatch.setattr(sources, "PROMPTS", tmp_path / "prompts")
    run = make_run("beside", "prompts={sources: [{source: builtin}], heldout: [{source: builtin}]}")
    before = file_hashes(run)
    (tmp_path / "prompts" / "more.jsonl").write_text("{}")
    assert file_hashes(run) == before
    (tmp_path / "prompts" / "train" / "more.jsonl").write_text("{}")
    assert file_hashes(run) != before


def test_the_builtin_halves_share_no_first_text(make_run: MakeRun) -> None:
    settings = "prompts={sources: [{source: builtin}], heldout: [{source: builtin}]}"
    train, held, report = collected(make_run("r", settings))
    assert not first_texts(train) & first_texts(held)
    assert len(train) > len(held) > 0
    assert report["domains"].keys() == {row["domain"] for row in train}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"heldout": 0.5}, "1 training and 0 held-out"),
        ({"heldout": 1.5}, "prompts.heldout=1.5"),
        ({"max_prompt_chars": 3, "heldout": [{"source": "builtin"}]}, "0 training and 0 held-out"),
    ],
    ids=["one-prompt", "share-above-one", "all-too-long"],
)
def test_both_sides_are_needed(overrides: dict[str, Any], said: str, make_run: MakeRun, tmp_path: Path) -> None:
    settings = {"sources": [{"source": str(questions(tmp_path, "a", 1))}], **overrides}
    with pytest.raises(InputError) as caught:
        make_run("r", f"prompts={json.dumps(settings)}").run_stage("prompts")
    assert said in str(caught.value)


def test_long_and_unusable_rows_are_counted(make_run: MakeRun, tmp_path: Path) -> None:
    rows = [{"prompt": "short enough"}, {"prompt": "x" * 200}, {"prompt": 5}, {"prompt": "also short"}]
    source = {"source": str(jsonl(tmp_path / "rows.jsonl", rows))}
    settings = {"sources": [source], "max_prompt_chars": 100, "heldout": 0.5}
    _, _, report = collected(make_run("r", f"prompts={json.dumps(settings)}"))
    assert report["train"] + report["heldout"] == 2
    assert report["dropped"]["longer than prompts.max_prompt_chars"] == 1
    assert sum(report["dropped"].values()) == 2


def test_spread_takes_the_domains_in_turn(make_run: MakeRun, tmp_path: Path) -> None:
    both = [questions(tmp_path, name, 6, domain=name) for name in ("a", "b")]
    settings = {"sources": [{"source": str(path)} for path in both], "heldout": 0.9, "heldout_limit": 4}
    train, held, report = collected(make_run("r", f"prompts={json.dumps(settings)}"))
    assert Counter(row["domain"] for row in held) == {"a": 2, "b": 2}
    assert len(train) + len(held) + report["dropped"]["beyond prompts.heldout_limit"] == 12
    assert spread([], 3) == []


# ---- keys


def test_a_changed_file_is_another_stage_output(make_run: MakeRun, tmp_path: Path) -> None:
    path = questions(tmp_path, "a", 5)
    settings = f"prompts={json.dumps({'sources': [{'source': str(path)}], 'heldout': 0.4})}"
    before = make_run("r", settings).key("prompts")
    assert make_run("r", settings).key("prompts") == before
    questions(tmp_path, "a", 6)
    after = make_run("r", settings)
    assert after.key("prompts") != before
    assert after.key("capture") != make_run("s").key("capture")


def test_a_changed_held_out_file_is_another_stage_output(make_run: MakeRun, tmp_path: Path) -> None:
    path = questions(tmp_path, "h", 5)
    settings = f"prompts={json.dumps({'sources': [{'source': 'builtin'}], 'heldout': [{'source': str(path)}]})}"
    before = make_run("r", settings).key("prompts")
    questions(tmp_path, "h", 6)
    assert make_run("r", settings).key("prompts") != before


def encode_key(make_run: MakeRun, target: Path, *overrides: str) -> str:
    key: str = make_run("r", f"target={target}", "respond.engine='off'", *overrides).key("encode")
    return key


@pytest.mark.parametrize(
    "override",
    [
        "encode.max_length=77",
        "encode.turns=last",
        "encode.template_kwargs={enable_thinking: false}",
        "encode.template_kwargs={enable_thinking: null}",
    ],
)
def test_other_encode_settings_are_another_output(override: str, make_run: MakeRun, tiny_target: Path) -> None:
    before = encode_key(make_run, tiny_target)
    assert encode_key(make_run, tiny_target) == before
    assert encode_key(make_run, tiny_target, override) != before


@pytest.mark.parametrize(
    "file",
    [
        "chat_template.jinja",
        "tokenizer_config.json",
        "tokenizer.json",
        "generation_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_other_files_of_template_and_tokenizer_are_another_output(
    file: str, make_run: MakeRun, tiny_target: Path, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    before = encode_key(make_run, target)
    path = target / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "{}") + " ")
    assert encode_key(make_run, target) != before


# ---- prompts that the target writes


class ScriptedEngine:
    """Answers requests with given texts, and stops like a kill after `lives` of them."""

    def __init__(self, run: Run, texts: list[tuple[str, str]], lives: int = 1000):
        self.tokenizer = run.target.tokenizer
        self.texts = iter(texts)
        self.lives = lives
        self.requests: list[Request] = []
        self.seeds: list[int] = []

    def open(self, run: Run, seed: int) -> "ScriptedEngine":
        self.seeds.append(seed)
        return self

    def __enter__(self) -> "ScriptedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, requests: Iterable[Request]) -> Iterator[Result]:
        for request in requests:
            if self.lives == 0:
                raise KeyboardInterrupt
            self.lives -= 1
            self.requests.append(request)
            text, finish = next(self.texts)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += [self.tokenizer.eos_token_id] if finish == "stop" else []
            yield Result(key=request.key, token_ids=ids, finish_reason=finish, seconds=0.0)


SELF = 'prompts={{"sources": [{{"source": "self", "limit": {}}}], "heldout": [{{"source": "builtin", "limit": 3}}]}}'
SCRIPT = [
    ("How do letters join into tokens?", "stop"),
    ("Write a long list of everything that", "length"),
    ("Hi!", "stop"),
    ("how do  letters JOIN into tokens? ", "stop"),
    ("Which train goes to the river?", "stop"),
]


def test_self_written_prompts_are_sifted_and_counted(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("r", SELF.format(5))
    engine = ScriptedEngine(run, SCRIPT)
    monkeypatch.setattr(prompting, "open_engine", engine.open)
    (run.path / "prompts-here").mkdir()
    monkeypatch.setattr(type(run), "folder", lambda self, name: self.path / "prompts-here")
    report = collect_prompts(run)
    rows = read_jsonl(run.path / "prompts-here" / "train.jsonl")
    assert first_texts(rows) == {"how do letters join into tokens?", "which train goes to the river?"}
    assert {(row["source"], row["domain"]) for row in rows} == {("self", "self-written")}
    assert {reason: count for reason, count in report["dropped"].items() if reason.startswith("self")} == {
        "self-written: cut at max_new_tokens": 1,
        "self-written: too short": 1,
        "self-written: repeated": 1,
    }
    settings = run.recipe.prompts.self_written
    for request in engine.requests:
        text = run.target.tokenizer.decode(request.prompt_ids)
        assert text == "<|im_start|>user\n"
        assert (request.temperature, request.top_p) == (settings.temperature, settings.top_p)
        assert request.max_new_tokens == settings.max_new_tokens


def test_killed_self_writing_goes_on_with_another_seed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("r", SELF.format(5), "run.seed=7")
    folder = run.path / "prompts-here"
    folder.mkdir()
    monkeypatch.setattr(type(run), "folder", lambda self, name: self.path / "prompts-here")
    engine = ScriptedEngine(run, SCRIPT, lives=2)
    monkeypatch.setattr(prompting, "open_engine", engine.open)
    with pytest.raises(KeyboardInterrupt):
        collect_prompts(run)
    with open(folder / "self.part.jsonl", "a") as file:
        file.write('{"key": "self-000002", "text": "torn')
    engine.lives = 1000
    report = collect_prompts(run)
    assert [request.key for request in engine.requests] == [f"self-{i:06d}" for i in range(5)]
    assert len(set(engine.seeds)) == 2
    assert report["train"] == 2
    assert len(read_jsonl(folder / "self.part.jsonl")) == 5


def test_the_real_engine_writes_for_source_self(make_run: MakeRun, tmp_path: Path) -> None:
    """The random target never ends a turn by itself in so few tokens, so all is dropped and counted."""
    settings = {
        "sources": [{"source": "self", "limit": 3}, {"source": str(questions(tmp_path, "a", 4))}],
        "heldout": [{"source": "builtin", "limit": 2}],
        "self_written": {"max_new_tokens": 4},
    }
    train, _, report = collected(make_run("r", f"prompts={json.dumps(settings)}"))
    assert report["dropped"]["self-written: cut at max_new_tokens"] == 3
    assert {row["source"] for row in train} == {str(tmp_path / "a.jsonl")}


def test_usable_texts_do_not_depend_on_case_or_spaces() -> None:
    samples = [
        SelfSample(key=str(i), text=text, finish_reason="stop")
        for i, text in enumerate(["  What is a weir?  ", "what is  a WEIR?"])
    ]
    dropped: Counter[str] = Counter()
    assert list(usable_texts(iter(samples), dropped)) == ["What is a weir?"]
    assert dropped == {"self-written: repeated": 1}


def test_a_template_that_hides_the_users_text_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    template_file = tmp_path / "t.jinja"
    template_file.write_text("{% for m in messages %}<|im_start|>{{ m['content'] | length }}<|im_end|>{% endfor %}")
    with pytest.raises(InputError, match="does not show the user's text"):
        user_turn_ids(Template.load(tiny_target, chat_template=template_file))

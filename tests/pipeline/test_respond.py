"""Respond: the target's own answers stand in the context of later turns, and nothing is asked twice."""

import datetime
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drafthead.data import template
from drafthead.data.encoding import read_rows
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, read_jsonl
from drafthead.eval.engine import Request, Result
from drafthead.pipeline import respond as responding
from drafthead.pipeline.respond import open_engine, respond, turn_contexts
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.target import TINY_TEMPLATE, open_target

MakeRun = Any
TOOL_TALK = [
    {"role": "user", "content": "How warm is it?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "warmth", "arguments": {}}}]},
    {"role": "tool", "content": "21 degrees"},
    {"role": "assistant", "content": "It is 21 degrees."},
]
TRAIN = [
    {"id": "one", "prompt": "What is a weir?"},
    {"id": "two", "turns": ["What is a lock?", "And a dam?", "Which is older?"]},
    {
        "id": "given",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Name a river."},
            {"role": "assistant", "content": "The answer of the data"},
            {"role": "user", "content": "Another one."},
            {"role": "assistant", "content": "Its second answer"},
        ],
    },
    {"id": "tool", "messages": TOOL_TALK},
]
HELDOUT = [{"id": "held", "prompt": "What is a quay?"}]
TURNS = {("one", 0), ("two", 0), ("two", 1), ("two", 2), ("given", 0), ("given", 1), ("tool", 0), ("held", 0)}


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path) -> Run:
    """A run whose prompts are there; each test gives it a folder of its own for `respond`."""
    return prepared(make_run, tmp_path)


def prepared(make_run: MakeRun, folder: Path, *overrides: str) -> Run:
    for name, rows in (("train", TRAIN), ("held", HELDOUT)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {"sources": [{"source": f"{folder}/train.jsonl"}], "heldout": [{"source": f"{folder}/held.jsonl"}]}
    made: Run = make_run("r", f"prompts={json.dumps(prompts)}", "respond.max_new_tokens=8", *overrides)
    made.run_stage("prompts")
    return made


def answers(run: Run) -> dict[tuple[str, int], dict[str, Any]]:
    rows = read_jsonl(run.folder("respond") / "answers.jsonl")
    found = {(row["id"], row["turn"]): row for row in rows}
    assert len(found) == len(rows), "an answer came twice"
    return found


class ScriptedEngine:
    """Answers with ids that only this engine would write; dies after `lives` answers."""

    def __init__(self, lives: int = 1000, finish_reason: str = "stop", ends: bool = True):
        self.lives = lives
        self.finish_reason = finish_reason
        self.ends = ends
        self.asked: list[list[int]] = []
        self.waiting: list[Request] = []

    def open(self, run: Run, seed: int) -> "ScriptedEngine":
        self.waiting = []
        return self

    def __enter__(self) -> "ScriptedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def results(self) -> Iterator[Result]:
        while self.waiting:
            if self.lives == 0:
                raise KeyboardInterrupt
            self.lives -= 1
            request = self.waiting.pop(0)
            self.asked.append(request.prompt_ids)
            ids = answer_ids(request.prompt_ids)
            ids = ids if self.ends else ids[:-1]
            yield Result(key=request.key, token_ids=ids, finish_reason=self.finish_reason, seconds=0.0)


def answer_ids(prompt_ids: list[int]) -> list[int]:
    """Letters one by one, as no tokenizer would write the word, and the end of turn."""
    return [*(10 + token % 50 for token in prompt_ids[-9:-4]), 2]


def chat(*messages: tuple[str, str]) -> str:
    """The tiny target's template, before an answer."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


# ---- real engine


@pytest.mark.slow
def test_later_turns_see_the_targets_own_answers(run: Run) -> None:
    assert run.run_stage("respond")
    found = answers(run)
    assert found.keys() == TURNS
    decode = run.target.tokenizer.decode

    def said(key: tuple[str, int]) -> str:
        ids = found[key]["completion_ids"]
        return str(decode([token for token in ids if token != 2], skip_special_tokens=False))

    users = TRAIN[1]["turns"]
    two = [("user", users[0]), ("assistant", said(("two", 0))), ("user", users[1])]
    assert decode(found["two", 1]["context_ids"]) == chat(*two)
    last = [*two, ("assistant", said(("two", 1))), ("user", users[2])]
    assert decode(found["two", 2]["context_ids"]) == chat(*last)
    given = [("system", "Be short."), ("user", "Name a river."), ("assistant", said(("given", 0)))]
    assert decode(found["given", 1]["context_ids"]) == chat(*given, ("user", "Another one."))
    talk = [(str(message["role"]), str(message["content"])) for message in TOOL_TALK[:-1]]
    assert decode(found["tool", 0]["context_ids"]) == chat(*talk)


@pytest.mark.slow
def test_finish_reasons_and_tokens_are_counted(run: Run) -> None:
    run.run_stage("respond")
    report, found = read_json(run.folder("respond") / "report.json"), answers(run)
    reasons = [row["finish_reason"] for row in found.values()]
    assert report["finish_reasons"] == {reason: reasons.count(reason) for reason in set(reasons)}
    assert report["answers"] == len(TURNS)
    assert report["tokens"] == sum(len(row["completion_ids"]) for row in found.values())
    for row in found.values():
        assert (row["finish_reason"] == "stop") == (row["completion_ids"][-1] == 2)
        assert row["finish_reason"] == "stop" or len(row["completion_ids"]) == 8


# ---- scripted engine


def use(monkeypatch: pytest.MonkeyPatch, run: Run, engine: ScriptedEngine) -> Path:
    """Let `respond` write into the run itself, so that the shared cache stays as it is."""
    folder = run.path / "answers-here"
    folder.mkdir()
    real = type(run).folder
    monkeypatch.setattr(type(run), "folder", lambda self, name: folder if name == "respond" else real(self, name))
    monkeypatch.setattr(responding, "open_engine", engine.open)
    return folder


def test_the_engines_ids_are_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, run, ScriptedEngine())
    report = respond(run)
    found = answers(run)
    assert found.keys() == TURNS
    for row in found.values():
        assert row["completion_ids"] == answer_ids(row["context_ids"])
    assert {row["split"] for (name, _), row in found.items() if name == "held"} == {"heldout"}
    assert report["finish_reasons"] == {"stop": len(TURNS)}


@pytest.mark.parametrize(("lives", "again"), [(1, 1), (6, 6), (7, 0)])
def test_a_killed_stage_goes_on_behind_its_last_whole_block(
    lives: int, again: int, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(make_run, tmp_path, "respond.max_num_seqs=1")  # blocks of four: 7 turns, then that of `held`
    engine = ScriptedEngine(lives)
    folder = use(monkeypatch, run, engine)
    with pytest.raises(KeyboardInterrupt):
        respond(run)
    part = folder / "answers.part.jsonl"
    assert len(read_jsonl(part)) == lives
    with open(part, "ab") as file:
        file.write('{"id": "two", "split": "train", "turn": 1, "completion_ids": [1, é'.encode()[:-1])
    engine.lives = 1000
    respond(run)
    assert len(engine.asked) == again + len(TURNS)
    assert len({tuple(ids) for ids in engine.asked}) == len(TURNS)
    assert not part.exists()
    resumed = (folder / "answers.jsonl").read_text()
    (folder / "answers.jsonl").unlink()
    respond(run)
    assert (folder / "answers.jsonl").read_text() == resumed, "an uninterrupted stage writes the same"


def test_answers_that_were_whole_are_not_asked_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the answers and the manifest."""
    engine = ScriptedEngine()
    folder = use(monkeypatch, run, engine)
    respond(run)
    before = (folder / "answers.jsonl").read_text()
    report = respond(run)
    assert len(engine.asked) == len(TURNS)
    assert report["answers"] == len(TURNS)
    assert (folder / "answers.jsonl").read_text() == before


def test_prompts_without_room_are_counted(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepared(make_run, tmp_path, "respond.max_model_len=40")
    engine = ScriptedEngine()
    use(monkeypatch, run, engine)
    report = respond(run)
    assert report["skipped"]["prompt longer than respond.max_model_len"] > 0
    assert max(len(ids) for ids in engine.asked) <= 38
    assert report["answers"] == len(engine.asked) == len(answers(run))


def test_no_answer_at_all_is_an_error(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepared(make_run, tmp_path, "respond.max_model_len=3")
    use(monkeypatch, run, ScriptedEngine())
    with pytest.raises(InputError, match=r"no prompt could be answered \(prompt longer than respond.max_model_len"):
        respond(run)


def test_vllm_that_is_not_installed_names_the_way_out(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(make_run, tmp_path, "respond.engine=vllm")
    monkeypatch.setattr("drafthead.eval.engine.is_available", lambda: False)
    with pytest.raises(InputError, match=r"respond\.engine=transformers"), open_engine(run, seed=0):
        pass


@pytest.mark.parametrize("word", ["stop", "tool_calls", "length"])
def test_a_cut_answer_is_known_by_its_ids_whatever_it_is_called(
    word: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, run, ScriptedEngine(finish_reason=word, ends=False))
    assert respond(run)["finish_reasons"] == {"length": len(TURNS)}


def test_last_turns_alone_of_what_the_engine_wrote(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a temperature that no other test has, for the cache is shared
    run = prepared(make_run, tmp_path, "encode.turns=last", "respond.temperature=0.3")
    monkeypatch.setattr(responding, "open_engine", ScriptedEngine().open)
    for name in ("respond", "encode"):
        run.run_stage(name)
    rows = read_rows(run.folder("encode") / "train.parquet")
    assert {(row.id, row.turn) for row in rows} == {("one", 0), ("two", 2), ("given", 1), ("tool", 0)}


# ---- the data's own answers


def test_respond_off_trains_on_the_answers_of_the_data(make_run: MakeRun, tmp_path: Path) -> None:
    held = [{"id": "held", "prompt": "What is a quay?", "response": "A place to moor."}]
    for name, rows in (("train", TRAIN), ("held", held)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {"sources": [{"source": f"{tmp_path}/train.jsonl"}], "heldout": [{"source": f"{tmp_path}/held.jsonl"}]}
    run = make_run("r", f"prompts={json.dumps(prompts)}", "respond.engine='off'")
    for name in ("prompts", "respond", "encode"):
        run.run_stage(name)
    assert not (run.folder("respond") / "answers.jsonl").exists()
    rows = read_rows(run.folder("encode") / "train.parquet")
    decode = run.target.tokenizer.decode
    supervised = {row.id: set() for row in rows}
    for row in rows:
        supervised[row.id].add(decode(row.input_ids[row.context_length :]).split("<|im_end|>")[0])
    assert supervised["given"] == {"The answer of the data", "Its second answer"}
    assert "It is 21 degrees." in supervised["tool"]
    assert "one" not in supervised


# ---- turns


def roles(turns: Iterable[list[dict[str, Any]]]) -> list[str]:
    return ["".join(message["role"][0] for message in turn) for turn in turns]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("u", ["u"]),
        ("su", ["su"]),
        ("suau", ["su", "u"]),
        ("uaua", ["u", "u"]),
        ("uu", ["u", "u"]),
        ("uata", ["uat"]),
        ("uat", ["uat"]),
        ("uatau", ["uatau"]),
        ("a", []),
    ],
)
def test_what_is_given_before_each_answer(given: str, expected: list[str]) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    assert roles(turn_contexts([{"role": names[letter], "content": "x"} for letter in given])) == expected


def test_a_run_goes_on_after_midnight(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that writes the date, as Llama 3's does: later stages render what was answered."""
    folder = shutil.copytree(open_target("builtin:tiny-random").path, tmp_path / "dated")
    dated = "{{ strftime_now('%d %b %Y') }}" + TINY_TEMPLATE
    (folder / "chat_template.jinja").write_text(dated)
    run = prepared(make_run, tmp_path, f"target={folder}")
    run.run_stage("respond")
    before = answers(run)["two", 1]["context_ids"]

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Later":
            return cls(2077, 1, 1)

    monkeypatch.setattr(template, "datetime", SimpleNamespace(datetime=Later))
    run.run_stage("encode")
    rows = {(row.id, row.turn): row for row in read_rows(run.folder("encode") / "train.parquet")}
    assert rows["two", 1].input_ids[: rows["two", 1].context_length] == before

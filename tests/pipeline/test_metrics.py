"""`drafthead metrics` on a served page and on a log, against what a run or a card says; rates since the last look."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import ClassVar

import pytest
from drafthead.data.errors import InputError
from drafthead.eval.acceptance import from_counters
from drafthead.eval.vllm_metrics import Count, DraftCounts
from drafthead.pipeline.expected_rates import read_expected
from drafthead.pipeline.metrics import Source, measure, open_source, watch

from tests.conftest import CommandLine
from tests.pipeline.loopback import QuietHandler, serving

REAL_PAGE, REAL_LOG = (Path(__file__).with_name(f"vllm_0_32_{what}.txt") for what in ("metrics", "log"))
LINE = (
    "INFO SpecDecoding metrics: Mean acceptance length: 2.65, Accepted throughput: 82.50 tokens/s, "
    "Drafted throughput: 150.00 tokens/s, Accepted: 1650 tokens, Drafted: 3000 tokens, "
    "Per-position acceptance rate: 0.750, 0.530, 0.370, Avg Draft acceptance rate: 55.0%\n"
)


def page(drafts: int, per_position: list[int]) -> str:
    labels = 'engine="0",model_name="m"'
    values = {"drafts": drafts, "draft_tokens": drafts * len(per_position), "accepted_tokens": sum(per_position)}
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts."]
    lines += [f"vllm:spec_decode_num_{name}_total{{{labels}}} {float(value)}" for name, value in values.items()]
    for position, count in enumerate(per_position):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f'{name}{{{labels},position="{position}"}} {float(count)}')
    return "\n".join(lines) + "\n"


class Pages(QuietHandler):
    text: ClassVar[str] = page(1000, [750, 530, 370])

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.text.encode() if self.path == "/metrics" else b"")


@pytest.fixture
def server() -> Iterator[str]:
    with serving(Pages) as url:
        yield url


def make_run(folder: Path, served: dict[int, list[int]], evaluated: list[int]) -> Path:
    """A run's reports: 1,000 drafts with these acceptances, by k for the served check."""
    by_k = {str(k): {"served": from_counters(1000, counts)} for k, counts in served.items()}
    reports = {"eval": from_counters(1000, evaluated), **({"serve-check": {"by_k": by_k}} if by_k else {})}
    for stage, report in reports.items():
        (folder / stage).mkdir(parents=True)
        (folder / stage / "report.json").write_text(json.dumps(report))
    return folder


def test_the_log_and_the_page_say_the_same(drafthead: CommandLine, tmp_path: Path, server: str) -> None:
    (tmp_path / "vllm.log").write_text(f"starting\n{LINE}more\n")
    of_log = drafthead("metrics", "--log", "vllm.log", "--json")
    of_page = drafthead("metrics", "--url", server, "--json")
    assert (of_log.code, of_page.code) == (0, 0)
    one, other = of_log.json(), of_page.json()
    assert (one.pop("source"), one.pop("lines")) == ("vllm.log", 1)
    assert (other.pop("source"), other.pop("lines")) == (f"{server}/metrics", None)
    assert one == other
    assert (one["k"], one["drafts"], one["mean_acceptance_length"]) == (3, 1000, 2.65)


def test_what_a_real_server_wrote_is_read(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut from a vLLM 0.32 that served Medusa heads: its page before the first request, its log under four at once."""
    monkeypatch.setattr(Pages, "text", REAL_PAGE.read_text())
    of_page = measure(open_source(server, None), None, 0.05)
    assert (of_page["k"], of_page["drafts"], of_page["per_position"]) == (3, 0, [None, None, None])
    of_log = measure(open_source(None, REAL_LOG), None, 0.05)
    text = REAL_LOG.read_text()
    drafted, accepted = (sum(map(int, re.findall(rf"{word}: (\d+) tokens", text))) for word in ("Drafted", "Accepted"))
    assert (of_log["lines"], of_log["k"], of_log["drafts"]) == (3, 3, drafted // 3)
    assert (of_log["draft_tokens"], of_log["accepted_tokens"], of_log["exact"]) == (drafted, accepted, True)
    assert sum(of_log["per_position"]) * of_log["drafts"] == pytest.approx(accepted)


def test_drift_is_exit_1_and_says_where(drafthead: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(LINE * 3)
    make_run(tmp_path / "same", {3: [750, 530, 370]}, [1, 1, 1])
    make_run(tmp_path / "fell", {3: [750, 530, 560]}, [1, 1, 1])
    assert drafthead("metrics", "--log", "vllm.log", "--expect", "same").code == 0
    done = drafthead("metrics", "--log", "vllm.log", "--expect", "fell", "--json")
    assert done.code == 1
    report = done.json()
    assert not report["ok"]
    assert [one["verdict"] == "drift" for one in report["drift"]["positions"]] == [False, False, True]
    shown = drafthead("metrics", "--log", "vllm.log", "--expect", "fell").stdout.splitlines()[-1]
    assert shown.startswith("  position 3: expected 0.560, found 0.370, -0.190 (between")
    assert shown.endswith(": drift")
    # what is allowed to differ is no drift
    assert drafthead("metrics", "--log", "vllm.log", "--expect", "fell", "--tolerance", "0.2").code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--log", "none.log"), "none.log: No such file"),
        (("--log", "empty.log"), "empty.log: no whole line with 'SpecDecoding metrics:'"),
        (("--url", "http://127.0.0.1:9"), "http://127.0.0.1:9/metrics: no answer"),
        (("--url", "host:8000"), "give an address like http://localhost:8000/metrics"),
        (("--log", "vllm.log", "--expect", "nowhere"), "--expect nowhere: neither a run"),
    ],
    ids=["no file", "no line", "no server", "no address", "no run"],
)
def test_bad_input_is_one_line(drafthead: CommandLine, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    (tmp_path / "empty.log").write_text("INFO nothing here\n")
    (tmp_path / "vllm.log").write_text(LINE)
    done = drafthead("metrics", *options, "--json")
    assert (done.code, done.stdout) == (2, "")
    (complaint,) = done.complaints
    assert said in complaint


def test_a_wrong_page_is_named_with_its_code(server: str) -> None:
    with pytest.raises(InputError, match="answers 404"):
        open_source(f"{server}/metric", None).read()


def test_nothing_drafted_is_no_drift_test(tmp_path: Path) -> None:
    counts = DraftCounts(drafts=Count.exact(0), per_position=(Count.exact(0),), draft_tokens=0, accepted_tokens=0)
    source = Source(name="url", read=lambda: (counts, None))
    assert measure(source, None, 0.05)["drafts"] == 0
    with pytest.raises(InputError, match="nothing was drafted yet"):
        measure(source, tmp_path, 0.05)


# ---- what was measured before ----------------------------------------------------------------------------


def test_served_rates_are_preferred_and_are_those_of_the_same_k(tmp_path: Path) -> None:
    run = make_run(tmp_path, {3: [700, 500, 300], 5: [690, 490, 290, 190, 90]}, [600, 400, 200])
    assert read_expected(run, 3).per_position == [0.7, 0.5, 0.3]
    assert read_expected(run, 5).per_position[4] == 0.09
    with pytest.raises(InputError, match=r"measured with k=3, 5, the server drafts 4 tokens"):
        read_expected(run, 4)


def test_without_a_served_check_the_evaluation_counts(tmp_path: Path) -> None:
    expected = read_expected(make_run(tmp_path, {}, [600, 400, 200]), 3)
    assert (expected.drafts, expected.per_position) == (1000, [0.6, 0.4, 0.2])


def test_the_rounds_of_an_evaluation_say_how_exact_its_rates_are(tmp_path: Path) -> None:
    """For the served check as well, whose rounds are of such answers too; an answer without rounds has no say."""
    run = make_run(tmp_path, {2: [700, 500]}, [600, 400])
    assert (read_expected(run, 2).answers, read_expected(run, 2).effect(0)) == (None, 1.0)
    rounds = [[1] * 8 + [0] * 2, [1] * 2 + [0] * 8, []]
    lines = [json.dumps({"domain": "code", "k": 2, "accepted": accepted}) for accepted in rounds]
    (run / "eval" / "rounds.jsonl").write_text("\n".join(lines))
    found = read_expected(run, 2)
    assert (found.answers, found.design_effects) == (2, [pytest.approx(7.2), 1.0])
    (run / "eval" / "rounds.jsonl").write_text(lines[0])
    assert read_expected(run, 2).answers is None


@pytest.mark.parametrize("text", ["[]", '{"by_k": {"3": {}}}', '{"by_k": []}', "{"])
def test_reports_that_are_none_are_named(tmp_path: Path, text: str) -> None:
    make_run(tmp_path, {3: [700, 500, 300]}, [600, 400, 200])
    (tmp_path / "serve-check" / "report.json").write_text(text)
    with pytest.raises(InputError, match=str(tmp_path)):
        read_expected(tmp_path, 3)


# ---- watching --------------------------------------------------------------------------------------------


def counts_after(*accepted: int) -> DraftCounts:
    per_position = tuple(Count.exact(sum(one > place for one in accepted)) for place in range(2))
    return DraftCounts(
        drafts=Count.exact(len(accepted)),
        per_position=per_position,
        draft_tokens=2 * len(accepted),
        accepted_tokens=sum(accepted),
    )


def test_each_look_shows_what_came_since_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[DraftCounts | InputError] = [
        counts_after(2, 2, 2),
        counts_after(2, 2, 2, 0),
        InputError("no answer"),
        counts_after(2, 2, 2, 0, 1, 2),
        counts_after(1),  # the server began anew
    ]

    def read() -> tuple[DraftCounts, None]:
        answer = answers.pop(0)
        if isinstance(answer, InputError):
            raise answer
        return answer, None

    looks = list(islice(watch(Source(name="url", read=read), 0.001), 3))
    assert [look["drafts"] for look in looks] == [1, 2, 1]
    assert [look["per_position"] for look in looks] == [[0.0, 0.0], [1.0, 0.5], [1.0, 0.0]]
    assert looks[1]["accepted_tokens_per_s"] == pytest.approx(3 / looks[1]["seconds"])
    assert capsys.readouterr().err == "WARNING: no answer\n"


def test_a_watch_that_cannot_begin_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("")
    with pytest.raises(InputError, match="no whole line"):
        next(watch(open_source(None, tmp_path / "x.log"), 0.001))

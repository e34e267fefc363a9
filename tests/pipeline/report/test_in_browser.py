"""The page in a real browser, on a phone and on a desk: it renders, asks nobody, and shows the files' numbers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from drafthead.pipeline.advise import AdviceOptions, advise
from drafthead.pipeline.run_dir import open_run
from drafthead.pipeline.stages import STAGES

from tests.pipeline.report.chromium import Tab, find_browser, open_tab
from tests.pipeline.report.shown import faults

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
PHONE, DESK = 390, 1200
NUMBERS = """[...document.querySelectorAll(".n")].map((one) => ({
    ...one.dataset, text: one.innerText, title: one.title, width: one.getBoundingClientRect().width }))"""
UNMARKED = """(() => {
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) {
        const node = walker.currentNode, told = ".n, svg, pre, code, .bad, caption, #made, #definitions";
        if (/\\d\\.\\d/.test(node.data) && !node.parentElement.closest(told)) found.push(node.data);
    }
    return found;
})()"""


MISPLACED = """[...document.querySelectorAll("td .n, tbody th .n")].filter((one) => {
    const cell = one.closest("td, th"), row = cell.parentElement, heads = one.closest("table").tHead.rows[0].cells;
    const terms = [cell, row.cells[0], heads[cell.cellIndex]].flatMap((place) => [...place.querySelectorAll(".term")]);
    return !terms.some((term) => term.dataset.term === one.dataset.term);
}).map((one) => `${one.dataset.term}: ${one.dataset.path}`)"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert BROWSER is not None
    with open_tab(BROWSER, tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


def address(run: Path) -> str:
    return (run / "report.html").resolve().as_uri()


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("run_name", ["finished_run", "hostile_run"])
def test_every_shown_number_is_that_of_its_file(
    run_name: str, width: int, tab: Tab, request: pytest.FixtureRequest
) -> None:
    run: Path = request.getfixturevalue(run_name)
    tab.open(address(run), width=width)
    numbers = tab.evaluate(NUMBERS)
    assert len(numbers) > 150
    assert all(number["width"] > 0 for number in numbers), "a number is not shown"
    plan = advise(AdviceOptions(), open_run(run, STAGES, []))
    assert faults(run, numbers, plan) == []
    assert tab.evaluate(UNMARKED) == [], "numbers without an address"
    assert tab.complaints == []
    assert tab.requests == [address(run)], "the page asked for something"
    assert tab.evaluate("window.attacked") is None


@pytest.mark.parametrize("run_name", ["finished_run", "hostile_run"])
def test_a_number_in_a_table_stands_under_or_beside_its_term(
    run_name: str, tab: Tab, request: pytest.FixtureRequest
) -> None:
    tab.open(address(request.getfixturevalue(run_name)), width=DESK)
    assert tab.evaluate(MISPLACED) == []


@pytest.mark.parametrize("run_name", ["finished_run", "hostile_run"])
@pytest.mark.parametrize("width", [320, PHONE, 768, DESK])
def test_the_page_is_no_wider_than_the_screen(
    run_name: str, width: int, tab: Tab, request: pytest.FixtureRequest
) -> None:
    tab.open(address(request.getfixturevalue(run_name)), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("window.innerWidth") == width, "a phone zoomed out to fit the page"


def test_light_and_dark_differ_and_can_be_read(tab: Tab, finished_run: Path) -> None:
    seen = []
    for dark in (False, True):
        tab.open(address(finished_run), width=PHONE, dark=dark)
        style = "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
        seen.append(
            [sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) for colour in tab.evaluate(style)]
        )
    (ink, paper), (light_ink, dark_paper) = seen
    assert paper - ink > 450
    assert light_ink - dark_paper > 450


def test_a_tapped_number_shows_its_definition(tab: Tab, finished_run: Path) -> None:
    tab.open(address(finished_run), width=PHONE)
    assert tab.evaluate("document.getElementById('panel').hidden")
    tab.tap(".headline .n")
    assert not tab.evaluate("document.getElementById('panel').hidden")
    shown = tab.evaluate("document.getElementById('panel').innerText")
    report = json.loads((finished_run / "serve-check" / "report.json").read_text())
    assert "mean_acceptance_length" in shown
    assert "pooled over all requests" in shown
    assert (
        f"{report['served']['mean_acceptance_length']!r} = serve-check/report.json#/served/mean_acceptance_length"
        in shown
    )
    tab.press("Escape")
    assert tab.evaluate("document.getElementById('panel').hidden")


def test_the_keyboard_reaches_every_number(tab: Tab, finished_run: Path) -> None:
    tab.open(address(finished_run), width=DESK)
    groups = "[...document.querySelectorAll('table, dl, p, figcaption')].filter((one) => one.querySelector('.n'))"
    unreachable = f'{groups}.filter((one) => !one.querySelector(\'.n[tabindex="0"], .n[tabindex="-1"]\')).length'
    assert tab.evaluate(unreachable) == 0
    assert tab.evaluate("document.querySelectorAll('.n:not([tabindex])').length") == 0
    for _ in range(10):
        tab.press("Tab")
        if tab.evaluate("document.activeElement.matches('.n')"):
            break
    first = tab.evaluate("document.activeElement.title")
    assert first
    assert first in tab.evaluate("document.getElementById('panel').innerText")
    before = tab.evaluate("document.activeElement.dataset.path")
    tab.press("ArrowRight")
    assert tab.evaluate("document.activeElement.matches('.n')")
    assert tab.evaluate("document.activeElement.dataset.path") != before
    assert tab.evaluate("document.activeElement.title") in tab.evaluate("document.getElementById('panel').innerText")

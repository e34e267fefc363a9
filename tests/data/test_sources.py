"""Where prompts come from, how sources are mixed, and the held-out split."""

import json
from collections import Counter

import datasets
import pytest
from drafthead.data import sources
from drafthead.data.conversations import Conversation
from drafthead.data.errors import InputError
from drafthead.data.sources import mix, read_source, share_out, shortfalls, split_heldout


def make(source, count, prefix=""):
    return [
        Conversation(
            id=f"{prefix}{source}-{i}",
            source=source,
            domain="all",
            messages=[{"role": "user", "content": f"{source} {i}"}],
            tools=None,
        )
        for i in range(count)
    ]


def ids(conversations):
    return [conversation.id for conversation in conversations]


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PROMPTS", tmp_path)
    for half in ("train", "heldout"):
        for name in ("code", "math", "self_written"):
            path = tmp_path / half / f"{name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"id": f"{half}-{name}", "domain": name, "turns": ["x"]}) + "\n")


@pytest.mark.usefixtures("prompts")
def test_builtin_is_every_file_but_the_self_written():
    conversations, dropped = read_source("builtin", heldout=False, split="train")
    assert (ids(conversations), dropped) == (["train-code", "train-math"], [])
    assert [one.domain for one in conversations] == ["code", "math"]
    assert ids(read_source("builtin", heldout=True, split="train")[0]) == ["heldout-code", "heldout-math"]
    self_written, _ = read_source("builtin:self-written", heldout=True, split="train")
    assert ids(self_written) == ["heldout-self_written"]
    assert self_written[0].source == "builtin:self-written"


def test_the_shipped_prompts_are_usable_and_do_not_leak():
    train, dropped_train = read_source("builtin", heldout=False, split="train")
    heldout, dropped_heldout = read_source("builtin", heldout=True, split="train")
    assert (dropped_train, dropped_heldout) == ([], [])
    texts = {one.messages[0]["content"] for one in train}
    assert not texts & {one.messages[0]["content"] for one in heldout}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("builtin:poems", "no such built-in source"),
        ("/no/such/rows", "no such file"),
        ("./rows", "no such file"),
        ("rows.jsonl", "no such file"),
        ("rows.json", "no such file"),
    ],
)
def test_sources_that_do_not_exist(source, problem):
    with pytest.raises(InputError, match=problem):
        read_source(source, heldout=False, split="train")


def test_a_file_is_read(tmp_path):
    path = tmp_path / "rows"
    path.write_text('{"prompt": "a"}\n')
    conversations, _ = read_source(str(path), heldout=False, split="train")
    assert conversations[0].source == str(path)


def test_a_hub_data_set_is_read(monkeypatch):
    rows = [
        {"messages": [{"role": "user", "content": "a", "tool_calls": None}], "tools": None},
        {"messages": [], "tools": None},
        {"prompt": "b", "messages": None},
    ]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows if split == "test" else [])
    conversations, dropped = read_source("org/name", heldout=False, split="test")
    assert [one.messages[0]["content"] for one in conversations] == ["a", "b"]
    assert [(one.source, one.reason) for one in dropped] == [(1, "no messages")]
    with pytest.raises(InputError, match="org/name: no samples remain"):
        read_source("org/name", heldout=False, split="train")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no network\nsecond line"),
        ValueError('Unknown split "tran"'),
        datasets.exceptions.DatasetNotFoundError("no such data set"),
    ],
)
def test_a_hub_failure_is_one_line(monkeypatch, error):
    def fail(name, split):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match="org/name: neither a file nor") as raised:
        read_source("org/name", heldout=False, split="tran")
    assert "\n" not in str(raised.value)
    assert str(error).splitlines()[0] in str(raised.value)


# ---- mixing ----------------------------------------------------------------------------------------------


def test_shares_of_the_total_are_met():
    mixture = mix([(make("a", 500), None, 0.7), (make("b", 500), None, 0.3)], 100, seed=0)
    assert Counter(one.source for one in mixture.conversations) == {"a": 70, "b": 30}
    assert (mixture.requested, mixture.taken) == ([70, 30], [70, 30])


def test_a_short_source_gives_what_it_has_and_is_reported():
    mixture = mix([(make("a", 10), None, 0.5), (make("b", 500), None, 0.5)], 100, seed=0)
    assert (mixture.requested, mixture.taken) == ([50, 50], [10, 50])
    (line,) = shortfalls(["a.jsonl", "b.jsonl"], mixture)
    assert line.startswith("a.jsonl gave 10 of the 50 ")


@pytest.mark.parametrize("total", [1, 2, 3, 7, 10, 99, 1000])
@pytest.mark.parametrize("shares", [[0.5, 0.5], [1 / 3] * 3, [0.7, 0.3], [0.1] * 10, [0.25, None, 0.25], [0.29, 0.71]])
def test_shares_are_whole_numbers_that_add_up(shares, total):
    numbers = share_out(shares, total)
    given = [number for number in numbers if number is not None]
    assert sum(given) == round(total * sum(share or 0 for share in shares))
    for share, number in zip(shares, numbers, strict=True):
        assert (share is None) is (number is None)
        assert share is None or abs(number - share * total) < 1


def test_the_mixture_never_exceeds_its_total():
    mixture = mix([(make("a", 9), None, 0.5), (make("b", 9), None, 0.5), (make("c", 9), None, None)], 3, seed=0)
    assert len(mixture.conversations) == 3


def test_sources_without_a_share_divide_the_rest():
    parts = [(make("a", 100), None, 0.2), (make("b", 300), None, None), (make("c", 100), None, None)]
    mixture = mix(parts, 100, seed=0)
    assert mixture.requested == [20, None, None]
    assert mixture.taken[0] == 20
    assert sum(mixture.taken) == len(mixture.conversations) == 100
    assert mixture.taken[1] > mixture.taken[2] > 0


def test_everything_is_taken_without_a_total():
    mixture = mix([(make("a", 5), None, None), (make("b", 9), 4, None)], None, seed=0)
    assert mixture.taken == [5, 4]


def test_the_order_is_shuffled_and_follows_from_the_seed():
    def order(seed):
        return ids(mix([(make("a", 50), None, None), (make("b", 50), None, None)], None, seed).conversations)

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert {name[0] for name in order(1)[:20]} == {"a", "b"}


def test_duplicates_are_removed_and_ids_made_distinct():
    twin = make("a", 3)
    same_ids = [
        Conversation(id="a-0", source="c", domain="all", messages=[{"role": "user", "content": "new"}], tools=None)
    ]
    mixture = mix([(make("a", 3), None, None), (twin, None, None), (same_ids, None, None)], None, seed=0)
    assert (mixture.taken, mixture.duplicates) == ([3, 0, 1], 3)
    assert len(set(ids(mixture.conversations))) == 4


def test_impossible_shares_are_refused():
    with pytest.raises(InputError, match=r"prompts\.limit"):
        mix([(make("a", 5), None, 0.5)], None, seed=0)
    with pytest.raises(InputError, match=r"add up to 1\.2"):
        mix([(make("a", 5), None, 0.6), (make("b", 5), None, 0.6)], 10, seed=0)


# ---- held-out split --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.2, 1 / 3, 0.5, 0.9999])
@pytest.mark.parametrize("count", [2, 3, 97, 501, 12501])
def test_the_split_is_disjoint_and_complete(share, count):
    conversations = make("a", count)
    train, heldout = split_heldout(conversations, share, seed=0)
    assert train
    assert heldout
    assert sorted(ids(train) + ids(heldout)) == sorted(ids(conversations))
    assert abs(len(heldout) - share * count) <= 1


def test_equal_first_texts_stay_on_one_side():
    conversations = make("a", 40) + make("a", 40, "again-") + make("a", 40, "once-more-")
    train, heldout = split_heldout(conversations, 0.25, seed=0)
    texts = [{one.messages[0]["content"] for one in side} for side in (train, heldout)]
    assert not texts[0] & texts[1]
    assert len(heldout) == 30


def test_a_text_that_many_begin_with_does_not_carry_the_data_away():
    greeting = [
        Conversation(id=f"g{i}", source="g", domain="all", messages=[{"role": "user", "content": "Hi "}], tools=None)
        for i in range(300)
    ]
    for seed in range(20):
        train, heldout = split_heldout([*greeting, *make("a", 30)], 0.02, seed)
        assert 1 <= len(heldout) <= 7
        assert len(train) + len(heldout) == 330
    assert len(split_heldout([*greeting, *make("a", 1)], 0.9, seed=0)[1]) == 1


def test_texts_that_differ_in_case_and_spaces_stay_on_one_side():
    conversations = make("a", 30) + [
        Conversation(
            id=f"u{i}", source="u", domain="all", messages=[{"role": "user", "content": f" A  {i}"}], tools=None
        )
        for i in range(30)
    ]
    train, heldout = split_heldout(conversations, 0.5, seed=0)
    texts = [{" ".join(one.messages[0]["content"].lower().split()) for one in side} for side in (train, heldout)]
    assert not texts[0] & texts[1]


def test_the_split_depends_on_content_and_seed_not_on_order():
    conversations = make("a", 100)
    heldout = split_heldout(conversations, 0.1, seed=0)[1]
    assert set(ids(split_heldout(conversations[::-1], 0.1, seed=0)[1])) == set(ids(heldout))
    assert set(ids(split_heldout(conversations, 0.1, seed=1)[1])) != set(ids(heldout))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5])
def test_shares_outside_of_0_and_1_are_refused(share):
    with pytest.raises(InputError, match=r"prompts\.heldout="):
        split_heldout(make("a", 5), share, seed=0)

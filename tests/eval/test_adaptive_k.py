"""k chosen round by round comes to the best k that is known afterwards."""

import random

import pytest
from drafthead.data.errors import InputError
from drafthead.eval.adaptive_k import RunningRates, rates_of, replay_adaptive, replay_static
from drafthead.eval.economics import LinearCost

K = 5


def recorded(conditional: tuple[float, ...], rounds: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    kept = []
    for _ in range(rounds):
        count = 0
        while count < len(conditional) and chance.random() < conditional[count]:
            count += 1
        kept.append(count)
    return kept


@pytest.mark.parametrize(
    ("conditional", "cost", "best"),
    [
        ((0.9, 0.85, 0.8, 0.8, 0.8), LinearCost(draft=0.05, row=0.02), 5),
        ((0.8, 0.7, 0.2, 0.1, 0.1), LinearCost(draft=0.1, row=0.05), 2),
        ((0.8, 0.3, 0.3, 0.3, 0.3), LinearCost(draft=0.1, row=0.35), 1),
        ((0.3, 0.2, 0.2, 0.2, 0.2), LinearCost(draft=0.1, row=0.35), 0),
    ],
    ids=["deep", "falling", "dear rows", "off"],
)
def test_it_settles_on_the_static_optimum(conditional: tuple[float, ...], cost: LinearCost, best: int) -> None:
    kept = recorded(conditional, 6000)
    adaptive, static = replay_adaptive(kept, cost, K), replay_static(kept, cost, K)
    assert static.ks[0] == best
    assert adaptive.settled_k == best
    second_half = adaptive.ks[3000:]
    assert second_half.count(best) > 0.9 * len(second_half)
    assert 0.96 * static.speedup < adaptive.speedup <= static.speedup, "it pays for its probes, and no more"


def test_it_follows_texts_that_change() -> None:
    cost = LinearCost(draft=0.1, row=0.1)
    kept = recorded((0.9,) * K, 3000) + recorded((0.2,) * K, 3000)
    adaptive = replay_adaptive(kept, cost, K)
    assert adaptive.ks[:3000].count(5) > 2700
    assert adaptive.settled_k <= 1
    assert adaptive.speedup > replay_static(kept, cost, K).speedup, "no one k suits both halves"


def test_it_begins_deep_and_sees_what_lies_behind_the_present_k() -> None:
    running = RunningRates(max_k=3, memory=100)
    assert running.rates().conditional == (1.0, 1.0, 1.0)
    running.add(kept=1, k=3)
    assert running.rates().conditional == (1.0, 0.0, 0.0)
    running.add(kept=1, k=1)  # judges position 1 alone
    assert running.judged[1:] == [1.0, 0.0]
    kept = recorded((0.05,) * K, 500) + recorded((0.95,) * K, 1500)
    assert replay_adaptive(kept, LinearCost(draft=0.1, row=0.1), K, memory=50, probe_every=10).settled_k == K


def test_rates_of_recorded_rounds() -> None:
    """Of eight rounds five keep one or more, three two or more, two three."""
    assert rates_of([3, 0, 1, 3, 2, 0, 1, 0], 3).conditional == pytest.approx((5 / 8, 3 / 5, 2 / 3))
    assert rates_of([0, 0], 3).conditional == (0.0,)


def test_static_replay_by_hand() -> None:
    """Kept 2, 0, 1 of 2: k=1 gives 5 tokens for 3.3, k=2 6 for 3.6."""
    static = replay_static([2, 0, 1], LinearCost(draft=0.1, row=0), 2)
    assert (static.ks, static.speedup) == ([2, 2, 2], pytest.approx(6 / 3.6))


@pytest.mark.parametrize(("kept", "said"), [([], "no rounds"), ([1, 4], "round 1 keeps 4"), ([-1], "round 0 keeps -1")])
def test_other_rounds_are_refused(kept: list[int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        replay_adaptive(kept, LinearCost(draft=0, row=0), 3)

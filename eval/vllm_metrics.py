"""What a running vLLM says about its drafts: the `SpecDecoding metrics` lines of its log, or its Prometheus counters.

The counters are exact. A log line (vllm/v1/spec_decode/metrics.py, `SpecDecodingLogging.log`) is one window of some
seconds. It has the accepted and the drafted tokens as whole numbers; the mean acceptance length is rounded to 0.01, the
rate of each position to 0.001, and the number of drafts is not there. `decode_line` gives every number of drafts, and
of acceptances at each position, that can have made the line: with fewer than 1,000 drafts it is mostly one.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from drafthead.data.errors import InputError
from drafthead.eval.acceptance import from_counters
from drafthead.eval.engine import PREFIX

MARK = "SpecDecoding metrics:"
DIFFUSION_MARK = "DiffusionDecoding metrics:"
LINE = re.compile(
    MARK + r".*Mean acceptance length: (?P<length>\d+\.\d\d),"
    r".*Accepted: (?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens,"
    r" Per-position acceptance rate: (?P<rates>\d\.\d{3}(?:, \d\.\d{3})*), Avg Draft acceptance rate: [\d.na]+%"
)
SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True)
class Count:
    """A count, and the least and the most that it can be; all equal where it is known exactly."""

    value: int
    low: int
    high: int

    @classmethod
    def exact(cls, value: int) -> "Count":
        return cls(value=value, low=value, high=value)

    def __add__(self, other: "Count") -> "Count":
        return Count(value=self.value + other.value, low=self.low + other.low, high=self.high + other.high)

    def __sub__(self, other: "Count") -> "Count":
        return Count(value=self.value - other.value, low=self.low - other.low, high=self.high - other.high)


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """What was drafted and accepted; log lines and Prometheus counters alike."""

    drafts: Count
    per_position: tuple[Count, ...]
    """Drafts whose first i + 1 tokens were all accepted, for each of the k positions."""
    draft_tokens: int
    accepted_tokens: int

    @property
    def k(self) -> int:
        return len(self.per_position)

    @property
    def is_exact(self) -> bool:
        return all(count.low == count.high for count in (self.drafts, *self.per_position))

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return self._combined(other, Count.__add__, 1)

    def since(self, earlier: "DraftCounts") -> "DraftCounts":
        """What came after `earlier`; everything, if the server or its log began anew since."""
        if earlier.k != self.k or earlier.draft_tokens > self.draft_tokens:
            return self
        return self._combined(earlier, Count.__sub__, -1)

    def _combined(self, other: "DraftCounts", combine: Callable[[Count, Count], Count], sign: int) -> "DraftCounts":
        pairs = zip(self.per_position, other.per_position, strict=True)
        return DraftCounts(
            drafts=combine(self.drafts, other.drafts),
            per_position=tuple(combine(one, another) for one, another in pairs),
            draft_tokens=self.draft_tokens + sign * other.draft_tokens,
            accepted_tokens=self.accepted_tokens + sign * other.accepted_tokens,
        )


def summarize_counts(counts: DraftCounts) -> dict[str, Any]:
    """The numbers of `drafthead metrics --json`: those of `acceptance.from_counters`, and how well they are known.

    Returns:
        Beside `from_counters`' keys: `draft_tokens` and `accepted_tokens`; `mean_draft_length`, below k where vLLM
        drafted less; `exact`; `intervals` of `drafts`, `per_position` and `mean_acceptance_length`, [low, high] each.
    """
    drafts = counts.drafts
    accepted = [count.value for count in counts.per_position]
    summary = from_counters(drafts.value, accepted, num_draft_tokens=counts.draft_tokens)
    return {
        **summary,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "mean_draft_length": counts.draft_tokens / drafts.value if drafts.value else None,
        "exact": counts.is_exact,
        "intervals": {
            "drafts": [drafts.low, drafts.high],
            "per_position": [rate_interval(count, drafts) for count in counts.per_position],
            "mean_acceptance_length": [
                1 + counts.accepted_tokens / drafts.high,
                1 + counts.accepted_tokens / drafts.low,
            ]
            if drafts.low
            else None,
        },
    }


def rate_interval(count: Count, drafts: Count) -> list[float] | None:
    """The least and the largest share that the counts allow; None without drafts."""
    return [count.low / drafts.high, min(count.high / drafts.low, 1.0)] if drafts.low else None


# ---- the log ---------------------------------------------------------------------------------------------


def read_log(lines: Iterable[str], name: str) -> tuple[DraftCounts, int]:
    """Pool the windows of a log by their counts.

    Returns:
        The counts, and how many lines they are from. A line that breaks off is left out.

    Raises:
        InputError: No such line, lines of different k, or one whose numbers contradict each other.
    """
    total, found, diffusion = None, 0, False
    for number, line in enumerate(lines, start=1):
        diffusion = diffusion or DIFFUSION_MARK in line
        match = LINE.search(line) if MARK in line else None
        if match is None:
            continue
        counts = decode_line(match, f"{name}:{number}")
        if total is not None and counts.k != total.k:
            message = f"drafts of {counts.k} tokens, lines before it have {total.k}; give the log of one server start"
            raise InputError(f"{name}:{number}: {message}")
        total, found = counts if total is None else total + counts, found + 1
    if total is None:
        raise InputError(f"{name}: {_why_nothing(diffusion)}")
    return total, found


def _why_nothing(diffusion: bool) -> str:
    if diffusion:
        return f"a diffusion model's log ({DIFFUSION_MARK!r}): its steps have no draft positions"
    return (
        f"no whole line with {MARK!r}; vLLM writes one every ten seconds while it drafts, unless it was started "
        "with --disable-log-stats or without --speculative-config"
    )


def decode_line(match: "re.Match[str]", where: str) -> DraftCounts:
    """Find the counts behind a line of the log.

    With R the rates in thousandths, A accepted, D drafted tokens and N drafts: N >= D / k, N <= D (a draft has a token
    or more), |100 A / N - 100 (length - 1)| <= 1/2, and whole numbers c with |1000 c - R N| <= N / 2 at each position
    that do not rise and sum to A. Where N = D / k fulfils all of it, no draft was short and that is the value.

    Raises:
        InputError: No number of drafts fits.
    """
    rates = [int(rate.replace(".", "")) for rate in match["rates"].split(", ")]
    accepted, drafted = int(match["accepted"]), int(match["drafted"])
    low, high = _range_of_drafts(rates, accepted, drafted, int(match["length"].replace(".", "")) - 100)
    fitting = (drafts for drafts in range(low, high + 1) if _bounds(rates, drafts, accepted))
    lowest = next(fitting, None)
    if lowest is None:
        raise InputError(f"{where}: its rates, {accepted} accepted and {drafted} drafted tokens contradict each other")
    highest = next(drafts for drafts in range(high, low - 1, -1) if _bounds(rates, drafts, accepted))
    drafts = lowest
    if lowest * len(rates) != drafted:  # short drafts: as good as any, the middle
        drafts = next(one for one in range((lowest + highest) // 2, highest + 1) if _bounds(rates, one, accepted))
    return DraftCounts(
        drafts=Count(value=drafts, low=lowest, high=highest),
        per_position=_counts(rates, accepted, drafts, lowest, highest),
        draft_tokens=drafted,
        accepted_tokens=accepted,
    )


def _range_of_drafts(rates: Sequence[int], accepted: int, drafted: int, length: int) -> tuple[int, int]:
    """The numbers of drafts that the line's sums allow; `length` in hundredths, without the target's own token."""
    k, total = len(rates), sum(rates)
    low = max(1, -(-drafted // k), -(-200 * accepted // (2 * length + 1)), -(-2000 * accepted // (2 * total + k)))
    high = max(1, drafted)
    if length > 0:
        high = min(high, 200 * accepted // (2 * length - 1))
    if 2 * total > k:
        high = min(high, 2000 * accepted // (2 * total - k))
    return low, high


def _bounds(rates: Sequence[int], drafts: int, accepted: int) -> list[tuple[int, int]] | None:
    """Least and most acceptances at each position for a number of drafts; None where the sum cannot be `accepted`."""
    lows = [max(0, -(-(2 * rate - 1) * drafts // 2000)) for rate in rates]
    highs = [min(drafts, (2 * rate + 1) * drafts // 2000) for rate in rates]
    for position in range(1, len(rates)):
        highs[position] = min(highs[position], highs[position - 1])
        lows[-position - 1] = max(lows[-position - 1], lows[-position])
    if any(low > high for low, high in zip(lows, highs, strict=True)):
        return None
    if not sum(lows) <= accepted <= sum(highs):
        return None
    spare_low, spare_high = accepted - sum(lows), sum(highs) - accepted
    return [(max(low, high - spare_high), min(high, low + spare_low)) for low, high in zip(lows, highs, strict=True)]


def _counts(rates: Sequence[int], accepted: int, drafts: int, lowest: int, highest: int) -> tuple[Count, ...]:
    """The acceptances nearest to the rates that sum to `accepted`, and what they can be over all numbers of drafts."""
    bounds = _bounds(rates, drafts, accepted)
    assert bounds is not None
    values = [low for low, _ in bounds]
    for _ in range(accepted - sum(values)):
        open_ = [place for place, (_, high) in enumerate(bounds) if values[place] < high]
        # positions of one rate rise in turn, so that none overtakes an earlier one
        values[max(open_, key=lambda place: rates[place] * drafts - 1000 * values[place])] += 1
    if lowest == highest:
        ends = bounds
    else:
        ends = [
            (max(0, -(-(2 * rate - 1) * lowest // 2000)), min(highest, (2 * rate + 1) * highest // 2000))
            for rate in rates
        ]
    return tuple(Count(value=value, low=low, high=high) for value, (low, high) in zip(values, ends, strict=True))


# ---- Prometheus ------------------------------------------------------------------------------------------


def read_prometheus(text: str, name: str) -> DraftCounts:
    """Read the counters of a server's `/metrics`, summed over its engines.

    Raises:
        InputError: They are not there, or are those of several models.
    """
    sums = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
    per_position: dict[int, int] = {}
    models, seen = set(), set()
    for sample in map(SAMPLE.match, text.splitlines()):
        if sample is None or not sample["name"].startswith(PREFIX) or not sample["name"].endswith("_total"):
            continue
        what = sample["name"].removeprefix(PREFIX).removesuffix("_total")
        labels, value = dict(LABEL.findall(sample["labels"] or "")), _whole(sample["value"], sample["name"], name)
        models.add(labels.get("model_name"))
        seen.add(what)
        if what == "accepted_tokens_per_pos" and labels.get("position", "").isdigit():
            position = int(labels["position"])
            per_position[position] = per_position.get(position, 0) + value
        elif what in sums:
            sums[what] += value
    if not {*sums, "accepted_tokens_per_pos"} <= seen or sorted(per_position) != list(range(len(per_position))):
        raise InputError(
            f"{name}: no {PREFIX}drafts_total and its like there; is it the /metrics of a vLLM that was started with "
            "--speculative-config and without --disable-log-stats?"
        )
    if len(models) > 1:
        listed = ", ".join(sorted(map(str, models)))
        raise InputError(f"{name}: counters of several models ({listed}); give one server's own /metrics")
    return DraftCounts(
        drafts=Count.exact(sums["drafts"]),
        per_position=tuple(Count.exact(per_position[position]) for position in range(len(per_position))),
        draft_tokens=sums["draft_tokens"],
        accepted_tokens=sums["accepted_tokens"],
    )


def _whole(text: str, metric: str, name: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InputError(f"{name}: {metric} is {text!r}, no count")
    return round(value)

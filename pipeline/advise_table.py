"""`drafthead plan` as text."""

import json
from typing import Any


def render_advice(advice: dict[str, Any]) -> str:
    lines = [
        f"rates  {' '.join(f'{rate:.3f}' for rate in advice['conditional'])} conditional, by {advice['rates_from']}",
        f"costs  {describe_costs(advice)}, by {advice['costs_from']}",
        *misfit_lines(advice.get("poor_fit_by_batch", {})),
        "",
        *table_lines(advice),
        "",
        conclusion(advice),
        *domain_lines(advice["by_domain"]),
    ]
    if "by_batch" in advice:
        lines += ["", *batch_lines(advice)]
    if adaptive := advice.get("adaptive"):
        lines += [
            "",
            f"k chosen round by round over the {adaptive['rounds']} rounds of {adaptive['rounds_from']}: "
            f"{adaptive['speedup']:.2f}x, settles on k={adaptive['settled_k']}; the best k kept throughout: "
            f"k={adaptive['static_k']}, {adaptive['static_speedup']:.2f}x",
        ]
    return "\n".join(lines)


def describe_costs(advice: dict[str, Any]) -> str:
    if "cost_per_draft_token" in advice:
        return f"{advice['cost_per_draft_token']:.3f} plain steps a draft token, its row included"
    if "cost_per_draft_token_by_batch" in advice:
        both = describe_by_batch(advice["cost_per_draft_token_by_batch"])
        return f"plain steps a draft token, its row included: {both}; linear between"
    if "draft_cost_by_batch" in advice:
        draft, row = (describe_by_batch(advice[f"{name}_cost_by_batch"]) for name in ("draft", "row"))
        return f"plain steps to draft a token: {draft}; for its row: {row}; linear between"
    draft = f"{advice['draft_cost']:g} plain steps to draft a token"
    if "row_cost" in advice:
        return f"{draft}, {advice['row_cost']:g} for its row"
    if "row_cost_by_batch" in advice:
        return f"{draft}; for its row {describe_by_batch(advice['row_cost_by_batch'])}; linear between"
    crossover = f"without caches compute-bound above {advice['compute_bound_tokens']:.0f} tokens a pass"
    return f"{draft}; context {advice['context']}; {crossover}"


def describe_by_batch(costs: dict[str, float]) -> str:
    return ", ".join(f"{cost:.3g} at batch {batch}" for batch, cost in costs.items())


def misfit_lines(errors: dict[str, float]) -> list[str]:
    return [
        f"warning: at batch {batch} the fitted cost of a round is off by up to {error:+.0%} of the measured one"
        for batch, error in errors.items()
    ]


def table_lines(advice: dict[str, Any]) -> list[str]:
    alpha = advice["geometric"]["alpha"]
    where = f" (batch {advice['by_batch'][0]['batch']})" if "by_batch" in advice else ""
    lines = [f"   k  all kept  tokens  (at one rate {alpha:.3f})    cost  speedup{where}"]
    for row in advice["table"]:
        kept = "-" if row["survival"] is None else f"{row['survival']:.3f}"
        marks = " <- best" if row["k"] == advice["k"] else ""
        marks += " not measured: last rate held" if row["extrapolated"] else ""
        lines.append(
            f"  {row['k']:>2}  {kept:>8}  {row['expected_tokens']:6.3f}  {row['geometric_tokens']:>20.3f}  "
            f"{row['cost']:6.3f}  {row['speedup']:6.3f}x{marks}"
        )
    return lines


def conclusion(advice: dict[str, Any]) -> str:
    if advice["k"] == 0:
        return "off (k=0): every k costs more than it gains"
    geometric = advice["geometric"]
    said = f"k={advice['k']}: {advice['speedup']:.2f}x"
    if advice["extrapolated"]:
        said += "; rests on positions that were not measured, evaluate with that k before serving"
    if geometric["k"] != advice["k"]:
        said += f" (one rate for all positions would say k={geometric['k']}, {geometric['speedup']:.2f}x)"
    return said


def domain_lines(by_domain: dict[str, Any]) -> list[str]:
    return [
        f"  {name:<16} {'off' if one['k'] == 0 else 'k=' + str(one['k']):<4} {one['speedup']:5.2f}x"
        for name, one in by_domain.items()
    ]


def batch_lines(advice: dict[str, Any]) -> list[str]:
    lines = [" batch  best k  speedup  by k"]
    for one in advice["by_batch"]:
        each = "  ".join(f"{row['speedup']:.2f}" for row in one["table"][1:])
        lines.append(f"{one['batch']:>6}  {one['k'] or 'off':>6}  {one['speedup']:6.2f}x  {each}")
    largest = advice["by_batch"][-1]["batch"]
    even = advice["break_even_batch"]
    lines.append(
        f"speculation pays at batch {largest}, the largest asked for" if even is None else f"off from batch {even} on"
    )
    schedule = advice["num_speculative_tokens_per_batch_size"]
    lines += [f"off from batch {first} to {last}" for first, last, k in schedule[:-1] if not k]
    static = [
        f"k={one['k']} from batch {one['break_even_batch']}" for one in advice["static"] if one["break_even_batch"]
    ]
    if static:
        lines.append(f"kept at every batch size, no faster than plain decoding: {', '.join(static)}")
    if advice["speculative_config"] is not None:
        lines += ["--speculative-config:", f"  {json.dumps(advice['speculative_config'], separators=(',', ':'))}"]
        lines.append("  (without data parallelism, for which vLLM drops the schedule; larger batches keep the last k)")
    elif any(one["k"] for one in advice["by_batch"]):
        lines.append("vLLM serves Medusa with one k: choose it for the batch size that you expect")
    return lines

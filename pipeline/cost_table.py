"""`drafthead cost` as text."""

from typing import Any

from drafthead.eval.cost_fit import POOR_FIT

BUSY = 0.2
"""Spread of plain steps from which on the machine is said to have done something else."""


def render_cost(report: dict[str, Any]) -> str:
    lines = [f"drafter {report['drafter']}", *loop_lines(report["loop"])]
    if report["served"] is not None:
        lines += ["", *served_lines(report["served"])]
    return "\n".join(lines)


def loop_lines(loop: dict[str, Any]) -> list[str]:
    lines = [
        f"our loop on {loop['device']}, {loop['dtype']}, context {loop['context']}, medians of {loop['repeats']}, "
        f"measured {loop['measured']}",
        "cost of a round in plain steps; fitted: 1 + k (draft + row)",
        " batch  plain ms   k  draft ms  target ms   cost  fitted  error",
    ]
    for batch in loop["by_batch"]:
        for one in batch["rounds"]:
            lines.append(
                f"{batch['batch']:>6}  {batch['plain_ms']:>8.1f}  {one['k']:>2}  {one['draft_ms']:>8.1f}  "
                f"{one['target_ms']:>9.1f}  {one['cost']:>5.2f}  {one['fitted_cost']:>6.2f}  {one['error']:>+5.0%}"
            )
    lines += ["", " batch  draft cost  row cost  largest error of a round"]
    for batch in loop["by_batch"]:
        lines.append(
            f"{batch['batch']:>6}  {batch['draft_cost']:>10.3f}  {batch['row_cost']:>8.3f}  "
            f"{batch['largest_error']:>+6.0%}"
        )
    lines += [f"batch {batch} left out: {reason}" for batch, reason in loop["left_out"].items()]
    lines += [
        f"warning: at batch {batch['batch']} plain steps were {batch['plain_spread']:.0%} apart; "
        "measure again while nothing else runs"
        for batch in loop["by_batch"]
        if batch["plain_spread"] > BUSY
    ]
    return lines + misfit_lines(loop)


def served_lines(served: dict[str, Any]) -> list[str]:
    lines = [
        f"vLLM, {served['dtype']}, {served['prompts']} prompts, {served['max_new_tokens']} tokens, "
        f"measured {served['measured']}",
        f"tokens expected by {served['rates_from']}",
        " batch   k  round ms   cost  fitted  error  tokens  expected  speedup  by vLLM's costs  by our loop's",
    ]
    for batch in served["by_batch"]:
        lines.append(
            f"{batch['batch']:>6}   0  {batch['plain_ms']:>8.1f}   1.00   1.00     0%   1.000     1.000    1.00x"
            f"            1.00x          1.00x"
        )
        for one in batch["rounds"]:
            lines.append(
                f"{batch['batch']:>6}  {one['k']:>2}  {one['round_ms']:>8.1f}  {one['cost']:>5.2f}  "
                f"{one['fitted_cost']:>6.2f}  {one['error']:>+5.0%}  {one['tokens_per_round']:>6.3f}  "
                f"{one['expected_tokens']:>8.3f}  {one['speedup']:>6.2f}x  {one['predicted_by_served']:>14.2f}x  "
                f"{one['predicted_by_loop']:>12.2f}x{' (rate held)' if one['extrapolated'] else ''}"
            )
    lines += [
        f"batch {batch['batch']}: {batch['cost_per_draft_token']:.3f} plain steps a draft token with its row; "
        f"plain steps {batch['plain_drift']:+.0%} at the end"
        for batch in served["by_batch"]
    ]
    return lines + misfit_lines(served)


def misfit_lines(part: dict[str, Any]) -> list[str]:
    """Where two parameters do not describe what was measured."""
    return [
        f"warning: at batch {batch['batch']} the fitted cost of a round is off by up to {batch['largest_error']:+.0%}; "
        "trust the measured k there, not those between"
        for batch in part["by_batch"]
        if abs(batch["largest_error"]) > POOR_FIT
    ]

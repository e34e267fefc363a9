"""What every number of the page means: its name here, its exact name in the files, one definition."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """`metric` is the key in the run's files, or one of several, below other keys where these tell it apart; empty for
    what has none of its own."""

    label: str
    metric: str
    definition: str


def _round(text: str) -> str:
    return f"{text} A round is one pass of the target over k draft tokens, to which it adds one token of its own."


TERMS: dict[str, Term] = {
    # ---- acceptance
    "accept_length": Term(
        "accept length",
        "mean_acceptance_length",
        _round("Tokens per round: 1 + accepted draft tokens / rounds, pooled over all requests."),
    ),
    "mean_of_requests": Term(
        "mean of requests",
        "mean_of_requests_acceptance_length",
        "Each request's own tokens / rounds, averaged over requests: long answers weigh no more than short ones.",
    ),
    "joint": Term(
        "kept, of all rounds",
        "per_position",
        "Joint rate: share of all rounds that kept their first i draft tokens; vLLM's per-position acceptance rate.",
    ),
    "conditional": Term(
        "kept, if reached",
        "conditional",
        "Conditional rate: of the rounds that kept the first i - 1 draft tokens, the share that kept the i-th too.",
    ),
    "draft_acceptance_rate": Term(
        "draft acceptance rate",
        "draft_acceptance_rate",
        "Accepted draft tokens / all draft tokens.",
    ),
    "rounds": Term("rounds", "drafts, rounds", "Passes of the target over draft tokens; vLLM counts them as drafts."),
    "k": Term("k", "k, num_speculative_tokens", "Draft tokens proposed in every round (num_speculative_tokens)."),
    "position": Term("position", "", "Place of a draft token in its round, counted from 1."),
    "identical": Term(
        "text equal",
        "identical_to_plain",
        "Answers whose tokens are those of plain decoding without the head, of all answers compared.",
    ),
    "prompts": Term("prompts", "prompts", "Prompts that were answered for this measurement."),
    "left_out": Term("left out", "left_out", "Prompts that could not be used, by reason."),
    "temperature": Term("temperature", "temperature", "Sampling temperature of the measurement; 0 is greedy."),
    "max_new_tokens": Term("new tokens at most", "max_new_tokens", "Longest answer, in tokens."),
    "context_length": Term("context tokens", "from, to", "Tokens of the prompt, both ends included."),
    # ---- served
    "predicted": Term(
        "predicted",
        "predicted.per_position",
        _round(
            "Share of rounds that kept the first i draft tokens, by our own speculative loop over the same prompts."
        ),
    ),
    "walk": Term(
        "walk",
        "walk.per_position",
        "The same share, by replaying the rounds over the texts that vLLM wrote: one pass, no loop.",
    ),
    "served": Term(
        "served",
        "served.per_position",
        "The same share by vLLM's own counters: num_accepted_tokens_per_pos / num_drafts.",
    ),
    "difference": Term("difference", "", "Served minus predicted."),
    "tolerance": Term(
        "tolerance",
        "serve_check.tolerance",
        "Largest |served - predicted| of any position that ServedGate lets pass (against the walk: 0.01).",
    ),
    "speedup": Term(
        "speed-up",
        "speedup_batch_1",
        "Plain over speculative milliseconds per token: real vLLM, one request at a time, prompt's pass included.",
    ),
    "plain_ms": Term(
        "plain",
        "plain_ms_per_token",
        "Milliseconds per answer token without the head: vLLM, one request at a time, median over the timed prompts.",
    ),
    "speculative_ms": Term(
        "with the head",
        "ms_per_token, speculative_ms_per_token",
        "Milliseconds per answer token with the head: vLLM, one request at a time, median over the timed prompts.",
    ),
    # ---- trees, typical
    "nodes": Term("nodes", "nodes", "Draft tokens of a tree; the target checks all of them in one pass."),
    "depth": Term("depth", "depth", "Draft tokens on the longest path of a tree."),
    "expected_length": Term(
        "expected",
        "expected_acceptance_length",
        "Accept length that the tree was searched for, from the accuracies on other held-out answers.",
    ),
    "node_share": Term("kept of nodes", "accepted_share_of_nodes", "Accepted draft tokens / all nodes drafted."),
    "epsilon": Term(
        "epsilon", "epsilon", "Typical acceptance keeps a token where p > min(epsilon, delta exp(-entropy))."
    ),
    "delta": Term("delta", "delta", "Typical acceptance keeps a token where p > min(epsilon, delta exp(-entropy))."),
    # ---- economics
    "plan_k": Term("best k", "k", "Draft tokens per round with the greatest predicted speed-up; 0: do not speculate."),
    "plan_speedup": Term(
        "predicted speed-up",
        "speedup",
        "Expected tokens of a round / its cost, over plain decoding; from measured rates and costs, not timed itself.",
    ),
    "expected_tokens": Term(
        "expected tokens",
        "expected_tokens",
        "Tokens that a round yields: 1 + a1 + a1 a2 + ..., with a_i the measured conditional rates.",
    ),
    "geometric_tokens": Term(
        "with one rate",
        "geometric_tokens",
        "The same by the geometric formula, as if all positions had one rate; for comparison, decides nothing.",
    ),
    "survival": Term("all k kept", "survival", "Share of rounds expected to keep all k draft tokens."),
    "round_cost": Term("cost", "cost", "What a round takes, in plain steps of the target."),
    "draft_token_cost": Term(
        "cost of a draft token",
        "cost_per_draft_token",
        "Plain steps of the target that one more draft token takes in vLLM at batch 1: drafting and checking it.",
    ),
    "batch": Term("batch", "batch", "Requests decoded together."),
    "break_even": Term("break-even batch", "break_even_batch", "Smallest batch size from which on drafting loses."),
    "cost_draft": Term("draft cost", "draft_cost", "Proposing one draft token, in plain steps of the target."),
    "cost_row": Term("row cost", "row_cost", "One more token in the target's pass, in plain steps of the target."),
    "served_speedup": Term(
        "speed-up",
        "speedup",
        "Measured: tokens a second of vLLM's steps with the head, over those of plain steps at that batch size.",
    ),
    "predicted_by_served": Term(
        "by vLLM's costs",
        "predicted_by_served",
        "Predicted speed-up: expected tokens over the cost fitted to vLLM's own rounds.",
    ),
    "predicted_by_loop": Term(
        "by our loop's costs",
        "predicted_by_loop",
        "Predicted speed-up: expected tokens over the cost fitted to our loop's rounds.",
    ),
    "tokens_per_round": Term("tokens", "tokens_per_round", "Measured: tokens that one request got of a round."),
    "step_ms": Term(
        "ms a step", "plain_ms, round_ms", "Median milliseconds of vLLM's step: plain, or a round with its drafting."
    ),
    "target_ms": Term(
        "target ms",
        "plain_ms, target_ms",
        "Median milliseconds of the target's pass: over one token of each request (plain), or over k + 1.",
    ),
    "draft_ms": Term(
        "draft ms", "draft_ms", "Median milliseconds of proposing k tokens and taking in what was verified."
    ),
    "fitted_cost": Term("fitted", "fitted_cost", "The same by the model of two parameters, 1 + k (draft + row)."),
    "cost_error": Term("error", "error", "Fitted over measured cost, less 1."),
    "plain_drift": Term(
        "drift", "plain_drift", "Plain steps timed last over those timed first, less 1: how steady the machine was."
    ),
    "plain_spread": Term(
        "spread",
        "plain_spread",
        "How far apart the middle half of the plain steps' times are, over their median: large on a busy machine.",
    ),
    "cost_context": Term("context", "context", "Tokens of each request before the round."),
    "poor_fit": Term(
        "largest error",
        "poor_fit_by_batch",
        "Batch sizes where the fitted cost of a round is off by more than 15 %: trust the measured k there.",
    ),
    "adaptive_rounds": Term(
        "rounds replayed",
        "adaptive.rounds",
        "Recorded rounds over which k was chosen anew each time, by a running estimate of acceptance.",
    ),
    "adaptive_k": Term("settles on k", "adaptive.settled_k", "The k that the running estimate ends with."),
    "adaptive_speedup": Term(
        "adaptive speed-up", "adaptive.speedup", "Tokens over costs of the replayed rounds, over plain decoding."
    ),
    "static_k": Term(
        "best static k", "adaptive.static_k", "The one k that is best over the same rounds when kept throughout."
    ),
    "static_speedup": Term("static speed-up", "adaptive.static_speedup", "Its tokens over costs, over plain decoding."),
    "tokens_per_pass": Term(
        "tokens per pass",
        "tokens_per_pass",
        "Tokens of the answers over all passes of the target, with a draft or without.",
    ),
    "interval": Term("95 % interval", "..._interval", "Of the number beside it, by bootstrap over prompts."),
    # ---- training
    "loss": Term("loss", "loss", "Training loss per supervised slot, mean since the line before."),
    "walk_length": Term(
        "held-out accept length",
        "walk_accept_length, walk.mean_acceptance_length, last_walk.mean_acceptance_length",
        "Accept length on held-out answers during training, by replaying the rounds over them (greedy).",
    ),
    "walk_position": Term(
        "held-out, kept of all rounds",
        "walk_position_i",
        "Share of those rounds whose first i draft tokens were all kept.",
    ),
    "learning_rate": Term("learning rate", "learning_rate", "Of the optimiser's first group of parameters."),
    "step": Term("step", "step", "Optimiser steps taken."),
    "steps": Term("steps", "steps", "Optimiser steps of the whole training."),
    "taken_step": Term(
        "step taken", "taken_step", "Step whose head is exported: the longest held-out walk (train.keep)."
    ),
    "trained_tokens": Term("tokens trained on", "tokens", "Tokens of all steps, epochs and prompts' tokens included."),
    "trained_length": Term(
        "longest row", "trained_length", "Longest row trained on, in tokens; expect less beyond it."
    ),
    "mean_logprob": Term("mean log-probability", "mean_logprob", "Nats per token that the target gives the answers."),
    "top1": Term("top-1 agreement", "top1_agreement", "Share of answer tokens that are the target's most likely ones."),
    "quality_drop": Term("fell by", "drop", "Before minus after joint training of the target."),
    # ---- data
    "prompt_count": Term("prompts", "train, heldout", "Conversations collected, before the target answers them."),
    "source_count": Term(
        "taken",
        "sources",
        "Prompts taken from this source; those that were then held out, where prompts.heldout is a share, among them.",
    ),
    "requested": Term(
        "share asks for",
        "requested",
        "Prompts that this source's share of prompts.limit asks for; 0: it has no share of its own.",
    ),
    "domain_count": Term("training prompts", "domains", "Training prompts of this domain."),
    "duplicates": Term("duplicates", "duplicates", "Prompts left out because another has the same text."),
    "dropped": Term("dropped", "dropped", "Left out, by reason."),
    "skipped": Term("not answered", "skipped", "Turns that the target was not asked for, by reason."),
    "answers": Term("answers", "answers", "Assistant turns that the target wrote."),
    "shipped": Term(
        "shipped", "shipped", "Of these, those that came with the built-in prompts, written by this target before."
    ),
    "finish_reasons": Term(
        "ended by", "finish_reasons", "stop: the target's end-of-turn token; length: cut at the limit."
    ),
    "answer_tokens": Term("answer tokens", "tokens", "Tokens of all answers."),
    "kept": Term("kept", "kept", "Rows: one for each answer that is used."),
    "clipped": Term("clipped", "clipped", "Kept rows that were cut to encode.max_length."),
    "row_tokens": Term("tokens", "tokens", "Tokens of the kept rows, context included."),
    "supervised": Term(
        "supervised", "supervised_tokens", "Of these, tokens of answers, which the head learns to draft."
    ),
    "draft_vocab": Term("draft vocabulary", "size", "Tokens that the head can draft."),
    "target_vocab": Term("target vocabulary", "target_vocab", "Rows of the target's lm_head."),
    "coverage": Term(
        "coverage",
        "coverage_train, coverage_heldout, coverage_by_domain",
        "Share of supervised tokens that lie in the draft vocabulary; others can only miss.",
    ),
    "captured": Term("captured tokens", "tokens", "Tokens whose hidden states are stored."),
    "bytes_per_token": Term("bytes per token", "bytes_per_token", "Disk that the states of one token take."),
    "policy_rows": Term("rows", "rows", "Rows of the sample that was measured."),
    "policy_tokens": Term("tokens", "tokens", "Answer tokens of the sample that was measured."),
    "expected_logprob": Term(
        "target's own text",
        "expected_logprob",
        "The mean log-probability that text sampled from the target would have.",
    ),
    "gap": Term(
        "gap",
        "gap",
        "Mean log-probability minus the target's own, nats per token: 0 for text that the target sampled, "
        "above 0 for greedy text, below 0 for somebody else's.",
    ),
    "gap_error": Term("standard error", "gap_error", "Standard error of the gap."),
    # ---- times
    "seconds": Term(
        "seconds",
        "seconds",
        "Wall-clock seconds of the stage when its output was made, in this run or one that shares it.",
    ),
    "total_seconds": Term(
        "total", "", "Sum of the stages' seconds; shared stages count although another run may have made them."
    ),
}

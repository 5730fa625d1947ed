"""What `fissile bench` says about its outcomes."""

from collections import Counter
from dataclasses import dataclass

from fissile.cli.load import Outcome

QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a request must meet to count as good. None: no bound."""

    ttft: float | None = None
    """Seconds."""
    tpot: float | None = None
    """Seconds."""

    def is_met_by(self, outcome: Outcome) -> bool:
        if outcome.error or outcome.ttft is None:
            return False
        if self.ttft is not None and outcome.ttft > self.ttft:
            return False
        return self.tpot is None or outcome.tpot is None or outcome.tpot <= self.tpot


def quantile(ordered: list[float], share: float) -> float:
    """Of sorted values, linear between neighbours; 0 of none."""
    if not ordered:
        return 0.0
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def latency(values: list[float]) -> Figures:
    """Mean, quantiles and maximum in milliseconds."""
    ordered = sorted(value * 1e3 for value in values)
    figures = {"mean": sum(ordered) / len(ordered) if ordered else 0.0}
    figures |= {name: quantile(ordered, share) for name, share in QUANTILES.items()}
    figures["max"] = ordered[-1] if ordered else 0.0
    return {name: round(value, 3) for name, value in figures.items()}


def report(outcomes: list[Outcome], goal: Goal) -> dict[str, object]:
    """One object of figures, named with their unit. Error rate and goodput always stand beside the throughput."""
    whole = [outcome for outcome in outcomes if not outcome.error]
    seconds = max(outcome.end for outcome in outcomes) - min(outcome.due for outcome in outcomes)
    num_output_tokens = sum(outcome.num_output_tokens for outcome in whole)
    num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in whole)
    return {
        "num_requests": len(outcomes),
        "num_errors": len(outcomes) - len(whole),
        "error_rate": round(1 - len(whole) / len(outcomes), 4),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "duration_s": round(seconds, 3),
        "requests_s": round(len(whole) / seconds, 3),
        "goodput_requests_s": round(sum(goal.is_met_by(outcome) for outcome in outcomes) / seconds, 3),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "output_tok_s": round(num_output_tokens / seconds, 2),
        "total_tok_s": round((num_output_tokens + num_prompt_tokens) / seconds, 2),
        "ttft_ms": latency([outcome.ttft for outcome in whole if outcome.ttft is not None]),
        "tpot_ms": latency([outcome.tpot for outcome in whole if outcome.tpot is not None]),
        "itl_ms": latency([gap for outcome in whole for gap in outcome.itls]),
        "e2e_ms": latency([outcome.end - outcome.due for outcome in whole]),
    }

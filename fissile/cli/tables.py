"""Tables for terminals that may be narrow."""

from collections.abc import Mapping

from rich.table import Column, Table

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def latency_table(latencies: Mapping[str, Mapping[str, float]]) -> Table:
    """A column for each latency, as they are fewer than their statistics: whole numbers fit into 60 columns. Values are
    in milliseconds; one that has no `count` says nothing of it."""
    rows = ("count", *STATISTICS) if all("count" in values for values in latencies.values()) else STATISTICS
    table = Table("milliseconds", *(Column(name, justify="right", no_wrap=True) for name in latencies))
    for row in rows:
        table.add_row(row, *(_number(values[row], row) for values in latencies.values()))
    return table


def _number(value: float, row: str) -> str:
    return f"{value:.0f}" if row == "count" else f"{value:.1f}"

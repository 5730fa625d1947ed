"""`fissile models` and `fissile stats`."""

from typing import TYPE_CHECKING

import click

from fissile.cli.options import Target, connection_options

if TYPE_CHECKING:
    from rich.table import Table

    from fissile.results import Model, Stats

_TIMEOUT = 10.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@connection_options
def models(as_json: bool, to: Target) -> None:
    """List the models that a router serves."""
    from fissile import Client

    with Client(to.address, tls=to.tls, api_key=to.api_key) as client:
        found = client.models(timeout=_TIMEOUT)
    _show(found, as_json, [_models_table(found)])


@click.command()
@click.option("--window", type=click.IntRange(min=0), default=0, help="Only the last so many seconds. 0: all kept.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@connection_options
def stats(window: int, as_json: bool, to: Target) -> None:
    """Show a router's latencies and its workers."""
    from fissile import Client

    with Client(to.address, tls=to.tls, api_key=to.api_key) as client:
        seen = client.stats(window=window, timeout=_TIMEOUT)
    _show(seen, as_json, [_latency_table(seen), _workers_table(seen)])
    if not as_json:
        for worker in seen.workers:
            if not worker.healthy:
                click.echo(f"{worker.address} is down: {worker.detail}")
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(seen.finished.items())) or "none"
        click.echo(f"up {seen.uptime:.0f} s · {seen.num_open_requests} open · ended: {ends}")
        click.echo(f"{seen.num_prompt_tokens} tokens in · {seen.num_completion_tokens} tokens out")


def _show(value: object, as_json: bool, tables: list["Table"]) -> None:
    import json
    from dataclasses import asdict

    from rich.console import Console

    if as_json:
        plain = [asdict(entry) for entry in value] if isinstance(value, tuple) else asdict(value)  # type: ignore[call-overload]
        click.echo(json.dumps(plain))
        return
    console = Console()
    for table in tables:
        console.print(table)


def _models_table(found: "tuple[Model, ...]") -> "Table":
    from rich.table import Table

    table = Table("model", "architecture", "context", "vocabulary", "chat", "workers")
    for model in found:
        table.add_row(
            ", ".join((model.id, *model.aliases)),
            ", ".join(model.architectures),
            str(model.max_model_len),
            str(model.vocab_size),
            "yes" if model.has_chat_template else "no",
            str(model.num_workers),
        )
    return table


def _latency_table(seen: "Stats") -> "Table":
    from rich.table import Table

    table = Table("milliseconds", "count", "mean", "p50", "p90", "p95", "p99", "max")
    for name, q in (("TTFT", seen.ttft), ("TPOT", seen.tpot), ("ITL", seen.itl), ("E2E", seen.e2e)):
        values = (q.mean, q.p50, q.p90, q.p95, q.p99, q.max)
        table.add_row(name, str(q.count), *(f"{value * 1e3:.1f}" for value in values))
    return table


def _workers_table(seen: "Stats") -> "Table":
    from rich.table import Column, Table

    # An address cut short would be of no use, however narrow the terminal is.
    table = Table(Column("worker", no_wrap=True, overflow="fold"))
    for name in ("state", "open", "running", "waiting", "KV blocks used", "tokens out"):
        table.add_column(name)
    for worker in seen.workers:
        table.add_row(
            worker.address,
            "healthy" if worker.healthy else "down",
            str(worker.num_open_requests),
            str(worker.num_running),
            str(worker.num_waiting),
            f"{worker.num_used_blocks} of {worker.num_blocks}",
            str(worker.num_generated_tokens),
        )
    return table

"""`fissile bench`: load a router and measure it."""

import sys
from typing import TYPE_CHECKING, Any

import click

from fissile.cli.connection import Target, connection_options
from fissile.cli.options import EXIT_INTERRUPTED, FiniteRange, model_option

if TYPE_CHECKING:
    from fissile.cli.load import LoadConfig, Outcome


def _lengths(_context: click.Context, _parameter: click.Parameter, value: str) -> Any:
    from fissile.cli.lengths import Lengths

    try:
        return Lengths.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(short_help="Load a router and report latency and throughput.")
@click.option("-n", "--num-requests", type=click.IntRange(min=1), default=100, show_default=True, help="How many.")
@click.option(
    "-r",
    "--rate",
    type=FiniteRange(min=0, min_open=True),
    help="Open loop: so many requests a second on average, at Poisson times, however slow the answers.",
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(min=1),
    help="Closed loop: so many clients, each sending when its last request has ended. [default: 8]",
)
@click.option("-i", "--input-length", callback=_lengths, default="128", show_default=True, help="Tokens in, as above.")
@click.option(
    "-o", "--output-length", callback=_lengths, default="128", show_default=True, help="Tokens out, as above."
)
@click.option("--warmup", type=click.IntRange(min=0), default=2, show_default=True, help="Requests before the clock.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts, lengths and arrival times.")
@click.option("--timeout", type=FiniteRange(min=0, min_open=True), help="Seconds a request may take.")
@click.option(
    "--goal-ttft", type=FiniteRange(min=0), metavar="MS", help="A good request has at most this TTFT (milliseconds)."
)
@click.option(
    "--goal-tpot", type=FiniteRange(min=0), metavar="MS", help="A good request has at most this TPOT (milliseconds)."
)
@model_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@connection_options
def bench(
    num_requests: int,
    rate: float | None,
    concurrency: int | None,
    warmup: int,
    goal_ttft: float | None,
    goal_tpot: float | None,
    as_json: bool,
    to: Target,
    **load: Any,
) -> None:
    """Send requests with random prompts and report latency, throughput, errors and goodput.

    Lengths are N (always N), LOW-HIGH (uniform) or MEAN~DEVIATION (normal).

    Latency counts from the time a request was due, so a backlog shows. Goodput counts requests that met --goal-ttft and
    --goal-tpot. Ctrl-C ends the run with the figures so far.
    """
    import asyncio
    import json
    from dataclasses import replace

    from fissile.cli.load import LoadConfig
    from fissile.cli.report import Goal, report

    if rate is not None and concurrency is not None:
        raise click.UsageError("--rate (open loop) and --concurrency (closed loop) exclude each other")
    config = LoadConfig(num_requests=num_requests, rate=rate, concurrency=concurrency or 8, **load)
    warm_config = replace(config, num_requests=warmup, rate=None, seed=config.seed - 1) if warmup else None
    outcomes: list[Outcome] = []
    try:
        asyncio.run(_run(to, config, warm_config, outcomes))
        is_whole = True
    except KeyboardInterrupt:
        is_whole = False
        click.echo(f"interrupted after {len(outcomes)} of {num_requests} requests", err=True)
        if not outcomes:
            sys.exit(EXIT_INTERRUPTED)
    figures = report(outcomes, Goal(_seconds(goal_ttft), _seconds(goal_tpot)))
    all_failed = figures["num_errors"] == figures["num_requests"]
    if as_json:
        click.echo(json.dumps(figures))
    elif not all_failed:
        _print(figures)
    if not is_whole:
        sys.exit(EXIT_INTERRUPTED)
    if all_failed:
        raise click.ClickException(f"every request failed: {figures['errors']}; the first one: {outcomes[0].complaint}")


async def _run(to: Target, config: "LoadConfig", warm_config: "LoadConfig | None", outcomes: "list[Outcome]") -> None:
    """`outcomes` gets those of requests as they end, so that some are there when this is interrupted."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fissile import AsyncClient
    from fissile.cli.load import run_load

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    async with AsyncClient(to.address, tls=to.tls, api_key=to.api_key) as client:
        if warm_config is not None:
            await run_load(client, warm_config, lambda _: None)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("requests", total=config.num_requests)

            def done(outcome: "Outcome") -> None:
                outcomes.append(outcome)
                progress.advance(task)

            await run_load(client, config, done)


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console

    from fissile.cli.tables import latency_table

    Console().print(latency_table({name.upper(): figures[f"{name}_ms"] for name in ("ttft", "tpot", "itl", "e2e")}))
    click.echo(_throughput(figures))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _throughput(figures: dict[str, Any]) -> str:
    errors = f": {figures['errors']}" if figures["errors"] else ""
    return (
        f"{figures['num_requests']} requests in {figures['duration_s']} s\n"
        f"{figures['num_errors']} failed ({figures['error_rate']:.1%}){errors}\n"
        f"{figures['requests_s']} requests/s, of them good {figures['goodput_requests_s']}/s\n"
        f"{figures['output_tok_s']} tokens/s out · {figures['total_tok_s']} tokens/s in and out"
    )

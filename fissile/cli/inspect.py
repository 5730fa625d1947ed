"""`fissile models` and `fissile stats`."""

from typing import TYPE_CHECKING

import click

from fissile.cli.connection import Target, connection_options

if TYPE_CHECKING:
    from fissile.results import Model, ModelVersion, Quantiles, Worker

_TIMEOUT = 10.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@connection_options
def models(as_json: bool, to: Target) -> None:
    """List the models that a router serves."""
    from fissile import Client

    with Client(to.address, tls=to.tls, api_key=to.api_key) as client:
        found = client.models(timeout=_TIMEOUT)
    if as_json:
        _print_json(found)
        return
    if not found:
        click.echo("no model: the router has no worker yet, or none for this key", err=True)
    for model in found:
        _print_entry(", ".join((model.id, *model.aliases)), _about_model(model))


@click.command()
@click.option("--window", type=click.IntRange(min=0), default=0, help="Only the last so many seconds. 0: all kept.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@connection_options
def stats(window: int, as_json: bool, to: Target) -> None:
    """Show a router's latencies and its workers."""
    from rich.console import Console

    from fissile import Client
    from fissile.cli.tables import latency_table

    with Client(to.address, tls=to.tls, api_key=to.api_key) as client:
        seen = client.stats(window=window, timeout=_TIMEOUT)
    if as_json:
        _print_json(seen)
        return
    latencies = {"TTFT": seen.ttft, "TPOT": seen.tpot, "ITL": seen.itl, "E2E": seen.e2e}
    Console().print(latency_table({name: _milliseconds(values) for name, values in latencies.items()}))
    for worker in seen.workers:
        _print_entry(worker.address, _about_worker(worker))
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(seen.finished.items())) or "none"
    click.echo(
        f"up {seen.uptime:.0f} s · {seen.num_open_requests} open, {seen.num_queued_requests} queued · ended: {ends}"
    )
    click.echo(f"{seen.num_prompt_tokens} tokens in · {seen.num_completion_tokens} tokens out")


def _print_json(value: object) -> None:
    import json
    from dataclasses import asdict

    plain = [asdict(entry) for entry in value] if isinstance(value, tuple) else asdict(value)  # type: ignore[call-overload]
    click.echo(json.dumps(plain))


def _print_entry(name: str, lines: list[str]) -> None:
    """A name, which is never cut, and below it what is known; both are whole in a narrow terminal."""
    click.secho(name, bold=True)
    for line in lines:
        click.echo(f"  {line}")


def _about_model(model: "Model") -> list[str]:
    chat = "with" if model.has_chat_template else "without"
    versions = model.versions if len(model.versions) > 1 else ()
    return [
        f"{', '.join(model.architectures)} · {chat} chat template",
        f"context {model.max_model_len} · vocabulary {model.vocab_size} · workers {model.num_workers}",
        *(line for version in versions for line in _about_version(version)),
    ]


def _about_version(version: "ModelVersion") -> list[str]:
    name = version.name or "-"
    return [
        f"version {name}: context {version.max_model_len} · {version.dtype} · workers {version.num_workers}",
        f"  tokenizer {version.tokenizer_fingerprint[:12]} · weights {version.model_fingerprint[:12]}",
    ]


def _about_worker(worker: "Worker") -> list[str]:
    if not worker.healthy:
        return [f"down: {worker.detail}"]
    version = f" · version {worker.model_version}" if worker.model_version else ""
    on_trial = [f"on trial: {worker.detail}"] if worker.detail else []
    drafts = [f"{worker.num_accepted_tokens} of {worker.num_draft_tokens} drafts right"]
    return [
        *on_trial,
        f"{worker.model}{version}",
        f"healthy · {worker.num_open_requests} open · {worker.num_running} running · {worker.num_waiting} waiting",
        f"KV blocks {worker.num_used_blocks} of {worker.num_blocks} used · {worker.num_generated_tokens} tokens out",
        *(drafts if worker.num_draft_tokens else ()),
    ]


def _milliseconds(values: "Quantiles") -> dict[str, float]:
    from dataclasses import asdict

    return {name: value if name == "count" else value * 1e3 for name, value in asdict(values).items()}

"""`fissile generate`."""

import sys
from collections.abc import Iterator
from math import exp
from typing import TYPE_CHECKING, Any

import click

from fissile.cli.connection import Target, connection_options
from fissile.cli.options import (
    EXIT_INTERRUPTED,
    request_options,
    sampling_options,
    valid_text,
)

if TYPE_CHECKING:
    from fissile.client import Stream
    from fissile.results import Generation


def _token_ids(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        return [int(word) for word in value.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter("must be numbers separated by commas") from None


@click.command()
@click.argument("prompt", required=False)
@click.option("--token-ids", callback=_token_ids, help="Prompt as token ids, separated by commas.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as one JSON object at the end.")
@click.option("--logprobs", type=click.IntRange(min=0), help="Print each token and so many others, with probabilities.")
@click.option("--timings", is_flag=True, help="Print tokens and latency to standard error.")
@sampling_options
@connection_options
def generate(
    prompt: str | None,
    token_ids: list[int] | None,
    as_json: bool,
    logprobs: int | None,
    timings: bool,
    model: str,
    timeout: float | None,
    to: Target,
    **sampling: Any,
) -> None:
    """Continue PROMPT and stream what comes. Without PROMPT, or with -, it is read from standard input."""
    from fissile import Client

    if prompt is not None and token_ids is not None:
        raise click.UsageError("give PROMPT or --token-ids, not both")
    if token_ids is None:
        token_ids_or_text: str | list[int] = valid_text(_read_stdin() if prompt in (None, "-") else prompt or "")
    else:
        token_ids_or_text = token_ids
    with Client(to.address, tls=to.tls, api_key=to.api_key) as client:
        options = request_options(**sampling)
        options["return_token_ids"] = as_json
        if logprobs is not None:
            options["logprobs"] = logprobs
        stream = client.generate(token_ids_or_text, model=model, timeout=timeout, **options)
        _print_text(stream, as_json)
        generation = stream.result()
    click.echo(to_json(generation) if as_json else "")
    if logprobs is not None and not as_json:
        for line in probabilities(generation):
            click.echo(line, err=True)
    if timings:
        click.echo(summary(generation), err=True)


def _print_text(stream: "Stream", as_json: bool) -> None:
    """As it comes. What ends it early comes on a line of its own."""
    from fissile.errors import FissileError

    has_begun = False
    try:
        for delta in stream:
            if not as_json:
                click.echo(delta.text, nl=False)
                has_begun = True
    except (FissileError, KeyboardInterrupt) as end:
        stream.close()
        if has_begun:
            click.echo()
        if isinstance(end, KeyboardInterrupt):
            sys.exit(EXIT_INTERRUPTED)
        raise


def _read_stdin() -> str:
    if sys.stdin.isatty():
        click.echo("The prompt; Ctrl-D on a line of its own ends it:", err=True)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"the prompt is no valid UTF-8 at byte {error.start}") from None


def to_json(generation: "Generation") -> str:
    import json
    from dataclasses import asdict

    return json.dumps(asdict(generation), ensure_ascii=False, default=_plain)


def _plain(value: bytes) -> str:
    """Bytes of a token, the only thing in a result that JSON has no form for."""
    return value.decode(errors="replace")


def probabilities(generation: "Generation") -> Iterator[str]:
    """A line for each token: its probability and rank, then the most likely ones."""
    for position in generation.completions[0].logprobs:
        chosen, *likely = position
        others = "  ".join(f"{_quoted(entry.text)} {exp(entry.logprob):.2%}" for entry in likely)
        yield f"{_quoted(chosen.text)} {exp(chosen.logprob):.2%} (rank {chosen.rank})  {others}".rstrip()


def _quoted(text: bytes) -> str:
    return repr(text.decode(errors="replace"))


def summary(generation: "Generation") -> str:
    """One line: tokens, how it ended, TTFT, TPOT, tokens per second."""
    usage, timings = generation.usage, generation.timings
    parts = [
        f"{usage.num_prompt_tokens} tokens in ({usage.num_cached_tokens} cached)",
        f"{usage.num_completion_tokens} out",
        f"ended by {generation.completions[0].finish.reason}",
    ]
    if timings.ttft is not None:
        parts.append(f"TTFT {timings.ttft * 1e3:.0f} ms")
    if timings.tpot is not None:
        parts.append(f"TPOT {timings.tpot * 1e3:.1f} ms")
    if timings.e2e:
        parts.append(f"{usage.num_completion_tokens / timings.e2e:.1f} tokens/s")
    return " · ".join(parts)

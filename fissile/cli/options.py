"""Options that several commands share."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import click

if TYPE_CHECKING:
    from fissile.options import Options

EXIT_INTERRUPTED = 130

F = TypeVar("F", bound=Callable[..., Any])


def apply(decorators: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """Several as one; their flags are listed in this order."""

    def decorate(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


class FiniteRange(click.FloatRange):
    """A number in a range; `nan` and `inf`, which click takes for such, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


model_option = click.option("-m", "--model", default="", help="Model id. Not needed while the router serves one model.")
worker_model_option = click.option(
    "-m", "--model", default="smollm2", show_default=True, envvar="FISSILE_WORKER_MODEL", show_envvar=True,
    help="As for `fissile worker`.",
)  # fmt: skip
sampling_options = apply(
    [
        model_option,
        click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Most tokens."),
        click.option("-t", "--temperature", type=float, help="0 is greedy. Default: the model's."),
        click.option("--top-k", type=int, help="Sample from the k most likely tokens only."),
        click.option("--top-p", type=float, help="Sample from the most likely tokens that sum to this probability."),
        click.option("--min-p", type=float, help="Drop tokens less likely than this share of the most likely one."),
        click.option("--seed", type=click.IntRange(min=0, max=2**64 - 1), help="Same seed, same answer."),
        click.option(
            "--repetition-penalty", type=float, help="Above 1: what was in prompt or answer gets less likely."
        ),
        click.option("--presence-penalty", type=float, help="Above 0: what was in the answer gets less likely."),
        click.option("--frequency-penalty", type=float, help="The same, the more often the less likely."),
        click.option("--bad-word", "bad_words", multiple=True, help="Never say this. May be repeated."),
        click.option("--stop", multiple=True, help="End at this text. May be repeated."),
        click.option("--ignore-eos", is_flag=True, help="Go on past the model's end of text."),
        click.option(
            "--json-schema", type=click.File(encoding="utf-8"), help="Answer in JSON that this schema allows."
        ),
        click.option("--regex", help="Answer with a text that this matches."),
        click.option("--choice", multiple=True, help="Answer with this, or another --choice. May be repeated."),
        click.option("--timeout", type=FiniteRange(min=0, min_open=True), help="Seconds before giving up."),
    ]
)


def request_options(json_schema: TextIO | None, **given: Any) -> "Options":
    """What of `sampling_options` goes into a request; what is not given is left to the model's defaults."""
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None and value != ()}
    if json_schema is not None:
        try:
            options["json_schema"] = json_schema.read()
        except UnicodeDecodeError as error:
            raise click.BadParameter(f"is no valid UTF-8 at byte {error.start}", param_hint="--json-schema") from None
    if len(options.keys() & {"json_schema", "regex", "choice"}) > 1:
        raise click.UsageError("--json-schema, --regex and --choice exclude each other")
    return cast("Options", options)


def valid_text(text: str) -> str:
    """Refuses bytes that are no UTF-8 (Python carries them as lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.ClickException(f"the prompt is no valid UTF-8 at character {error.start}") from None
    return text

"""`fissile chat`: a conversation in the terminal."""

import sys
from typing import TYPE_CHECKING, Any

import click

from fissile.cli.connection import Target, connection_options
from fissile.cli.options import request_options, sampling_options, valid_text

if TYPE_CHECKING:
    from fissile import Client
    from fissile.options import Options
    from fissile.requests import Message

HELP = "/reset forgets the conversation · /exit or Ctrl-D leaves · Ctrl-C stops an answer"


@click.command()
@click.option("-s", "--system", default="", help="Instructions for the model.")
@sampling_options
@connection_options
def chat(
    system: str,
    model: str,
    timeout: float | None,
    to: Target,
    **sampling: Any,
) -> None:
    """Talk to a model. Answers stream; the conversation is kept until /reset."""
    from fissile import Client

    with Client(to.address, tls=to.tls, api_key=to.api_key) as client:
        models = client.models(timeout=10)
        names = ", ".join(entry.id for entry in models) or "no model"
        if sys.stdin.isatty():
            click.echo(f"{names} at {to.address}. {HELP}", err=True)
        Conversation(client, system, model, timeout, request_options(**sampling)).run()


class Conversation:
    """One conversation with its history."""

    def __init__(self, client: "Client", system: str, model: str, timeout: float | None, options: "Options") -> None:
        self._client = client
        self._model = model
        self._timeout = timeout
        self._options = options
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages: list[Message] = list(self._opening)

    def run(self) -> None:
        """Until /exit or the end of the input."""
        while (line := self._read()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/reset":
                    self._messages = list(self._opening)
                case command if command.startswith("/"):
                    click.echo(HELP, err=True)
                case text:
                    self._answer(valid_text(text))

    def _read(self) -> str | None:
        """The next line; None at the end of the input. Ctrl-C drops the line that is being typed."""
        if sys.stdin.isatty():
            import readline  # noqa: F401 (gives input() editing and history)
        while True:
            try:
                return input("> " if sys.stdin.isatty() else "")
            except KeyboardInterrupt:
                click.echo(f"\n{HELP}", err=True)
            except EOFError:
                if sys.stdin.isatty():
                    click.echo()  # the shell's prompt begins on a line of its own
                return None

    def _answer(self, text: str) -> None:
        from fissile.errors import FissileError

        self._messages.append({"role": "user", "content": text})
        answer: list[str] = []
        reasoning: list[str] = []
        stream = self._client.chat(self._messages, model=self._model, timeout=self._timeout, **self._options)
        try:
            for delta in stream:
                if delta.reasoning:
                    reasoning.append(delta.reasoning)
                    click.secho(delta.reasoning, nl=False, dim=True)
                if delta.text:
                    if reasoning and not answer:
                        click.echo("\n")
                    answer.append(delta.text)
                    click.echo(delta.text, nl=False)
        except KeyboardInterrupt:
            stream.close()
        except FissileError as error:
            # The conversation goes on without the question that failed; into a pipe nobody could react.
            self._messages.pop()
            if not sys.stdin.isatty():
                raise
            click.echo(f"Error: {error.message}", err=True)
            return
        click.echo()
        self._messages.append({"role": "assistant", "content": "".join(answer), "reasoning": "".join(reasoning)})

"""The `fissile` command. Command modules import only click at their top: `fissile --help` must answer at once."""

import errno
from typing import Any

import click

from fissile.cli.bench import bench
from fissile.cli.chat import chat
from fissile.cli.demo import demo
from fissile.cli.drain import drain, undrain
from fissile.cli.generate import generate
from fissile.cli.inspect import models, stats
from fissile.cli.key import key
from fissile.cli.options import EXIT_INTERRUPTED
from fissile.cli.services import join, router, worker
from fissile.cli.standard_streams import give_up_unwritten, make_usable
from fissile.cli.top import top
from fissile.cli.up import up


class FissileGroup(click.Group):
    """Reports our typed errors, and what the system refuses, as one line and exit code 1; any other exception is a
    fault of ours and is shown."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        make_usable()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)  # the shell's prompt begins on a line of its own
            ctx.exit(EXIT_INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read has enough: click ends without a word
            give_up_unwritten()
            raise click.ClickException(str(error)) from error
        except Exception as error:
            from fissile.errors import FissileError  # here, because it brings grpc with it

            if not isinstance(error, FissileError):
                raise
            code = error.code.name.lower().replace("_", " ")
            raise click.ClickException(f"{code}: {error.message}") from error


@click.group(cls=FissileGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fissile", message="%(prog)s %(version)s")
def main() -> None:
    """An LLM inference engine split into a router and workers.

    Start both on this machine with `fissile up`, then talk to them from another terminal with `fissile chat`.
    """


for command in (up, router, worker, join, generate, chat, bench, models, stats, top, key, demo, drain, undrain):
    main.add_command(command)

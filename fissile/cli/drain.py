"""`fissile drain` and `fissile undrain`: take a worker out of service, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from fissile.cli.connection import Target, operator_options
from fissile.cli.options import FiniteRange

if TYPE_CHECKING:
    from fissile.v1 import WorkerServiceStub

_TIMEOUT = 10.0


@click.command(short_help="Take a worker out of service.")
@click.option(
    "--timeout",
    type=FiniteRange(min=0),
    help="Seconds that running sequences get before they are aborted and move. Default: the worker's --drain-timeout.",
)
@operator_options
def drain(timeout: float | None, to: Target) -> None:
    """Have WORKER take nothing new, and wait until it has finished what it has. It stays up until it is signalled."""
    from fissile.v1 import DrainRequest

    request = DrainRequest()
    if timeout is not None:
        request.timeout.FromNanoseconds(int(timeout * 1e9))
    with _worker(to) as (stub, metadata):
        answer = stub.Drain(request, metadata=metadata)
    click.echo(f"{answer.num_finished} sequences finished, {answer.num_aborted} aborted")
    if answer.undrained:
        raise click.ClickException(f"{to.address} was undrained meanwhile")


@click.command(short_help="Take a drained worker back.")
@operator_options
def undrain(to: Target) -> None:
    """Have WORKER take requests again; ends a `drain` that still waits."""
    from fissile.v1 import UndrainRequest

    with _worker(to) as (stub, metadata):
        stub.Undrain(UndrainRequest(), metadata=metadata, timeout=_TIMEOUT)
    click.echo(f"{to.address} takes requests")


@contextmanager
def _worker(to: Target) -> Iterator[tuple["WorkerServiceStub", list[tuple[str, str]]]]:
    """Its service, and what calls carry. What its calls raise is raised as FissileError."""
    import grpc

    from fissile.address import worker_target
    from fissile.channel import call_metadata, channel
    from fissile.errors import from_rpc_error
    from fissile.v1 import WorkerServiceStub

    with channel(worker_target(to.address), to.tls) as connection:
        try:
            yield WorkerServiceStub(connection), call_metadata(to.api_key)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

"""`fissile demo`: one question through a router and two workers."""

import time

import click

from fissile.cli.options import worker_model_option

QUESTION = "What is the name of the capital city of France?"
"""Not one whose answer hangs on rounding: with shorter words SmolLM2 finds a French answer all but as good, and weights
of 4 or 8 bits tip it over."""
EXPECTED = "Paris"


@click.command(short_help="Start all, ask a real model one question, stop.")
@worker_model_option
@click.option("-v", "--verbose", is_flag=True, help="Print the services' logs.")
def demo(model: str, verbose: bool) -> None:
    """Start a router and two workers, ask them one question over gRPC, stop them."""
    from fissile import Client
    from fissile.cli.cluster import ClusterConfig, running_cluster
    from fissile.cli.generate import summary
    from fissile.cli.up import log_line, log_nothing

    started = time.monotonic()
    click.echo("starting a router and two workers ...")
    config = ClusterConfig(num_workers=2, port=0, model=model)
    with running_cluster(config, log_line if verbose else log_nothing) as cluster:
        click.echo(f"ready after {time.monotonic() - started:.1f} s; router at {cluster.router_address}\n")
        click.echo(f"> {QUESTION}")
        with Client(cluster.router_address) as client:
            stream = client.chat([{"role": "user", "content": QUESTION}], temperature=0, max_tokens=64, timeout=120)
            for delta in stream:
                click.echo(delta.text, nl=False)
            generation = stream.result()
        click.echo(f"\n\n{summary(generation)}")
    click.echo("stopped")
    if EXPECTED not in generation.text:
        raise click.ClickException(f"the answer does not name {EXPECTED}")

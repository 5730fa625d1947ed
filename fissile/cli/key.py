"""`fissile key`: make an API key."""

import hashlib
import json
import secrets

import click

MAX_NAME_LENGTH = 64
"""As the router has it."""


@click.command()
@click.argument("name")
@click.option("--tenant", help="Whose cached prefixes its requests share. Default: its own.")
def key(name: str, tenant: str | None) -> None:
    """Make an API key for a client called NAME.

    \b
    Standard output gets the entry for the router's --api-key-file, standard error
    the key itself, which is not kept anywhere:
    fissile key alice >> keys.toml
    """
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise click.BadParameter(f"must be 1 to {MAX_NAME_LENGTH} printable characters", param_hint="NAME")
    secret = f"fsk-{secrets.token_urlsafe(32)}"
    entry = {"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest()}
    if tenant is not None:
        entry["tenant"] = tenant
    # A string of JSON is one of TOML.
    lines = [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in entry.items()]
    click.echo("\n".join(["", "[[keys]]", *lines]))
    click.echo(secret, err=True)

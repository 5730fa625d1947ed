"""How others learn which port a service has bound."""

from pathlib import Path


def write_port_file(path: Path, port: int) -> None:
    """Tell others which port was bound. Complete or not there: a reader never sees half of it. Raises OSError with the
    path as it was given."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(f"{port}\n")
        partial.replace(path)
    except OSError as error:
        raise OSError(f"port file {path}: {error.strerror}") from error

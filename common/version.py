"""Which fissile this is."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Of the installed package; "source" where the code runs from a tree that was never installed."""
    try:
        return version("fissile")
    except PackageNotFoundError:
        return "source"

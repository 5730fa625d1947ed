"""Tables of the README that a program writes."""

from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def replaced(readme: str, begin: str, end: str, table: str) -> str:
    """The README with `table` in place of what is between the lines `begin` and `end`."""
    before, _, rest = readme.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + table + end + after

"""The README's table of models, from the registries and the tests' cases.

python -m tests.models.table    writes it into the README
"""

from bench.readme import README, replaced
from tests.models.cases import Family, all_families
from worker.loader.families.registry import FAMILIES
from worker.loader.gguf.families import FAMILIES as GGUF_FAMILIES

BEGIN, END = "<!-- models: python -m tests.models.table -->\n", "<!-- end of models -->\n"
HEADER = "| models | `architectures` | attention | GGUF |\n|---|---|---|---|\n"


def table() -> str:
    rows = [_row(family) for family in all_families().values()]
    return HEADER + "".join(sorted(rows, key=str.lower))


def architectures(family: Family) -> list[str]:
    """That the family's cases are of, and what else is read alike."""
    of_cases = {type(make()).__name__ for make in family.cases.values()}
    readers = {FAMILIES[name] for name in of_cases}
    return sorted(name for name, reader in FAMILIES.items() if reader in readers)


def _row(family: Family) -> str:
    names = architectures(family)
    in_gguf = any(gguf.architecture in names for gguf in GGUF_FAMILIES.values())
    listed = ", ".join(f"`{name}`" for name in names)
    return f"| {family.models} | {listed} | {family.attention} | {'yes' if in_gguf else ''} |\n"


def with_table(readme: str) -> str:
    return replaced(readme, BEGIN, END, table())


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))

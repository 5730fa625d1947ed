"""Each architecture has cases, and the README lists them all."""

from tests.models.cases import all_families
from tests.models.table import README, architectures, with_table
from worker.loader.families.registry import FAMILIES
from worker.models.registry import MODELS


def test_every_architecture_has_a_case() -> None:
    tested = [name for family in all_families().values() for name in architectures(family)]
    assert sorted(tested) == sorted(FAMILIES) == sorted(MODELS)


def test_the_readme_is_up_to_date() -> None:
    readme = README.read_text()
    assert readme == with_table(readme), "run: python -m tests.models.table"

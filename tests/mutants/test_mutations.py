"""The list of mutations keeps up with the code."""

from pathlib import Path

import pytest

from tests.mutants.mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_place_is_there(mutation: Mutation) -> None:
    mutation.apply_to(Path(__file__).parents[2], dry=True)

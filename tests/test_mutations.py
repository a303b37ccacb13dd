"""The known mistakes of mutations.toml still fit the package (`make mutations` puts them in)."""

from __future__ import annotations

import pytest

from tests.mutations import ROOT, Mutation, mutations, place_of


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.breaks)
def test_a_known_mistake_has_its_place_and_tests(mutation: Mutation) -> None:
    assert mutation.old != mutation.new
    assert place_of(mutation).is_file()
    for chosen in mutation.tests:
        assert (ROOT / "tests" / chosen.partition("::")[0]).exists(), chosen

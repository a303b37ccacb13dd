"""The known mistakes of mutations.toml still fit the package (`make mutations` puts them in)."""

from __future__ import annotations

from tests.mutations import ROOT, mutations, place_of, texts_of


def test_known_mistakes_have_their_places_and_tests() -> None:
    texts = texts_of(ROOT)
    for mutation in mutations():
        assert mutation.old != mutation.new
        assert place_of(mutation, texts).is_file()
        for chosen in mutation.tests:
            assert (ROOT / "tests" / chosen.partition("::")[0]).exists(), chosen

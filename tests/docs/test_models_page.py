"""docs/models.md says of every family what is computed of it."""

from __future__ import annotations

import pytest

from tests.docs.models_page import HEAD, names, shown, tables

SOME = ["deepseek_v3", "gemma4_text", "gpt_oss", "llama", "mamba", "qwen3_5_text", "bert"]


def test_every_family_of_transformers_is_on_the_page_once() -> None:
    served, refused = shown()
    found = [line.split("|")[1].strip() for line in (served + refused).splitlines() if line.startswith("| ")]
    families = [name for name in found if name not in ("family", "---")]
    assert sorted(families) == names()
    assert len(served.splitlines()) - len(HEAD.splitlines()) >= 90


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", SOME)
def test_a_family_is_on_the_page_as_it_is_computed(family: str) -> None:
    page, computed = shown(), tables([family])
    (line,) = [line for text in computed for line in text.splitlines() if line.startswith(f"| {family} |")]
    assert line in (page[0] + page[1]).splitlines()


@pytest.mark.slow
def test_the_page_is_what_is_computed() -> None:
    assert shown() == tables(names())

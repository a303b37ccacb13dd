from __future__ import annotations

from tests.docs.pages import PYTHON, python_reference


def test_the_committed_page_is_made_from_the_docstrings() -> None:
    page = python_reference()
    assert PYTHON.read_text(encoding="utf-8") == page, "run `make docs`"
    for name in ("train", "resume", "evaluate", "compare", "`Run.rollouts`", "`Run.metrics`", "`Outcome`"):
        assert name in page

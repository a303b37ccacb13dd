"""Docstrings, comments and messages use plain words: see docs/glossary.md for the nouns."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lockstep"

BEGINNINGS = re.compile(r"(Of|What|Whether|Where|How|Whose|Who|Which|Why|As|That)\b")
"""First words that no docstring may have."""
NOUNS = re.compile(r"(The|A|An|All|Each|Every|One|Both|No|None|Some|Any|These|Those|It|Its|Their|For|With|In|To)\b")
"""First words that a function's docstring may not have: it begins with a verb. A property may have them."""

WORDS = {
    r"(?:^|[.:;!?] )Of (?!course)": "another beginning of the sentence",
    r"\b(?:pay|pays|paid)\b": "score, reward",
    r"\bso many\b": "the number, this many",
    r"\bthe very\b": "the same, exactly",
    r"\b(?:anew|afresh)\b": "again, from scratch",
    r"\b(?:amid|unasked|whoever|therein|thereof|hitherto)\b": "a common word",
    r"\bat rest\b": "inactive",
    r"\bclose the ranks\b": "compact the batch",
    r"\bone's own\b": "user-defined, your own",
    r"\b(?:mend|mends|mended)\b": "fix",
    r"\b(?:is|are) (?:others|another) than\b": "differs from",
    r"\b(?:computes?|computed|lies?|written|done) so\b(?! that)": "in this way",
    r"\bhave parted\b|\bparts from\b": "diverge",
    r"\b(?:somebody|nobody)\b": "a caller, no process (name who it is)",
}
"""Patterns that are not used, each with the words to use instead."""


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.Expr, bool]]:
    """Yield the docstrings of modules, classes, functions and fields, each with whether it must begin with a verb."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_function = not isinstance(node, ast.Module | ast.ClassDef)
            is_property = is_function and any("property" in ast.unparse(d) for d in node.decorator_list)
            for place, child in enumerate(node.body):
                if is_text(child):
                    yield child, is_function and place == 0 and not is_property


def texts(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield docstrings, comments, and other strings of three words or more."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 2:
            yield node.lineno, " ".join(node.value.split())


@pytest.fixture(scope="module")
def modules() -> list[tuple[str, str, ast.Module]]:
    read = ((path, path.read_text()) for path in sorted(PACKAGE.rglob("*.py")))
    return [(str(path.relative_to(PACKAGE.parent)), source, ast.parse(source)) for path, source in read]


def test_docstrings_begin_with_a_verb_or_a_noun(modules: list[tuple[str, str, ast.Module]]):
    wrong = []
    for name, _, tree in modules:
        for node, needs_verb in docstrings(tree):
            text = ast.literal_eval(node.value).strip()
            if BEGINNINGS.match(text) or (needs_verb and NOUNS.match(text)):
                wrong.append(f"{name}:{node.lineno}: {text.splitlines()[0][:80]}")
    assert not wrong, "begin a function's docstring with a verb, any other with a noun:\n" + "\n".join(wrong)


def test_words_are_plain(modules: list[tuple[str, str, ast.Module]]):
    any_of_them = re.compile("|".join(WORDS))
    wrong = [
        f"{name}:{line}: {text[max(0, match.start() - 30) : match.end() + 30]}  ->  {instead}"
        for name, source, tree in modules
        for line, text in texts(source, tree)
        if any_of_them.search(text)
        for pattern, instead in WORDS.items()
        if (match := re.search(pattern, text))
    ]
    assert not wrong, "write other words:\n" + "\n".join(wrong)

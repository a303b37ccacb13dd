"""docs/algorithms says what the code does: formulas, names, numbers and links."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from lockstep.config.algorithm import Algorithm
from lockstep.track.catalogue import explain
from tests.algorithms.toys import MU, PI, REWARD, two_step_bandit
from tests.docs.pages import FOLDER, printed, shown, with_formula

ROOT = FOLDER.parents[1]
PAGES = sorted(FOLDER.glob("*.md"))
KINDS = [option.model_fields["kind"].default for option in get_args(get_args(Algorithm)[0])]


@pytest.mark.parametrize("path", with_formula(), ids=lambda path: path.stem)
def test_the_formula_on_a_page_is_the_one_that_its_recipe_prints(path: Path) -> None:
    assert shown(path) == printed(path), "run: python -m tests.docs.pages"


def test_every_algorithm_has_a_page_with_its_recipe_and_formula() -> None:
    stems = {path.stem for path in with_formula()}
    pages = {kind: "reinforce_pp" if kind == "reinforce_pp_baseline" else kind for kind in KINDS}
    assert set(pages.values()) <= stems
    for kind, stem in pages.items():
        text = (FOLDER / f"{stem}.md").read_text(encoding="utf-8")
        assert f"kind: {kind}" in text
        assert all(heading in text for heading in ("equation\n", "## Our functions\n", "## Elsewhere\n"))
        assert f"({stem}.md)" in (FOLDER / "README.md").read_text(encoding="utf-8")


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_functions_and_files_that_a_page_names_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:lockstep|tests|docs|recipes|benchmarks)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
    for row in re.findall(r"^\| [^|]+ \| (`.+?) \| `(lockstep/\S+\.py)` \|$", text, re.MULTILINE):
        named, file = row
        (function, *_) = re.findall(r"`(\w+)`", named)
        assert function in functions(ROOT / file), (function, file)
    for named, file in re.findall(r"^(`\w+`.*) in `(lockstep/\S+\.py)`\.$", text, re.MULTILINE):
        assert set(re.findall(r"`(\w+)`", named)) <= functions(ROOT / file)


METRIC = r"`((?:mismatch|correction|ratio|reward|answer|sampling|kl|critic|grad)/\w+)`"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_metrics_that_a_page_names_are_in_the_catalogue(path: Path) -> None:
    for name in re.findall(METRIC, path.read_text(encoding="utf-8")):
        assert explain(name).meaning


@pytest.mark.parametrize("path", [*PAGES, FOLDER.parent / "limits.md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert target.startswith("http") or (path.parent / target).exists(), target


# --- the bandit of correction.md ----------------------------------------------------------------------------------------
def table(first: str) -> dict[str, list[float]]:
    """The numbers of the table whose header starts with `first`, by row."""
    lines = (FOLDER / "correction.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first)) + 2
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]
    return {name: [float(cell) for cell in cells] for name, *cells in rows}


def weighted(level: str, weight: object) -> list[float]:
    """E_μ[Σ_t weight(w)_t R ∇log π_t], listed; w is each token's own, or the product."""
    found = [0.0, 0.0, 0.0]
    for (first, second), reward in REWARD.items():
        place = 2 if first == "right" else 1
        pairs = [(PI[0], MU[0], first == "right"), (PI[place], MU[place], second == "up")]
        own = [(p / m if yes else (1 - p) / (1 - m)) for p, m, yes in pairs]
        weights = own if level == "token" else [own[0] * own[1]] * 2
        sampled = 1.0
        for _, m, yes in pairs:
            sampled *= m if yes else 1 - m
        for (p, _, yes), w, index in zip(pairs, weights, (0, place), strict=True):
            found[index] += sampled * weight(w) * reward * ((1 - p) if yes else -p)  # type: ignore[operator]
    return found


def test_the_replies_of_the_bandit_are_those_of_the_tests() -> None:
    rows = table("| reply | R |")
    assert len(rows) == len(REWARD)
    for (first, second), reward in REWARD.items():
        place = 2 if first == "right" else 1
        one = [p[0] if first == "right" else 1 - p[0] for p in (PI, MU)]
        two = [p[place] if second == "up" else 1 - p[place] for p in (PI, MU)]
        w_1, w_2 = one[0] / one[1], two[0] / two[1]
        expected = [reward, one[0] * two[0], one[1] * two[1], w_1, w_2, w_1 * w_2]
        assert rows[f"{first}, {second}"] == pytest.approx(expected, abs=5.01e-4)


def test_the_gradients_of_the_bandit_are_the_enumerated_ones() -> None:
    rows, found = table("| | right | up, after left"), two_step_bandit()
    expected = {
        "∇J": found.g_true,
        "g_seq": found.g_seq,
        "g_tok": found.g_tok,
        "no weights": weighted("token", lambda w: 1.0),
        "sequence, truncated at 5": weighted("sequence", lambda w: min(w, 5.0)),
        "sequence, truncated at 2": weighted("sequence", lambda w: min(w, 2.0)),
        "sequence, masked to [0.5, 5]": weighted("sequence", lambda w: w if 0.5 <= w <= 5 else 0.0),
        "token, truncated at 2": weighted("token", lambda w: min(w, 2.0)),
        "token, masked to [0.5, 5]": weighted("token", lambda w: w if 0.5 <= w <= 5 else 0.0),
    }
    assert rows.keys() == expected.keys()
    for name, numbers in expected.items():
        assert rows[name] == pytest.approx(numbers, abs=5.01e-4), name
    assert weighted("sequence", lambda w: w) == pytest.approx(found.g_seq)
    assert weighted("token", lambda w: w) == pytest.approx(found.g_tok)

"""`lockstep compare`: what it says of score files, runs and folders, and what it refuses."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.evaluation.records import score_path, write_score
from lockstep.types import Score
from tests.evaluation.scores import score
from tests.saying import Said

A, B, C = "a" * 16, "b" * 16, "c" * 16


def stored(folder: Path, made: Score, mode: str = "greedy", source: str = "") -> Path:
    path = score_path(folder, made.step, mode)
    write_score(path, dataclasses.replace(made, source=source))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a run keeps its scores: base, step 20 and step 40."""
    for step, weights, right in ((0, A, 100), (20, B, 112), (40, C, 104)):
        marks = [i < right for i in range(202)]
        stored(tmp_path / "run", score(marks, weights=weights, step=step), source=f"run at step {step}")
    return tmp_path / "run"


def test_two_files_are_compared_with_all_that_the_numbers_can_say(run: Path, said: Said) -> None:
    code, out, _ = said("compare", score_path(run, 0, "greedy"), score_path(run, 20, "greedy"))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "sums/id_probe/numeric, greedy"
    assert lines[1].startswith("  A run at step 0: pass@1 49.5 % ± 3.5 [42.7, 56.3]; 202 items, 1 item = 0.495 points")
    assert lines[3].startswith(
        "  pass@1: +5.9 points [+3.0, +9.4], 12 rose, 0 fell, p = 0.00049 (McNemar, exact): improved"
    )
    assert lines[4] == (
        "  1 item = 0.495 points; with 202 items, of which 12 changed, a difference under 4.0 points cannot be told from noise"
    )
    assert lines[5] == "  202 of 202 replies differ in their text"


def test_a_null_result_is_said_plainly(run: Path, said: Said) -> None:
    _, out, _ = said("compare", f"{run}@0", f"{run}@40")
    assert (
        "+2.0 points [+0.5, +4.0], 4 rose, 0 fell, p = 0.12 (McNemar, exact): no effect shown; a true difference from"
        in out
    )
    assert "with 202 items, of which 4 changed, no difference can be told from noise" in out
    same = stored(run.parent / "same", score([i < 100 for i in range(202)], weights=B, step=20))
    _, out, _ = said("compare", score_path(run, 0, "greedy"), same)
    assert (
        "0 rose, 0 fell, p = 1 (McNemar, exact): no effect shown; up to 2% of items may change and none of 202 show it"
        in out
    )


def test_a_run_alone_is_its_base_against_its_last_score(run: Path, said: Said) -> None:
    code, out, _ = said("compare", run)
    assert code == 0
    assert "A run at step 0" in out
    assert "B run at step 40" in out
    (run / "scores" / "step_000000_greedy.json").unlink()
    code, _, err = said("compare", run)
    assert (code, "there is nothing to compare" in err) == (7, True)


def test_items_are_listed_with_what_was_read(tmp_path: Path, said: Said) -> None:
    base, after = score([True, False, False]), score([False, True, False], weights=B)
    read = tuple(dataclasses.replace(r, extracted="12", truncated=True) for r in after.results)
    a, b = stored(tmp_path / "a", base), stored(tmp_path / "b", dataclasses.replace(after, results=read))
    _, out, _ = said("compare", a, b, "--items")
    rows = [line.split() for line in out.splitlines() if line.startswith(("rose", "fell"))]
    assert rows == [
        ["rose", "item/1", "7", "nothing", "12", "(cut", "off)"],
        ["fell", "item/0", "7", "nothing", "12", "(cut", "off)"],
    ]


def test_other_conditions_are_refused_by_name_and_never_called_an_improvement(
    run: Path, tmp_path: Path, said: Said
) -> None:
    better = score([True] * 202, weights=B, step=20, prompt_suffix=" Think.", template_hash="f" * 16)
    other = stored(tmp_path / "other", better)
    base = score_path(run, 0, "greedy")
    code, out, err = said("compare", base, other)
    assert (code, out) == (7, "")
    assert "conditions differ" in err
    assert "prompt_suffix: '' against ' Think.'" in err
    code, out, _ = said("compare", base, other, "--allow-mismatch")
    assert code == 0
    assert "improved" not in out
    assert "p < 0.0001 (McNemar, exact): conditions differ: it is of the conditions and the weights together" in out


def test_folders_pair_by_task_and_mode_and_name_what_has_no_partner(tmp_path: Path, said: Said) -> None:
    for folder, weights in (("one", A), ("two", B)):
        stored(tmp_path / folder, score([True, False], weights=weights))
        stored(tmp_path / folder, score([True, False], weights=weights, mode="sampled(T=1)"), "sampled")
    alone = stored(tmp_path / "two", score([True], weights=B, mode="pass@8(T=0.6,n=8)"), "pass@8")
    code, out, _ = said("compare", tmp_path / "one" / "scores", tmp_path / "two")
    assert code == 0
    assert "2 comparisons: 2 no effect shown. If nothing had changed, 0.1 would look like effects." in out
    assert f"left out, without a partner: {alone}" in out


def test_a_number_that_only_some_modes_have_is_compared_where_it_is(tmp_path: Path, said: Said) -> None:
    """A run that is evaluated greedily too has no pass@4 of that, which is no reason to compare none."""
    many = {"mode": "avg@4(T=0.6,n=4)"}
    for step, weights in ((0, A), (3, B)):
        stored(tmp_path / "run", score([True, False], weights=weights, step=step))
        stored(tmp_path / "run", score([[True] * 4, [False] * 4], weights=weights, step=step, **many), "avg@4")
    code, out, err = said("compare", tmp_path / "run", "--estimate", "avg@4")
    assert (code, err) == (0, "")
    assert "avg@4: +0.0 points" in out
    assert out.count("left out, without avg@4: ") == 1
    assert "step_000003_greedy.json" in out


def test_all_steps_pair_step_by_step(run: Path, tmp_path: Path, said: Said) -> None:
    for step in (0, 20, 40):
        stored(tmp_path / "again", score([i < 100 for i in range(202)], weights=f"{step:016x}", step=step))
    _, out, _ = said("compare", run, tmp_path / "again", "--all-steps")
    assert out.count("sums/id_probe/numeric, greedy") == 3
    _, out, _ = said("compare", run, tmp_path / "again")
    assert out.count("sums/id_probe/numeric, greedy") == 1


def test_identical_replies_are_an_alarm(tmp_path: Path, said: Said) -> None:
    base = score([True, False] * 10)
    twin = dataclasses.replace(base, conditions=dataclasses.replace(base.conditions, weights=B), step=20)
    _, out, _ = said("compare", stored(tmp_path / "a", base), stored(tmp_path / "b", twin))
    assert "alarm: weights not loaded? All 20 replies are the same" in out
    untrained = stored(tmp_path / "c", score([False, True] * 10, step=20))
    _, out, _ = said("compare", stored(tmp_path / "a", base), untrained)
    assert "alarm: after 20 steps the weights are still those of the base" in out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["RUN", "RUN", "RUN"], 2, "a comparison needs two"),
        (["RUN@7"], 7, "no scores of step 7"),
        (["RUN", "--all-steps"], 2, "--all-steps pairs the steps of two runs, but one was given"),
        (["NONE", "RUN"], 7, "there is no such file or folder"),
        (["DAMAGED", "RUN"], 7, "damaged.json: the record's checksum"),
        (["FOREIGN", "RUN"], 7, "foreign.json: this is not a score record"),
        (["RUN", "RUN", "--estimate", "pass@8"], 7, "has no estimate pass@8; it has pass@1"),
    ],
)
def test_mistakes_end_with_their_code(
    args: list[str], code: int, says: str, run: Path, tmp_path: Path, said: Said
) -> None:
    raw = score_path(run, 0, "greedy").read_bytes()
    (tmp_path / "damaged.json").write_bytes(raw.replace(b"item/7", b"item/8"))
    (tmp_path / "foreign.json").write_text('{"accuracy": 0.7331}')
    names = {"DAMAGED": "damaged.json", "FOREIGN": "foreign.json", "NONE": "nothing", "RUN": "run"}
    words = [str(tmp_path / names[a]) if a in names else a.replace("RUN@", f"{run}@") for a in args]
    found, out, err = said("compare", *words)
    assert (found, out) == (code, "")
    assert says in err


def test_comparing_loads_no_torch(run: Path) -> None:
    script = (
        f"import sys; from lockstep.cli import main; main(['compare', {str(run)!r}]); sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr

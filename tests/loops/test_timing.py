"""The time of a run before it starts: measured once, stored by machine and settings, and added up by hand here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.loops import timing
from lockstep.loops.timing import Timing, measure_timing, stored_timing, timing_lines
from tests.loops.runs import recipe
from tests.loops.runs import words as recipe_words
from tests.loops.sft_runs import recipe as sft_recipe

HAND = Timing(
    sample=4.0, update=2.0, live=0.5, sync=0.25, probe=0.2, item=0.1, validate=0.5, save=3.0, tokens=16.0, longest=4.0
)


def test_a_run_is_its_steps_evaluations_and_checkpoints() -> None:
    words = ["task=reasoning_gym", "steps=50", "save.every=20", "eval={every: 25, items: 10}", "rollout.max_tokens=64"]
    one = load(words)
    assert HAND.step == 4.0 + 0.5 * 2.0 + 0.25
    assert HAND.most == 4 * (4.0 + 2.0) + 0.25
    # pushes 0 to 10, 20, 30, 40 and 50 probe: 14 of the 50 after a step
    # steps 0, 25, 50 are evaluated greedily and sampled, 10 items each; saved at 20, 40, 50
    assert HAND.run(one, HAND.step) == pytest.approx(50 * 5.25 - 36 * 0.2 + 3 * 2 * 10 * 0.1 + 3 * 3.0)
    step, whole = timing_lines(HAND, one)
    assert "a step takes about 5.25 s here" in step
    assert "about 5 min; at most 20 min, 24.2 s a step" in whole
    assert "at most" not in timing_lines(replace(HAND, longest=1.0, live=1.0), one)[1]


def test_it_is_measured_once_for_settings_that_change_it(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    given = recipe(tmp_path, tiny_model_dir)
    assert stored_timing(given) is None
    found = measure_timing(given)
    assert min(found.sample, found.update, found.sync, found.item, found.save, found.live) > 0
    assert 0 < found.tokens <= 6
    assert 0 < found.probe < found.sync
    assert found.most >= found.step
    assert measure_timing(given) == stored_timing(given) == found
    assert stored_timing(recipe(tmp_path, tiny_model_dir, "steps=9", "name=other")) == found
    assert stored_timing(recipe(tmp_path, tiny_model_dir, "samples_per_prompt=8")) is None
    assert not (tmp_path / "runs").exists()


def test_a_supervised_step_is_an_update(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    found = measure_timing(sft_recipe(tmp_path, tiny_model_dir))
    assert found.sample == 0
    assert min(found.update, found.sync, found.item, found.validate) > 0
    assert found.live == 1


def test_a_supervised_run_proves_its_weights_only_before_it_measures_or_saves(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    hand = replace(HAND, sample=0.0, live=1.0)
    assert hand.step == 2.0
    words = ["steps=10", "eval={every: 5, items: 3, at_start: true}", "sft.validate_every=4", "save.every=3"]
    modes = "eval.modes=[{name: greedy}]"
    run = sft_recipe(tmp_path, tiny_model_dir, *words, modes)
    # evaluated at 0, 5, 10; validated at 0, 4, 8, 10; saved at 3, 6, 9, 10: proven at 0, 3, 4, 5, 6, 8, 9, 10
    assert hand.run(run, hand.step) == pytest.approx(10 * 2.0 + 3 * 3 * 0.1 + 4 * 3.0 + 8 * 0.25 + 4 * 0.5)


def test_another_version_measures_again(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = recipe(tmp_path, tiny_model_dir)
    here = timing._path(given)
    monkeypatch.setattr(timing, "__version__", "0.0.1")
    assert timing._path(given) != here


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["{kind: colocated, gpus: 2}", "{kind: split, train: 1, rollout: 1}"])
def test_it_is_measured_on_the_workers_of_the_run(
    tmp_path: Path, tiny_model_dir: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    alone = measure_timing(recipe(tmp_path, tiny_model_dir))
    words = f"""
import sys
from lockstep.cluster.process_workers import ProcessWorkers
from lockstep.config.load import load
from lockstep.loops.timing import measure_timing
whole, sizes = ProcessWorkers.__init__, []
ProcessWorkers.__init__ = lambda self, *a, **k: (whole(self, *a, **k), sizes.append(self.size))[0]
found = measure_timing(load(sys.argv[1:]))
assert sizes == [2], sizes
assert min(found.sample, found.update, found.sync, found.item, found.save) > 0, found
assert found.tokens == {alone.tokens}, found
"""
    given = [*recipe_words(tmp_path, tiny_model_dir), f"placement={placement}", "device=cpu"]
    subprocess.run([sys.executable, "-c", words, *given], check=True)

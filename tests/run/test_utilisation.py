from __future__ import annotations

import os
import time

import pytest

from lockstep.config.load import load
from lockstep.config.metric import built_in_rules
from lockstep.run import utilisation
from lockstep.run.utilisation import Utilisation, gpu_reader
from tests.health.replay import replay


def test_a_process_that_computes_is_busy_and_one_that_sleeps_is_not() -> None:
    watch, cores = Utilisation(None), len(os.sched_getaffinity(0))
    until = time.process_time() + 0.4
    while time.process_time() < until:
        pass
    busy = watch.step()["cpu/utilisation"]
    time.sleep(0.5)
    idle = watch.step()["cpu/utilisation"]
    assert 0.05 / cores < busy <= 1
    assert idle < 0.5 * busy


def test_readings_of_a_gpu_are_averaged_over_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilisation, "EVERY_S", 0.01)
    values = iter([(0.2, 0.5), (0.6, 0.9)])
    watch = Utilisation(lambda: [next(values)])  # the third reading fails, as a driver may
    time.sleep(0.5)
    watch.close()
    found = watch.step()
    assert found["gpu/utilisation"] == pytest.approx(0.4)
    assert (found["gpu/memory_share"], found["gpu/seen"]) == (0.9, 2.0)
    assert "gpu/utilisation" not in watch.step()


def test_a_step_that_ends_while_a_gpu_is_read_keeps_no_reading_of_the_step_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(utilisation, "EVERY_S", 0.01)
    ended = []

    def read() -> list[utilisation.Reading]:
        if len(ended) < 3:  # as another thread would
            ended.append(watch.step().get("gpu/seen", 0.0))
            return [(0.5, 0.5)]
        raise RuntimeError("no more")

    watch = Utilisation(read)
    time.sleep(0.5)
    watch.close()
    assert ended == [0, 1, 1]
    assert watch.step()["gpu/seen"] == 1


def test_a_gpu_that_waits_for_the_grader_is_named() -> None:
    recipe = load(["recipes/smoke.yaml"])
    waits = {"time/grade_share": 0.6, "gpu/utilisation": 0.05, "gpu/seen": 12.0}
    alarms = replay(recipe, [(step, waits) for step in range(1, 8)])
    assert [(one.rule.name, one.seen[-1].step) for one in alarms] == [("idle_gpu", 5)]
    assert "the GPU idles while the grader works" in alarms[0].what
    assert "gpu/utilisation 0.05" in alarms[0].what
    assert "workers" in built_in_rules()["idle_gpu"].advice
    assert replay(recipe, [(step, {"time/grade_share": 0.6}) for step in range(1, 8)]) == []  # no GPU idles on a CPU


@pytest.mark.gpu
def test_a_gpu_is_read() -> None:
    read = gpu_reader()
    assert read is not None
    (busy, memory), *_ = read()
    assert 0 <= busy <= 1
    assert 0 < memory <= 1

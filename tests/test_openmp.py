"""How waiting threads are set: by what else computes on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep import openmp


@pytest.mark.parametrize(
    ("line", "others"),
    [("0.10 0.20 0.30 1/345 678", 0), ("0.10 0.20 0.30 3/345 678", 2), ("", 0), ("0.1 0.2 0.3 x/2 1", 0)],
)
def test_the_number_of_running_threads_is_read_from_the_kernel(tmp_path: Path, line: str, others: int) -> None:
    (tmp_path / "loadavg").write_text(line)
    assert openmp.running_elsewhere(tmp_path / "loadavg") == others
    assert openmp.running_elsewhere(tmp_path / "absent") == 0


def test_threads_sleep_beside_other_work_and_spin_briefly_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for others, found in ((0, {"GOMP_SPINCOUNT": "10000"}), (1, {"OMP_WAIT_POLICY": "PASSIVE"})):
        monkeypatch.setattr(openmp, "running_elsewhere", lambda others=others: others)
        environment: dict[str, str] = {}
        openmp.set_waiting(environment)
        assert environment == found

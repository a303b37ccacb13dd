"""How waiting threads are set: by what else computes on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_tiles_are_left_out_unless_the_user_says_what_onednn_may_use() -> None:
    for environment, found in (({}, "AVX512_CORE_BF16"), ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2")):
        openmp.leave_out_tiles(environment)
        assert environment["ONEDNN_MAX_CPU_ISA"] == found


def test_a_row_of_a_bf16_product_does_not_depend_on_the_number_of_rows() -> None:
    """With Intel's AMX it does, in some last bits; the variable counts from a process's first product on."""
    program = """
import torch
from lockstep.device import prepare_process
prepare_process(torch.device("cpu"), 1)
torch.manual_seed(0)
x, w = torch.randn(600, 576).bfloat16(), torch.randn(1536, 576).bfloat16()
whole = x @ w.T
print(sum(int((x[:rows] @ w.T != whole[:rows]).sum()) for rows in (1, 2, 16, 31, 33, 64, 300)))
"""
    environment = {name: value for name, value in os.environ.items() if name != openmp.INSTRUCTIONS}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]

"""Choosing the device, and what the process is set to."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from lockstep.device import COLLECT_AFTER, choose_device, keep_objects, prepare_process, use_gpu
from lockstep.errors import ConfigError, MachineError


def test_the_device_that_is_asked_for():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="torch finds no GPU on this machine"):
        choose_device("cuda")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_prepared_process():
    """Threads, deterministic kernels, floats as ever; and a freed block is used again instead of being faulted in anew."""
    code = """
import resource, torch
from lockstep.device import prepare_process
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(16 * 2**20)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = faults()
prepare_process(torch.device("cpu"), 3)
faults()
print(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), 1e-310 / 10 > 0, first, faults())
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert output[:2] == ["3", "True"]
    assert output[2] == "True"  # denormal numbers are left alone: the setting would be the whole process's
    assert int(output[4]) < int(output[3]) / 10


def test_objects_that_are_kept_are_not_looked_at_until_that_is_undone():
    gc.collect()
    frozen, before = gc.get_freeze_count(), gc.get_threshold()
    undo = keep_objects()
    try:
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold() == (COLLECT_AFTER, *before[1:])
    finally:
        undo()
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


def test_on_a_gpu_sums_of_products_are_not_rounded_to_half_precision():
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    try:
        settings.allow_bf16_reduced_precision_reduction = True
        prepare_process(torch.device("cuda"), None)
        assert not settings.allow_bf16_reduced_precision_reduction
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


def test_a_gpu_that_cannot_compute_is_named_before_others_wait_for_it():
    with pytest.raises(MachineError, match=r"GPU 99: it reports an error before any work: \S"):
        use_gpu(99)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(("visible", "seen"), [("", "1"), ("4,6", "6")])
def test_a_process_may_see_its_own_gpu_alone(visible: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError, match="GPU 1: it reports an error"):
        use_gpu(1, alone=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen

"""What is said of GPUs, drivers and torch builds that are not here, from what nvidia-smi and torch print of them."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config.schema import Recipe
from lockstep.doctor import gpu
from lockstep.doctor.check import Check
from lockstep.doctor.gpu import Build, Gpu, Process
from lockstep.doctor.run import require_machine
from lockstep.errors import MachineError

SMI = "0, NVIDIA H200, 9.0, 580.65.06, 143771, 4, GPU-a\n1, NVIDIA H200, 9.0, 580.65.06, 143771, 90112, GPU-b\n"
H200 = Gpu(0, "NVIDIA H200", 9.0, "580.65.06", 143771.0, 4.0, "GPU-a")
CUDA = Build("2.11.0+cu130", "13.0", ("sm_75", "sm_80", "sm_90", "sm_100", "compute_120"), True)
CPU = Build("2.13.0+cpu", None, (), False)


def test_lines_of_nvidia_smi_are_read() -> None:
    assert gpu.parse_gpus(SMI) == [H200, replace(H200, index=1, used=90112.0, uuid="GPU-b")]
    assert gpu.parse_gpus("0, Orin, 8.7, 540.4.0, [N/A], [N/A], GPU-c\n")[0].total == 0.0
    assert gpu.parse_gpus("No devices were found\n") == []
    assert gpu.parse_processes("GPU-a, 4711, python, with commas, 2048\nGPU-b, 12, [N/A], [N/A]\n") == [
        Process(4711, "python, with commas", 2048.0, "GPU-a"),
        Process(12, "[N/A]", 0.0, "GPU-b"),
    ]


@pytest.mark.parametrize(
    ("build", "gpus", "device", "verdict", "found", "fix"),
    [
        (CPU, [], "auto", "ok", "built without CUDA; no GPU here", ""),
        (CPU, [], "cuda", "fail", "no GPU here", "device=cpu"),
        (CPU, [H200], "auto", "warn", "built without CUDA, though there is NVIDIA H200", "download.pytorch.org/whl/cu"),
        (CPU, [H200], "cuda", "fail", "though there is NVIDIA H200", "download.pytorch.org/whl/cu"),
        (CPU, [H200], "cpu", "ok", "the recipe takes the CPU", ""),
        (CUDA, [H200], "auto", "ok", "built for CUDA 13.0, driver 580.65.06", ""),
        (CUDA, [replace(H200, driver="570.124.06")], "auto", "fail", "driver 570.124.06, too old", "580.65 or newer"),
        (replace(CUDA, cuda="12.8"), [replace(H200, driver="525.125.06")], "auto", "ok", "driver 525.125.06", ""),
        (replace(CUDA, works=False), [H200], "auto", "warn", "torch finds no GPU", ""),
        (replace(CUDA, works=False), [H200], "cuda", "fail", "torch finds no GPU", ""),
        (CUDA, [replace(H200, name="Tesla V100", capability=7.0)], "auto", "fail", "no code for Tesla V100", "pytorch.org"),
        (CUDA, [], "auto", "ok", "the driver cannot be asked", ""),
    ],
)  # fmt: skip
def test_torch_and_driver_must_go_together(
    build: Build, gpus: list[Gpu], device: str, verdict: str, found: str, fix: str
) -> None:
    check = gpu.judge_build(build, gpus, device)  # type: ignore[arg-type]
    assert check.verdict == verdict
    assert found in check.found
    assert fix in check.fix
    assert bool(check.fix) == (verdict != "ok")


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        (7.0, False),
        (7.5, True),
        (8.0, True),
        (8.6, True),
        (9.0, True),
        (10.0, True),
        (10.3, True),
        (11.0, False),
        (12.0, True),
    ],
)
def test_code_runs_on_its_own_major_version_or_is_compiled_for_newer_ones(capability: float, runs: bool) -> None:
    assert gpu.runs_on(CUDA.architectures, capability) is runs


def test_code_for_one_gpu_alone_runs_on_that_alone() -> None:
    assert gpu.runs_on(("sm_90a",), 9.0)
    assert not gpu.runs_on(("sm_100a",), 10.3)


def test_a_gpu_that_others_use_is_named_with_them() -> None:
    assert gpu.judge_gpu(H200) == Check("gpu 0", "ok", "NVIDIA H200, capability 9.0, 140.4 of 140.4 GiB free")
    taken = gpu.judge_gpu(replace(H200, used=90112.0))
    assert taken.verdict == "warn"
    assert "52.4 of 140.4 GiB free: 88.0 GiB are taken" in taken.found
    assert gpu.judge_gpu(replace(H200, name="T4", capability=7.5)).verdict == "warn"
    seen = gpu.judge_processes([Process(10, "python", 90112.0), Process(7, "python", 512.0)], frozenset({7}), [H200])
    assert (seen.verdict, seen.found) == ("warn", "other processes (1): 10 python (88.0 GiB)")
    assert gpu.judge_processes([Process(7, "python", 90112.0)], frozenset({7}), [H200]).verdict == "ok"
    hidden = gpu.judge_processes([], frozenset(), [replace(H200, used=90112.0)])
    assert hidden.verdict == "warn"
    assert "outside this container" in hidden.found
    assert gpu.judge_processes([], frozenset(), [H200]).verdict == "ok"


def smi(folder: Path, body: str) -> None:
    """Put a program called nvidia-smi into `folder`."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_nvidia_smi_is_asked_and_may_be_absent_broken_or_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (gpu.gpus_here(), gpu.gpu_processes()) == ([], [])
    (tmp_path / "gpus").write_text(SMI)
    smi(tmp_path, f"case $1 in --query-gpu*) /bin/cat {tmp_path}/gpus;; *) echo GPU-b, 999999, vllm, 90112;; esac")
    assert [one.used for one in gpu.gpus_here()] == [4.0, 90112.0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    names = {check.name: check for check in gpu.check_gpu()}
    assert names["gpu processes"].found == "other processes (1): 999999 vllm (88.0 GiB)"
    assert names["compiler"].verdict == "warn"  # PATH has none
    assert list(names) == ["torch", "gpu 0", "gpu processes", "compiler"]
    assert [check.name for check in gpu.check_gpu("cpu")] == ["torch"]
    smi(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert gpu.gpus_here() == []
    smi(tmp_path, "exec /bin/sleep 30")
    monkeypatch.setattr(gpu, "SMI_SECONDS", 0.2)
    (check,) = gpu.check_gpu()
    assert (check.verdict, check.found) == ("fail", "nvidia-smi gave no answer in 0.2 s: the driver hangs")


def test_a_run_does_not_start_on_a_gpu_that_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3-34: the GPU that is taken is looked at, not its neighbour; --allow lets the run start."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    (tmp_path / "gpus").write_text(SMI)
    smi(tmp_path, f"case $1 in --query-gpu*) /bin/cat {tmp_path}/gpus;; *) echo GPU-b, 999999, vllm, 90112;; esac")
    with pytest.raises(
        MachineError, match=r"gpu processes: other processes \(1\): 999999 vllm \(88.0 GiB\)"
    ) as refused:
        require_machine(Recipe())
    assert "--allow busy_gpu" in str(refused.value.fix)
    (warned,) = [check for check in require_machine(Recipe(allow=["busy_gpu"])) if check.name == "gpu processes"]
    assert warned.found == "other processes (1): 999999 vllm (88.0 GiB)"
    for recipe in (Recipe(device="cpu"), Recipe(allow=[])):  # no GPU; then the free one of the two
        assert "gpu processes" not in [check.name for check in require_machine(recipe)]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,1")
    with pytest.raises(MachineError, match="999999 vllm"):
        require_machine(Recipe(placement={"kind": "colocated", "gpus": 2}))  # type: ignore[arg-type]
    smi(tmp_path, f"case $1 in --query-gpu*) /bin/cat {tmp_path}/gpus;; *) echo GPU-a, 999999, vllm, 90112;; esac")
    for chosen in ("", "-1", "7", "GPU-x"):  # no GPU is taken, whoever is on the first
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert gpu.judge_build(CPU, [], "cuda").found.endswith(f"no GPU here (CUDA_VISIBLE_DEVICES = {chosen!r})")
        assert "gpu processes" not in [check.name for check in require_machine(Recipe())]


def test_an_allocator_that_does_not_go_with_vllm_is_found() -> None:
    """S1-21: also under its newer name, and also with other parts around it."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = "max_split_size_mb:64,expandable_segments:True"
        assert gpu.check_allocator({name: value}, vllm=False).verdict == "ok"
        check = gpu.check_allocator({name: value}, vllm=True)
        assert check.verdict == "warn"
        assert check.fix.startswith(f"unset {name}")
        assert gpu.check_allocator({name: "max_split_size_mb:64"}, vllm=True).verdict == "ok"
    both = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert "two names of one setting" in gpu.check_allocator(both, vllm=False).found
    assert gpu.check_allocator({}, vllm=True) == Check("allocator", "ok", "no setting")


def test_the_environment_is_looked_at_and_not_changed() -> None:
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    gpu.check_allocator(environment, vllm=True)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_package_whose_binary_is_of_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2-38: an undefined symbol is an ImportError of a package that is there."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c105ErrorC2E')\n")
    error = gpu.broken_import("flash_attn")
    assert error == "ImportError: undefined symbol: _ZN3c105ErrorC2E"
    check = gpu.judge_flash_attention(error)
    assert check.verdict == "fail"
    assert "pip uninstall flash-attn" in check.fix
    (tmp_path / "flash_attn.py").write_text("")
    assert gpu.judge_flash_attention(gpu.broken_import("flash_attn")).verdict == "ok"
    (tmp_path / "flash_attn.py").write_text("import os; os._exit(139)\n")
    assert gpu.broken_import("flash_attn") == "its import ended with 139"

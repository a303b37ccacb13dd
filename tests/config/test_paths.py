from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from lockstep.config.load import load_run

load_run([sys.argv[1], "task=reasoning_gym"])
import huggingface_hub.constants as hub
from lockstep.models.cache import cache_root

print(hub.HF_HUB_CACHE, cache_root())
"""


def caches(tmp_path: Path, **environment: str) -> list[str]:
    (tmp_path / "r.yaml").write_text(f"paths: {{cache: {tmp_path}/scratch}}\n")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LOCKSTEP", "XDG"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "r.yaml")], env={**plain, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_one_setting_places_all_caches_before_anything_reads_them(tmp_path: Path) -> None:
    assert caches(tmp_path) == [f"{tmp_path}/scratch/huggingface/hub", f"{tmp_path}/scratch/lockstep"]


def test_a_variable_of_the_environment_wins(tmp_path: Path) -> None:
    found = caches(tmp_path, LOCKSTEP_CACHE=f"{tmp_path}/own")
    assert found == [f"{tmp_path}/scratch/huggingface/hub", f"{tmp_path}/own"]


@pytest.mark.parametrize(
    "setting",
    [
        "model.path=~nouser/x",
        "paths.checkpoints=~nouser/x",
        "runs_dir=~nouser/x",
        "task={kind: python, path: ~nouser/a.py:f}",
    ],
)
def test_the_home_of_an_unknown_user_is_refused_by_its_setting(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"path|runs_dir") as caught:
        load([setting])
    assert "~nouser is not a user of this machine" in str(caught.value)


@pytest.mark.parametrize("name", ["model.path", "runs_dir", "warm_start"])
def test_a_name_that_no_file_can_have_is_refused_by_its_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: the name of a file or folder has at most 255 bytes"):
        load([f"{name}=./{'é' * 130}"])


def test_a_tilde_is_the_home_folder() -> None:
    """Kept as it is, it would be a folder called ~ in the present one."""
    rollouts = "sft={rollouts: {run: ~/runs/a}}"
    recipe = load(["runs_dir=~/runs", "warm_start=~/runs/a", "adapter={kind: lora, start: ~/b}", "loop=sft", rollouts])
    home = Path.home()
    assert (recipe.runs_dir, recipe.warm_start) == (f"{home}/runs", f"{home}/runs/a")
    assert recipe.sft is not None
    assert recipe.sft.rollouts is not None
    assert (recipe.sft.rollouts.run, recipe.adapter.model_dump()["start"]) == (f"{home}/runs/a", f"{home}/b")

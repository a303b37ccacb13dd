"""Settings that mean nothing in a model are refused by its structure alone, by doctor and before a run has a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.load import load
from lockstep.loops.start import start_run
from lockstep.plan.fit import misfits
from tests.loops.runs import words

PISSA = ("adapter.kind=lora", "adapter.init=pissa")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("adapter.kind=lora", "adapter.targets=[q_prj]"), "'q_prj' names no linear layer"),
        (("adapter.kind=peft", "adapter.method=oft", "adapter.targets=[q_prj]"), "'q_prj' names no linear layer"),
        (("adapter.kind=lora", "adapter.targets=[lm_head]"), "lm_head"),
        ((*PISSA, "adapter.rank=1024"), "rank 1024 is more than the"),
        (("numerics.train=mxfp4-w4a4", "numerics.exclude=[foo]"), "'foo' names no linear layer"),
        (("noise.stages=3", "noise.targets=[foo]"), "foo"),
        (("rollout.max_tokens=100000",), "rollout.max_tokens = 100000 leaves no room for a prompt"),
        (("save.keep_best=reward/maen",), "no such metric: reward/maen; did you mean reward/mean"),
        (("save.keep_best=loss/policy",), "more of it is no better model"),
        (("save.keep_best=validation/logprob",), "or it is not measured"),  # of loop = rl
        (("eval.max_tokens=100000",), "eval.max_tokens = 100000 leaves no room for a prompt"),
    ],
)
def test_what_means_nothing_is_found_without_weights(
    tiny_model_dir: Path, tmp_path: Path, overrides: tuple[str, ...], says: str
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((tiny_model_dir / "config.json").read_bytes())  # no weights at all
    (error,) = misfits(load(words(tmp_path, bare, *overrides)))
    assert says in str(error)
    assert error.fix
    with pytest.raises(type(error)):
        start_run(load(words(tmp_path, tiny_model_dir, *overrides)))
    assert not (tmp_path / "runs").exists()


def test_all_of_them_are_shown_at_once(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = words(tmp_path, tiny_model_dir, "adapter.kind=lora", "adapter.targets=[nope]", "rollout.max_tokens=100000")
    assert main(["doctor", *recipe]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail  settings")]
    assert len(failed) == 2
    assert "'nope' names no linear layer" in failed[0]
    assert main(["plan", *recipe]) == 0
    out = capsys.readouterr().out
    assert "A run would be refused" in out
    assert "'nope' names no linear layer" in out


@pytest.mark.parametrize("lie", [{"hidden_size": "64"}, {"max_position_embeddings": None}, {"hidden_size": -4}])
def test_a_config_that_lies_is_the_loaders_to_refuse(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lie: dict[str, object]
) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "lie")
    config = json.loads((tmp_path / "lie" / "config.json").read_text())
    (tmp_path / "lie" / "config.json").write_text(json.dumps(config | lie))
    assert misfits(load(words(tmp_path, tmp_path / "lie"))) == []
    assert main(["train", *words(tmp_path, tmp_path / "lie")]) == 4
    assert "Traceback" not in capsys.readouterr().err


def test_a_recipe_that_fits_and_a_model_that_is_not_here_have_none(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert misfits(load(words(tmp_path, tiny_model_dir, *PISSA, "adapter.rank=4"))) == []
    assert misfits(load(words(tmp_path, tmp_path / "gone", "adapter.kind=lora", "adapter.targets=[nope]"))) == []


@pytest.mark.parametrize(
    "metric", ["reward/mean", "answer/correct", "answer/steps", "task/file/reward", "eval/greedy/accuracy"]
)
def test_the_best_may_be_kept_by_what_is_better_the_higher_it_is(metric: str) -> None:
    assert misfits(load([f"save.keep_best={metric}", "model.path=/nowhere"])) == []

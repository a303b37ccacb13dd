"""An adapter run proves at its end that its base is what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.build.parts import Parts
from lockstep.errors import LearnerError
from lockstep.loops import start as running
from tests.gallery import Gallery
from tests.loops.runs import LORA, NO_EVAL, events, recipe, trained


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_the_run_says_that_the_base_is_unchanged(
    init: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    run = trained(tmp_path, tiny_model_dir, *LORA, NO_EVAL, f"adapter.init={init}", "steps=1")
    (line,) = events(run, "base")
    assert line.startswith("base unchanged: 20 frozen tensors, fingerprint ")
    assert line.endswith(" at start and end")
    log = (run.path / "log.txt").read_text()
    assert line in log
    assert ("singular value" in log) == (init == "pissa")


def test_a_run_that_trains_everything_has_no_base(gallery: Gallery) -> None:
    assert events(gallery.run("plain"), "base") == []


def test_a_base_that_changed_stops_the_run(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one frozen weight, written behind torch's back while the run trains."""
    train = running.train

    def meddling(parts: Parts, *rest: object) -> None:
        train(parts, *rest)  # type: ignore[arg-type]
        norm = dict(parts.policy.model.named_parameters())["base_model.model.model.norm.weight"]
        norm.data.view(torch.int32)[5] ^= 1

    monkeypatch.setattr(running, "train", meddling)
    with pytest.raises(LearnerError, match=r"1 frozen weights changed in this run, the first is model.norm.weight"):
        running.start_run(recipe(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "steps=1"))

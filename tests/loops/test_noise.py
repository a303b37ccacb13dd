"""Runs with noise: when it is on, what of it is seen, and that nothing of it stays."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.build.build import build_parts, build_task_of
from lockstep.build.parts import Parts
from lockstep.errors import EngineError, SyncError
from lockstep.loops.noise import noisy_rollouts
from lockstep.loops.start import resume_run
from lockstep.noise.apply import is_noisy
from lockstep.seeds import seed_for
from lockstep.sync.fingerprint import fingerprint
from lockstep.track.rundir import RunDirectory
from tests.loops.runs import LORA, NO_EVAL, column, events, fingerprints, numbers, recipe, trained

NOISE = ("steps=6", "save.keep_last=6", "noise={stages: 3, sigma_start: 0.05, sigma_end: 0.02}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> RunDirectory:
    return trained(tmp_path_factory.mktemp("noise"), tiny_model_dir, *NOISE)


def test_the_metrics_follow_the_schedule(run: RunDirectory) -> None:
    assert column(run, "noise/stage") == [0, 0, 1, 1, 2, 2]
    assert column(run, "noise/sigma") == pytest.approx([0, 0, 0.05, 0.05, 0.02, 0.02])
    assert column(run, "noise/norms") == [0, 0, 4, 4, 4, 4]
    # The tiny model's norms are close to 1 in 64 numbers each, so the share is about sigma.
    assert column(run, "noise/share") == pytest.approx([0, 0, 0.05, 0.05, 0.02, 0.02], rel=0.2)
    assert column(run, "noise/lost") == [0] * 6


def test_samples_are_of_the_noisy_model_and_proofs_of_the_clean_one(run: RunDirectory) -> None:
    gaps = column(run, "mismatch/mean_abs_dlogp")
    assert max(gaps[:2]) < 1e-5 < 1e-3 < min(gaps[2:])
    assert max(column(run, "sync/probe_mean")) < 1e-4  # every sync of this run has a probe


def test_the_first_step_is_that_of_a_run_without_noise(run: RunDirectory, tmp_path: Path, tiny_model_dir: Path) -> None:
    plain = trained(tmp_path, tiny_model_dir, NO_EVAL)
    assert fingerprints(plain)[2] == fingerprints(run)[2]
    assert fingerprints(plain)[3] != fingerprints(run)[3]


def test_the_log_says_what_is_noisy(run: RunDirectory) -> None:
    log = (run.path / "log.txt").read_text()
    assert "noise (AQN) on 4 norms of the sampling model, such as model.layers.0.input_layernorm.weight" in log
    assert "sigma 0, 0.05, 0.02, 2 steps each" in log
    assert "rollout log-probabilities are those of the noisy model" in log


@pytest.mark.parametrize(
    ("adapter", "transport"), [((), "copy"), (LORA, "shared"), pytest.param(LORA, "copy", marks=pytest.mark.slow)]
)
def test_every_transport_and_adapter_gives_the_same_noise(
    run: RunDirectory, adapter: tuple[str, ...], transport: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    other = trained(tmp_path, tiny_model_dir, *NOISE, *adapter, f"sync.transport={transport}", NO_EVAL)
    assert column(other, "noise/norms") == [0, 0, 4, 4, 4, 4]
    if not adapter:
        assert fingerprints(other)[6] == fingerprints(run)[6]


def test_a_run_that_is_resumed_goes_on_in_its_stage(run: RunDirectory, tmp_path: Path) -> None:
    """The run as it was after step 3, amid a stage: what follows is drawn again, and is the same."""
    shutil.copytree(run.path, tmp_path / "run")
    other = RunDirectory.open(tmp_path / "run")
    for step in (4, 5, 6):
        shutil.rmtree(other.checkpoints_path / f"step_{step:06d}")
    again = resume_run(other.path, allow_fallback=True)
    assert events(again, "resume") == ["at step 3"]
    assert column(again, "noise/stage") == [0, 0, 1, 1, 2, 2]
    assert fingerprints(again) == fingerprints(run)
    assert numbers(again) == numbers(run)


# --- the context ----------------------------------------------------------------------------------------------------
@pytest.fixture
def parts(tmp_path: Path, tiny_model_dir: Path) -> Parts:
    chosen = recipe(tmp_path, tiny_model_dir, *NOISE)
    made = build_parts(chosen, build_task_of(chosen))
    made.sync.push(made.learner, made.engine)
    return made


def test_while_it_is_on_nothing_else_can_be_done_with_the_weights(
    parts: Parts, tmp_path: Path, tiny_model_dir: Path
) -> None:
    chosen = recipe(tmp_path / "again", tiny_model_dir, *NOISE)
    before = fingerprint(parts.learner.weights()).combined
    with noisy_rollouts(parts, chosen, 3) as metrics:
        assert metrics["noise/stage"] == 1
        noise = parts.engine.forward.noise
        assert noise is not None
        assert noise.seed == seed_for(chosen.seed, "noise", parts.learner.version)
        assert is_noisy(parts.policy.model.parameters())
        for call in (
            lambda: parts.sync.push(parts.learner, parts.engine),
            lambda: parts.sync.verify(parts.learner, parts.engine),
            lambda: parts.sync.negative_control(parts.learner, parts.engine),
            lambda: parts.learner.logprobs([(5, 6, 7)]),
            lambda: parts.learner.response_logprobs([], 1.0),
            lambda: parts.learner.weights(),
            lambda: list(parts.engine.weights()),
        ):
            with pytest.raises(EngineError, match="noise is applied"):
                call()
    assert parts.engine.forward.noise is None
    assert fingerprint(parts.learner.weights()).combined == before
    parts.sync.verify(parts.learner, parts.engine)


def test_an_error_amid_rollouts_takes_it_off(parts: Parts, tmp_path: Path, tiny_model_dir: Path) -> None:
    chosen = recipe(tmp_path / "again", tiny_model_dir, *NOISE)
    before = fingerprint(parts.learner.weights()).combined
    with (
        pytest.raises(ZeroDivisionError),
        noisy_rollouts(parts, chosen, 5),
    ):
        _ = 1 / 0
    assert fingerprint(parts.learner.weights()).combined == before


def test_noise_that_stays_is_noticed(parts: Parts, tmp_path: Path, tiny_model_dir: Path) -> None:
    """An engine that forgets to take a part of it off: the fingerprints of the norms say so."""
    chosen = recipe(tmp_path / "again", tiny_model_dir, *NOISE)
    weight = parts.policy.model.get_parameter("model.layers.1.post_attention_layernorm.weight")

    class Forgetful:
        """The engine, which leaves one number of one norm as the noise made it."""

        def __init__(self) -> None:
            self.noisy = torch.zeros(())

        def __getattr__(self, name: str) -> object:
            return getattr(parts.engine, name)

        def set_forward(self, forward: object) -> object:
            report = parts.engine.set_forward(forward)  # type: ignore[arg-type]
            with torch.no_grad():
                if parts.engine.forward.noise is None:
                    weight[0] = self.noisy
                else:
                    self.noisy = weight[0].clone()
            return report

    forgetful = replace(parts, engine=Forgetful())  # type: ignore[arg-type]
    with (
        pytest.raises(
            SyncError,
            match=r"1 of 4 normalisation weights differ .* model\.layers\.1\.post_attention_layernorm",
        ),
        noisy_rollouts(forgetful, chosen, 5),
    ):
        pass

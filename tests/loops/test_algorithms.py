"""Real runs of every algorithm: they train, say what they did, and are the same after a stop."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lockstep.checkpoint.store import open_checkpoint
from lockstep.learner.learner import TorchLearner
from lockstep.loops.start import resume_run
from lockstep.track.catalogue import find
from lockstep.track.rollouts import read_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import proof_from_json, read_metrics
from tests.cluster.moe import write_tiny_moe
from tests.loops.runs import LORA, NO_EVAL, events, fingerprints, numbers, same, trained
from tests.loops.test_resume import stopped

KINDS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "max_rl",
    "reinforce",
)
ALWAYS = (
    *("entropy/mean", "loss/policy", "ratio/max", "advantage/std", "grad/norm", "lr"),
    *(
        f"mismatch/{name}"
        for name in (
            "mean_abs_dlogp", "max_abs_dlogp", "k1", "k3", "token_mult_prob_error", "max_weight", "ess_tokens",
            "ess_sequences",
        )
    ),
)  # fmt: skip
SEVERAL = ("update.samples_per_update=4", "update.epochs=2", "optimizer.lr=0.03")


def column(run: RunDirectory, name: str) -> list[float]:
    return [row.metrics[name] for row in read_metrics(run) if row.step]


@pytest.mark.sampled("*-one-update", "grpo-*", "ppo-*")
@pytest.mark.parametrize("updates", [(), SEVERAL], ids=["one-update", "four-updates"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_trains(tmp_path: Path, tiny_model_dir: Path, kind: str, updates: tuple[str, ...]) -> None:
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=2", f"algorithm.kind={kind}", *updates)
    rows = read_metrics(run)
    assert [row.step for row in rows] == [1, 2]
    assert len(set(fingerprints(run).values())) == 2
    for row in rows:
        assert set(ALWAYS) <= row.metrics.keys()
        assert [name for name in row.metrics if find(name) is None] == []
        assert all(math.isfinite(value) for value in row.metrics.values())
        assert row.metrics["batch/optimizer_steps"] == (4 if updates else 1)
        assert row.metrics["grad/norm"] > 0
        assert 0.99 < row.metrics["mismatch/ess_sequences"] <= 1
        assert (row.metrics["ratio/max"] > 1) == bool(updates), "with one update the ratio is 1 by construction"
    log = run.log_path.read_text()
    assert all(line in log for line in json.loads(run.manifest_path.read_text())["formula"].splitlines())


class Counting:
    """Counts the forward passes that precede updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.old = self.reference = 0
        passes, real = self, TorchLearner.response_logprobs

        def counted(learner, sequences, temperature, *, reference=False, prefix=0):  # type: ignore[no-untyped-def]
            passes.reference += reference
            passes.old += not reference
            return real(learner, sequences, temperature, reference=reference, prefix=prefix)

        monkeypatch.setattr(TorchLearner, "response_logprobs", counted)


IN_REWARD = ("algorithm.kind=reinforce_pp", "algorithm.kl.placement=reward", "algorithm.kl.estimator=k1")


@pytest.mark.parametrize("replay", ["false", "true"])
def test_gspo_trains_a_mixture_of_experts(tmp_path: Path, replay: str) -> None:
    write_tiny_moe(tmp_path / "moe")
    settings = ("steps=2", "algorithm.kind=gspo", f"update.replay_routing={replay}", *SEVERAL)
    run = trained(tmp_path, tmp_path / "moe", NO_EVAL, *settings)
    assert len(set(fingerprints(run).values())) == 2
    for row in read_metrics(run):
        assert set(ALWAYS) <= row.metrics.keys()
        assert row.metrics["ratio/max"] > 1
        assert ("routes/differ" in row.metrics) == (replay == "true")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("settings", "old", "reference"),
    [
        ((), 0, 0),
        (("update.samples_per_update=4",), 1, 0),
        (("update.epochs=2",), 1, 0),
        (("update.epochs=2", "algorithm.old_logprobs=rollout"), 0, 0),
        (("algorithm.old_logprobs=recompute",), 1, 0),
        (("algorithm.kl.coef=0.1",), 0, 1),
        ((*IN_REWARD, "algorithm.kl.coef=0.1"), 0, 1),
        ((*IN_REWARD, "algorithm.kl.coef=0.1", "update.epochs=2"), 1, 1),
        (IN_REWARD, 0, 0),
    ],
)
def test_a_pass_is_made_only_if_something_needs_it(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    old: int,
    reference: int,
) -> None:
    passes = Counting(monkeypatch)
    run = trained(tmp_path, tiny_model_dir, NO_EVAL, "steps=2", *settings)
    assert (passes.old, passes.reference) == (2 * old, 2 * reference)
    assert ("old-logprob pass skipped" in run.log_path.read_text()) == (settings in ((), *_SKIPS))


_SKIPS = (("algorithm.kl.coef=0.1",), (*IN_REWARD, "algorithm.kl.coef=0.1"), IN_REWARD)


# --- KL -----------------------------------------------------------------------------------------------------------------
ADAPTIVE = ("algorithm.kl.coef=0.1", "algorithm.kl.target=0.001", "algorithm.kl.horizon=64", NO_EVAL)


@pytest.mark.parametrize("placement", [(), IN_REWARD], ids=["loss", "reward"])
def test_the_controller_follows_its_formula(tmp_path: Path, tiny_model_dir: Path, placement: tuple[str, ...]) -> None:
    run = trained(tmp_path, tiny_model_dir, *placement, *ADAPTIVE, "steps=4")
    coef, kl = column(run, "kl/coef"), column(run, "kl/k1")
    assert coef[0] == 0.1
    for before, after, measured in zip(coef, coef[1:], kl, strict=False):
        assert after == pytest.approx(before * (1 + max(-0.2, min(0.2, measured / 0.001 - 1)) * 8 / 64), rel=1e-12)
    assert coef[1] == pytest.approx(0.1 * (1 - 0.2 / 8)), "at first the policy is the reference: k1 is 0"
    assert coef[3] > coef[2], "then it is far above the target"
    assert all(value >= 0 for value in column(run, "kl/ref")) or placement


@pytest.mark.sampled("reward-lora")
@pytest.mark.parametrize("adapter", [(), LORA], ids=["full", "lora"])
@pytest.mark.parametrize("placement", [(), IN_REWARD], ids=["loss", "reward"])
def test_a_stopped_run_with_adaptive_kl_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, tiny_model_dir: Path, placement: tuple[str, ...], adapter: tuple[str, ...]
) -> None:
    """Reference and coefficient are those of the unbroken run: the base, not the weights that were resumed from."""
    settings = (*placement, *ADAPTIVE, *adapter, "steps=4", "update.samples_per_update=4")
    unbroken = trained(tmp_path, tiny_model_dir, *settings, "name=unbroken")
    run = resume_run(stopped(tmp_path, tiny_model_dir, *settings, step=2))
    assert len(set(column(unbroken, "kl/coef"))) == 4
    assert same(run, unbroken, 4)
    saved, again = (open_checkpoint(one.path).meta["carried"] for one in (unbroken, run))
    assert saved == again


# --- dynamic sampling ---------------------------------------------------------------------------------------------------
DAPO = ("algorithm.kind=dapo", NO_EVAL)


def rarely(folder: Path) -> str:
    return f"task.verifier.path={folder}/grader.py:rarely"


def test_dynamic_sampling_counts_what_it_drew(tmp_path: Path, tiny_model_dir: Path) -> None:
    four = "algorithm.dynamic_sampling.max_rounds=4"  # times 4 steps of 2 prompts is one pass over the 32 questions
    run = trained(tmp_path, tiny_model_dir, *DAPO, rarely(tmp_path), "steps=4", four)
    rounds, drawn = column(run, "sampling/rounds"), column(run, "sampling/prompts_drawn")
    assert max(rounds) > 1
    for step in range(1, 5):
        rows = read_rollouts(run, step)
        groups: dict[str, list[float]] = {}
        for row in rows:
            groups.setdefault(row.prompt_id, []).append(row.metrics["correct"])
        accepted = [name for name, right in groups.items() if 0 < sum(right) < len(right)]
        metrics = next(row.metrics for row in read_metrics(run) if row.step == step)
        assert len(rows) == metrics["batch/samples"] == 4 * metrics["sampling/prompts_drawn"]
        assert metrics["sampling/acceptance_rate"] == len(accepted) / len(groups)
        assert metrics["batch/prompts"] == 2
        assert metrics["batch/samples_trained"] == 8
        trained_on = {row.prompt_id for row in rows if row.advantage}
        assert trained_on == set(accepted[:2]), "the first two that were mixed; a surplus is cut"
        assert metrics["answer/correct"] == pytest.approx(sum(map(sum, groups.values())) / len(rows))
    assert drawn[rounds.index(max(rounds))] > 2
    asked = [{row.prompt_id for row in read_rollouts(run, step)} for step in range(1, 5)]
    assert sum(map(len, asked)) == len(set.union(*asked)) == sum(drawn)


def test_dynamic_sampling_goes_on_with_what_there_is(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = (*DAPO, rarely(tmp_path), "steps=4", "algorithm.dynamic_sampling.max_rounds=1")
    run = trained(tmp_path, tiny_model_dir, *settings)
    prompts = column(run, "batch/prompts")
    assert 1.0 in prompts
    warned = events(run, "warning")
    assert len(warned) == sum(value < 2 for value in prompts)
    assert any(
        "1 of the 2 prompts of the step have some right and some wrong answers, after 1 round" in w for w in warned
    )
    assert column(run, "sampling/rounds") == [1.0] * 4


def test_a_step_without_any_group_updates_nothing_and_is_counted(tmp_path: Path, tiny_model_dir: Path) -> None:
    paid = f"task.verifier.path={tmp_path}/grader.py:always_right"
    free = ("health.garbage=off", "algorithm.dynamic_sampling.max_rounds=3", "optimizer.lr=1")
    run = trained(tmp_path, tiny_model_dir, *DAPO, paid, *free)
    assert len(set(fingerprints(run).values())) == 1
    rows = read_metrics(run)
    assert [proof_from_json(row.proof or {}).version for row in rows] == [0, 0, 0]
    assert column(run, "sampling/empty_steps") == [1, 2, 3]
    assert column(run, "sampling/prompts_drawn") == [6, 6, 6]
    assert column(run, "batch/optimizer_steps") == [0, 0, 0]
    assert column(run, "reward/mean") == [1, 1, 1]
    assert sum("the step updates nothing" in message for message in events(run, "warning")) == 3
    assert all(row.advantage == 0 for row in read_rollouts(run, 3))


def test_a_stopped_dapo_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = (*DAPO, rarely(tmp_path), "steps=4", "update.samples_per_update=4", "algorithm.overlong.buffer=3")
    unbroken = trained(tmp_path, tiny_model_dir, *settings, "name=unbroken")
    assert max(column(unbroken, "sampling/rounds")[2:]) > 1
    run = resume_run(stopped(tmp_path, tiny_model_dir, *settings, step=2))
    assert same(run, unbroken, 4)


# --- overlong -----------------------------------------------------------------------------------------------------------
def test_long_replies_cost_and_truncated_ones_can_be_left_out(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Six tokens are few: most replies are cut off."""
    shaped = trained(tmp_path, tiny_model_dir, NO_EVAL, "name=shaped", "algorithm.overlong={buffer: 6, penalty: 0.5}")
    assert all(a < b for a, b in zip(column(shaped, "reward/shaped_mean"), column(shaped, "reward/mean"), strict=True))
    dropping = trained(
        tmp_path,
        tiny_model_dir,
        NO_EVAL,
        "name=dropping",
        "algorithm.overlong.drop_truncated=true",
        "rollout.max_tokens=24",
    )
    for step, row in enumerate(read_metrics(dropping), 1):
        replies = read_rollouts(dropping, step)
        cut = [reply for reply in replies if reply.finish == "length"]
        assert row.metrics["length/dropped"] == len(cut)
        assert all(reply.advantage == 0 for reply in cut)
        assert row.metrics["batch/samples_trained"] <= len(replies) - len(cut)
    assert numbers(shaped)[1]["reward/mean"] == repr(column(shaped, "reward/mean")[0])


# --- correction ---------------------------------------------------------------------------------------------------------
def test_a_band_that_keeps_nothing_stops_all_learning(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The engine samples from a distribution cut to its 3 likeliest tokens: its probabilities are larger than the learner's."""
    cut = ("rollout.top_k=3", "algorithm.correction.kind=mis", NO_EVAL)
    masked = trained(tmp_path, tiny_model_dir, *cut, "algorithm.correction.low=0.99", "name=masked")
    assert column(masked, "correction/kept_share") == [0, 0, 0]
    assert column(masked, "grad/norm") == [0, 0, 0]
    assert max(column(masked, "mismatch/max_weight")) < 0.99
    assert min(column(masked, "mismatch/k1")) > 0.01, "measured whether or not it is corrected"
    free = trained(tmp_path, tiny_model_dir, *cut, "algorithm.correction.low=0", "name=free")
    assert column(free, "correction/kept_share") == [1, 1, 1]
    assert column(free, "correction/weight_max")[0] == pytest.approx(column(free, "mismatch/max_weight")[0])
    assert all(value > 0 for value in column(free, "grad/norm"))
    capped = trained(
        tmp_path, tiny_model_dir, *cut[:1], NO_EVAL, "algorithm.correction.kind=tis", "name=capped", "update.epochs=2"
    )
    for row in read_metrics(capped):
        assert {"correction/capped_share", "correction/weight_mean"} <= row.metrics.keys()
        assert [name for name in row.metrics if find(name) is None] == []

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.track.catalogue import Judge, all_metrics, drift, explain, find, metrics_markdown, verdict

STABLE = [
    "reward/mean", "reward/std", "reward/min", "reward/max", "reward/p90", "reward/zero_std_groups",
    "reward/unscored", "answer/correct", "answer/boxed", "answer/has_answer", "length/mean", "length/max",
    "length/truncated", "advantage/mean", "advantage/std", "advantage/min", "advantage/max", "loss/policy", "loss/kl",
    "loss/entropy", "ratio/max", "ratio/clip_share", "ratio/log_abs_max", "entropy/mean", "entropy/p10",
    "entropy/p90", "kl/ref", "mismatch/mean_abs_dlogp", "mismatch/max_abs_dlogp", "mismatch/k3",
    "mismatch/token_mult_prob_error", "grad/norm", "grad/clipped", "grad/skipped", "lr", "weights/changed_tensors",
    "sync/seconds", "sync/probe_mean", "sync/probe_max", "sync/tensors", "batch/prompts", "batch/samples",
    "batch/samples_trained", "batch/tokens_generated", "batch/tokens_trained", "batch/tokens_processed",
    "batch/microbatches", "batch/optimizer_steps", "time/step", "time/rollout", "time/grade", "time/update",
    "time/sync", "time/evaluate", "time/save", "throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s",
    "memory/rss_gib", "memory/gpu_gib", "eval/greedy/accuracy", "eval/greedy/low", "eval/greedy/high",
    "eval/greedy/truncated", "eval/greedy/unscored", "eval/greedy/mean_tokens", "task/chain_sum/reward",
]  # fmt: skip
"""Names that dashboards and scripts may rely on."""


def test_every_stable_name_is_described() -> None:
    assert [name for name in STABLE if find(name) is None] == []
    for info in all_metrics():
        assert info.unit
        assert info.meaning.endswith((".", "–"))
        if info.healthy or info.drift:
            assert info.advice, info.name


def test_names_are_unique_and_an_exact_name_beats_a_pattern() -> None:
    names = [info.name for info in all_metrics()]
    assert len(set(names)) == len(names)
    assert explain("answer/boxed").name == "answer/boxed"
    assert explain("answer/steps_shown").name == "answer/<metric>"
    assert explain("task/chain_sum/reward").name == "task/<task>/reward"
    assert explain("eval/sampled@8/low").name == "eval/<mode>/low"


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean grad/norm"):
        explain("grad/nrom")
    with pytest.raises(ConfigError, match=r"did you mean .*eval/<mode>/accuracy"):
        explain("accuracy")
    with pytest.raises(ConfigError, match="groups are reward, answer"):
        explain("zzzzzzzz")
    assert find("eval/accuracy") is None
    assert find("eval/a/b/accuracy") is None


@pytest.mark.parametrize(
    ("name", "value", "step", "expected"),
    [
        ("length/truncated", 0.5, None, "ok"),
        ("length/truncated", 0.51, None, "warn"),
        ("answer/boxed", 0.9, 40, "ok"),
        ("answer/boxed", 0.89, 40, "warn"),
        ("reward/mean", 0.01, 6, "warn"),
        ("reward/mean", 0.99, 7, ""),
        ("reward/mean", 0.99, None, "warn"),
        ("grad/norm", 0.0, None, "warn"),
        ("grad/norm", 1e-9, None, "ok"),
        ("grad/norm", 100.5, None, "warn"),
        ("grad/skipped", 0.0, None, "ok"),
        ("grad/skipped", 1.0, None, "warn"),
        ("weights/changed_tensors", 0.0, None, "warn"),
        ("mismatch/mean_abs_dlogp", 0.2, None, "warn"),
        ("reward/std", 5.0, None, ""),
        ("reward/std", math.nan, None, "warn"),
        ("loss/policy", math.inf, None, "warn"),
        ("no/such", 1.0, None, ""),
        ("no/such", math.nan, None, ""),
    ],
)
def test_verdicts_at_the_ends_of_the_ranges(name: str, value: float, step: int | None, expected: str) -> None:
    assert verdict(name, value, step) == expected


def test_drift_against_the_start() -> None:
    start = [1.0, 0.8, 1.2, 1.0, 1.0]
    assert drift("entropy/sampled", 0.01, start[:4]) == ""
    assert drift("entropy/sampled", 0.11, start) == "ok"
    assert drift("entropy/sampled", 0.09, start) == "warn"
    assert (
        drift("entropy/sampled", 0.09, [*start, 0.1, 0.1, 0.1]) == "warn"
    )  # the start counts, not the slow decline since


def test_drift_against_the_recent_past() -> None:
    assert drift("grad/norm", 50.0, [1.0] * 4) == ""
    assert drift("grad/norm", 10.1, [1.0] * 5) == "warn"
    assert drift("grad/norm", 9.9, [1.0] * 25) == "ok"
    assert drift("grad/norm", 10.1, [1.0] * 25) == "warn"
    assert drift("length/mean", 4.9, [100.0] * 20 + [10.0] * 20) == "warn"
    assert drift("length/mean", 5.1, [100.0] * 20 + [10.0] * 20) == "ok"
    assert drift("length/mean", 15.1, [10.0] * 4 + [math.nan] * 5) == ""


def test_the_judge_remembers_what_it_saw() -> None:
    judge = Judge()
    for step in range(1, 26):
        assert judge.step(step, {"grad/norm": 1.0, "own/thing": 5.0}) == []
    assert judge.step(26, {"grad/norm": 30.0, "length/truncated": 0.9}) == ["grad/norm", "length/truncated"]
    assert Judge().step(26, {"grad/norm": 30.0}) == []


def test_the_judge_of_a_long_run_agrees_with_the_whole_history() -> None:
    judge, history = Judge(), list[float]()
    for step in range(1, 300):
        value = math.nan if step % 11 == 0 else (1.0 + step % 7) * (0.02 if step % 29 == 0 else 1.0)
        for name in ("entropy/mean", "length/mean", "grad/norm"):
            outside = "warn" in (verdict(name, value, step), drift(name, value, history))
            assert (name in judge.step(step, {name: value})) == outside, (step, name)
        history.append(value)


def test_the_committed_page_is_the_generated_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_markdown(), (
        "run `lockstep metrics list --markdown > docs/metrics.md`"
    )


def test_the_page_lists_every_metric_with_its_source() -> None:
    page = metrics_markdown()
    assert all(f"| `{info.name}` |" in page for info in all_metrics())
    assert "≤ 0.03 (TRL #5312" in page
    assert all(line.count(" | ") == 4 for line in page.splitlines() if line.startswith("| `"))


def test_sameness_is_no_fault_where_nearly_all_replies_are_correct() -> None:
    for correct, outside in ((0.79, ["reward/zero_std_groups"]), (0.8, [])):
        assert Judge().step(9, {"answer/correct": correct, "reward/zero_std_groups": 0.9}) == outside
    judge = Judge()
    for step in range(1, 6):
        judge.step(step, {"entropy/sampled": 1.0})
    assert judge.step(7, {"entropy/sampled": 0.05, "answer/correct": 0.9}) == []
    assert judge.step(8, {"entropy/sampled": 0.05, "answer/correct": 0.5}) == ["entropy/sampled"]

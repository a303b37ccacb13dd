from __future__ import annotations

import pytest

from lockstep.cli import main
from lockstep.config.metric import elsewhere
from lockstep.track.catalogue import all_metrics, explain, metrics_markdown
from tests.saying import Printed


def test_explain_tells_unit_range_source_and_remedy(printed: Printed) -> None:
    first, second = printed("metrics", "explain", "length/truncated", "eval/greedy/unscored").split("\n\n")
    assert first.splitlines()[0] == "length/truncated  (share of replies)"
    assert "healthy: ≤ 0.5 (" in first
    assert "if not:  Raise rollout.max_tokens" in first
    assert "described as eval/<mode>/unscored" in second


def test_a_name_that_does_not_exist_is_exit_2_with_the_nearest(printed: Printed) -> None:
    assert "did you mean length/mean" in printed("metrics", "explain", "lenght/mean", code=2)


def test_list_has_a_line_a_metric_and_filters(printed: Printed) -> None:
    assert len(printed("metrics", "list").splitlines()) == len(all_metrics()) + 2
    assert [line.split()[0] for line in printed("metrics", "list", "grad/").splitlines()[2:]] == [
        "grad/norm",
        "grad/escalation",
        "grad/clipped",
        "grad/skipped",
    ]
    assert "described as eval/<mode>/accuracy" in printed("metrics", "list", "eval/greedy/accuracy")
    assert main(["metrics", "list", "gard/"]) == 2


def test_the_page_can_be_written_from_the_command_line(printed: Printed) -> None:
    assert printed("metrics", "list", "--markdown") == metrics_markdown()


def test_each_metric_of_another_system_is_one_of_ours() -> None:
    assert {system: len(metrics) >= 20 for system, metrics in elsewhere().items()} == dict.fromkeys(
        ("verl", "openrlhf", "trl"), True
    )
    for metrics in elsewhere().values():
        for name, one in metrics.items():
            assert explain(one.ours).meaning, name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pg_loss", "actor/pg_loss of verl: the clipped policy loss alone"),
        ("ppo_kl", "here ratio/log_abs_max: ours is the largest size"),
        ("ppo_kl", "ppo_kl of OpenRLHF"),
        ("actor/pg_clipfrac", "Trained tokens whose gradient the clip range stopped"),
        ("train/clip_ratio/region_mean", "below 1 - epsilon with a negative advantage"),
        ("critic/rewards/mean", "the KL penalty, if there is one in the rewards"),
        ("kl", "here kl/ref"),
    ],
)
def test_names_of_other_systems_are_understood(name: str, says: str, printed: Printed) -> None:
    assert says in printed("metrics", "explain", name)

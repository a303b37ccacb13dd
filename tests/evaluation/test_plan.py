from __future__ import annotations

from typing import Any

from lockstep.config.schema import EvalMode, Recipe
from lockstep.evaluation.plan import (
    EvalPlan,
    eval_plan,
    eval_sampling,
    evaluation_steps,
    mode_label,
    plan_lines,
    verifier_label,
)
from lockstep.types import Sampling


def recipe(**settings: Any) -> Recipe:
    return Recipe.model_validate(settings)


def test_the_last_step_is_always_evaluated() -> None:
    assert evaluation_steps(recipe(steps=50)) == (0, 20, 40, 50)
    assert evaluation_steps(recipe(steps=29)) == (0, 20, 29)  # the run whose last ten points were never seen
    assert evaluation_steps(recipe(steps=40)) == (0, 20, 40)
    assert evaluation_steps(recipe(steps=3)) == (0, 3)
    assert evaluation_steps(recipe(steps=3, eval={"every": 1})) == (0, 1, 2, 3)


def test_the_start_and_everything_can_be_switched_off() -> None:
    assert evaluation_steps(recipe(steps=50, eval={"at_start": False})) == (20, 40, 50)
    assert evaluation_steps(recipe(steps=50, eval={"enabled": False})) == ()


def test_the_plan_is_printed_in_words() -> None:
    first, second = plan_lines(recipe(steps=50))
    assert first == (
        "will evaluate at steps 0, 20, 40, 50 (last): greedy (T=0), sampled (T=1), 200 items of id_probe, "
        "replies of up to 64 tokens"
    )
    assert second.startswith("1 item = 0.5 points")


def test_the_plan_names_the_tasks_of_lm_eval() -> None:
    tasks = [{"name": "arc", "path": "tasks/arc.yaml"}, {"name": "sums", "path": "sums.yaml", "items": 9}]
    line = "will measure tasks of lm-eval at the same steps: arc (tasks/arc.yaml), sums (sums.yaml, 9 items)"
    assert plan_lines(recipe(eval={"lm_eval": tasks}))[1] == line
    assert len(plan_lines(recipe(eval={"lm_eval": tasks, "enabled": False}))) == 1


def test_the_plan_says_what_is_left_out() -> None:
    assert plan_lines(recipe(eval={"enabled": False})) == ["will not evaluate at all: eval.enabled is false"]
    assert "the base model is not evaluated" in plan_lines(recipe(eval={"at_start": False}))[-1]


def test_a_long_plan_is_shortened_but_keeps_its_ends() -> None:
    modes = [{"name": "maj", "temperature": 0.6, "samples": 8}]
    line = plan_lines(recipe(steps=1003, eval={"every": 5, "modes": modes}))
    assert line[0].startswith("will evaluate at steps 0, 5, 10, 15, …, 1000, 1003 (last), 202 times in all: ")
    assert "maj (T=0.6, 8 samples: avg@8, pass@8, maj@8)" in line[0]


def test_the_plan_takes_the_recipes_values() -> None:
    plan = eval_plan(
        recipe(
            seed=7,
            model={"path": "org/name", "revision": "abc"},
            rollout={"max_tokens": 48, "stop": ["\n\n"], "temperature": 0.7, "top_k": 5},
            eval={"items": 30, "role": "ood_probe"},
        ),
        "bf16",
        context=2048,
    )
    assert plan == EvalPlan(
        "org/name@abc", "bf16", "native", "ood_probe", 30, 48, 7, "numeric", stop=("\n\n",), context=2048
    )
    assert eval_plan(recipe(eval={"max_tokens": 100}), "fp32").max_tokens == 100
    # Truncated sampling belongs to training; an evaluation draws from the whole distribution.
    assert eval_sampling(EvalMode(name="sampled", temperature=1.0), plan) == Sampling(48, 1.0, stop=("\n\n",))


def test_mode_labels_hold_everything_that_shapes_a_reply() -> None:
    assert mode_label(EvalMode()) == "greedy"
    assert mode_label(EvalMode(name="sampled", temperature=1.0)) == "sampled(T=1)"
    assert mode_label(EvalMode(name="avg@8", temperature=0.6, samples=8)) == "avg@8(T=0.6,n=8)"
    assert mode_label(EvalMode(name="greedy", temperature=0.5)) == "greedy(T=0.5)"
    assert mode_label(EvalMode(name="other")) == "other(T=0)"
    assert mode_label(EvalMode(), stop=("\n",)) == "greedy(stop=['\\n'])"


def test_labels_say_which_estimate_is_the_headline() -> None:
    eight = {"temperature": 0.6, "samples": 8}
    assert mode_label(EvalMode(name="pass@8", **eight)) == "pass@8(T=0.6,n=8)"
    assert mode_label(EvalMode(name="sampled", **eight)) == "sampled(T=0.6,n=8)"
    assert mode_label(EvalMode(name="sampled", estimates=["maj@8"], **eight)) == "sampled(T=0.6,n=8,maj@8)"
    assert mode_label(EvalMode(name="nondet_proxy", samples=8)) == "nondet_proxy(T=0,n=8)"
    assert mode_label(EvalMode(name="greedy_pass@1")) == "greedy_pass@1"


def test_the_plan_names_every_set_and_the_stopping_rule() -> None:
    sets = [{"role": "ood_probe", "items": 202}, {"role": "sanity", "items": 18}]
    lines = plan_lines(recipe(steps=50, eval={"also": sets, "stop": {"kind": "drops"}}))
    assert "200 items of id_probe, 202 items of ood_probe, 18 items of sanity, replies of up to 64 tokens" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:4]] == ["id_probe", "ood_probe", "sanity"]
    assert lines[3].startswith("sanity: 1 item = 5.56 points")
    assert lines[4:] == [
        "sanity is measured only for information",
        "will stop when eval/ood_probe.greedy/accuracy falls 2 evaluations in a row",
    ]
    calm = plan_lines(recipe(eval={"also": sets, "stop": {"kind": "plateau"}}))[-1]
    assert calm == (
        "will stop when the mean of 3 evaluations of eval/ood_probe.greedy/accuracy has not risen by more than 1 points for 5 "
        "evaluations"
    )


def test_a_plan_of_another_set_has_its_role_and_items() -> None:
    settings = recipe(eval={"also": [{"role": "ood_probe", "items": 30}]})
    plans = [eval_plan(settings, "fp32", chosen=one) for one in settings.eval.sets]
    assert [(plan.role, plan.items) for plan in plans] == [("id_probe", 200), ("ood_probe", 30)]
    assert eval_plan(settings, "fp32") == plans[0]


def test_verifier_labels_show_what_differs_from_the_default() -> None:
    assert verifier_label(recipe()) == "numeric"
    loose = {"kind": "reasoning_gym", "verifier": {"kind": "numeric", "fallback": "last_number"}}
    assert verifier_label(recipe(task=loose)) == "numeric(fallback=last_number)"
    own = {"kind": "file", "data": "a.jsonl", "verifier": {"kind": "python", "path": "v.py:grade"}}
    assert verifier_label(recipe(task=own)) == "python(path=v.py:grade)"
    assert verifier_label(recipe(task={"kind": "python", "path": "t.py:Task"})) == "own"
    agent = {"kind": "agent", "command": "python a.py", "running": 4}
    # How many run at a time changes no reply.
    assert verifier_label(recipe(task=agent)) == "numeric+agent(command=python a.py)"
    keys = {"env": {"KEY": "sk-secret"}}
    for secret in ({**agent, **keys}, {"kind": "tools", "tools": [{"mcp": "python s.py", **keys}]}):
        assert "'env': {'KEY'" in (label := verifier_label(recipe(task=secret))) or "env={'KEY'" in label
        assert "sk-secret" not in label

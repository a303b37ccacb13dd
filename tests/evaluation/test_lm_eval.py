"""Tasks of lm-eval measured by our engine, item by item against lm-eval's own model class on the same weights."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.chat.chat import ChatFormat
from lockstep.cli import main
from lockstep.config.evaluate import LmEvalSet
from lockstep.errors import ConfigError, EvaluationError
from lockstep.evaluation.alarms import reply_alarms
from lockstep.evaluation.collect import pair, records_of
from lockstep.evaluation.lm_eval import conditions_of, evaluate_task, load_task
from lockstep.evaluation.plan import eval_plan
from lockstep.evaluation.records import read_score
from lockstep.models import load_tokenizer, resolve
from lockstep.rollout.native import NativeEngine
from lockstep.scoring.targets import EvalSession, build_eval_session
from lockstep.types import Proof, Request, Score
from tests.loops.runs import recipe, trained

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lockstep-rl[lm-eval]'")

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
"""
CHOICE = """
task: choice
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
REPLY = """
task: reply
output_type: generate_until
num_fewshot: 2
fewshot_split: test
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 9, do_sample: false}}
filter_list:
  - name: first
    filter: [{{function: regex, regex_pattern: "([a-z])"}}, {{function: take_first}}]
  - name: last
    filter: [{{function: regex, group_select: -1, regex_pattern: "([a-z])"}}, {{function: take_first}}]
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The YAML files of a multiple choice and of generated replies, with local data."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": f"{n} + 3",
            "choices": [str(n + 3), "a longer wrong answer", str(n)],
            "label": n % 3,
            "answer": "t",
        }
        for n in range(12)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {name: folder / f"{name}.yaml" for name in ("choice", "reply")}
    for name, text in (("choice", CHOICE), ("reply", REPLY)):
        paths[name].write_text((COMMON + text).format(data=data))
    return paths


@pytest.fixture(scope="module")
def session(gallery: Any) -> EvalSession:
    from lockstep.config.load import load

    return build_eval_session(load([str(gallery.run("plain").recipe_path)]))


@pytest.fixture(scope="module")
def proof(session: EvalSession) -> Proof:
    return session.prove()


@pytest.fixture(scope="module")
def theirs(session: EvalSession) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(session.policy.resolved.path), device="cpu", dtype="float32", batch_size=5)


def measured(session: EvalSession, proof: Proof, settings: LmEvalSet) -> Score:
    from lockstep.config.load import load_mapping

    plan = eval_plan(load_mapping({"model": "smollm2-135m-instruct"}), "fp32", session.policy.context)
    task = load_task(settings, session.policy.chat)
    return evaluate_task(session.engine, task, session.policy.chat, plan, proof, step=0)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("choice", {}),
        pytest.param("choice", {"metric": "acc_norm", "fewshot": 1, "items": 7}, marks=pytest.mark.slow),
        ("reply", {}),
        pytest.param("reply", {"filter": "last"}, marks=pytest.mark.slow),
        pytest.param("reply", {"chat": True}, marks=pytest.mark.slow),
    ],
)
def test_every_item_is_that_of_lm_eval(
    session: EvalSession, proof: Proof, theirs: Any, tasks: dict[str, Path], name: str, given: dict[str, Any]
) -> None:
    settings = LmEvalSet(name=name, path=str(tasks[name]), **given)
    score = measured(session, proof, settings)
    found = lm_eval.simple_evaluate(
        theirs,
        tasks=[str(tasks[name])],
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
        limit=settings.items,
        num_fewshot=settings.fewshot,
        apply_chat_template=settings.chat,
        bootstrap_iters=0,
    )
    metric, chosen = settings.metric or ("acc" if name == "choice" else "exact_match"), settings.filter
    chosen = chosen or ("none" if name == "choice" else "first")
    rows = [row for row in found["samples"][name] if row["filter"] == chosen]
    assert len(rows) == len(score.results) == (settings.items or 12)
    assert [row[metric] == 1 for row in rows] == [item.correct for item in score.results]
    assert score.accuracy == found["results"][name][f"{metric},{chosen}"]
    assert score.low < score.accuracy < score.high or score.accuracy in (0, 1)
    for row, item in zip(rows, score.results, strict=True):
        if name == "reply":
            assert item.text == row["resps"][0][0]
            assert item.extracted == row["filtered_resps"][0]
        else:
            mine = ast.literal_eval(f"[{item.text.removeprefix('log-likelihoods: ')}]")
            assert mine == pytest.approx([value for value, _ in row["filtered_resps"]], abs=1e-3)


def test_a_run_measures_a_task_and_compares_it_with_the_base(
    tmp_path: Path, tiny_model_dir: Path, tasks: dict[str, Path]
) -> None:
    asked = f"eval.lm_eval=[{{name: sums, path: {tasks['choice']}}}]"
    run = trained(tmp_path, tiny_model_dir, "eval.every=3", asked)
    scores = [read_score(run.scores_path / f"step_{step:06d}_lm_eval.sums.json") for step in (0, 3)]
    assert [score.step for score in scores] == [0, 3]
    assert scores[0].conditions.data_hash == scores[1].conditions.data_hash
    assert scores[0].conditions.weights != scores[1].conditions.weights
    assert '"eval/lm_eval.sums/accuracy"' in run.metrics_path.read_text()
    files = [records_of(str(run.scores_path / f"step_{step:06d}_lm_eval.sums.json")) for step in (0, 3)]
    assert len(pair(*files)) == 1  # the same items under the same conditions: they may be compared
    scores_of = [run.scores_path / f"step_{step:06d}_lm_eval.sums.json" for step in (0, 3)]
    scores_of[1].unlink()
    assert main(["eval", str(run.path), "--numerics", "mxfp4-w4a4", "--mode", "greedy", "--no-base"]) == 0
    (other,) = run.scores_path.glob("*/step_000003_lm_eval.sums.json")
    assert read_score(other).conditions.numerics.startswith("mxfp4-w4a4")
    assert not scores_of[1].exists(), "the run's own scores have the run's numerics"
    assert main(["eval", str(run.path), "--mode", "greedy", "--no-base"]) == 0
    assert read_score(scores_of[1]).conditions == scores[1].conditions


@pytest.mark.parametrize(
    ("name", "generation", "mode", "seeds"),
    [
        ("choice", "", "loglikelihood", [0, 0]),
        ("reply", "do_sample: false", "greedy", [0, 0]),
        ("reply", "do_sample: true, temperature: 0.0", "greedy", [0, 0]),
        ("reply", "do_sample: true, temperature: 0.7", "sampled(T=0.7)", [1, 2]),
        ("reply", "temperature: 1.0", "sampled(T=1)", [1, 2]),
    ],
)
def test_a_score_names_its_seed_only_where_replies_are_sampled(
    tasks: dict[str, Path],
    tiny_model_dir: Path,
    tmp_path: Path,
    name: str,
    generation: str,
    mode: str,
    seeds: list[int],
) -> None:
    """Else two runs of one recipe with other seeds could not be compared."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(tasks[name].read_text().replace("do_sample: false", generation))
    settings = recipe(tmp_path, tiny_model_dir)
    chat = ChatFormat(load_tokenizer(resolve(settings.model)), settings.chat, None)
    task, proof = load_task(LmEvalSet(name=name, path=str(path)), chat), Proof(0, "f", 1, 4, (), -1, None, 0.0)
    found = [conditions_of(task, chat, replace(eval_plan(settings, "fp32"), seed=seed), proof) for seed in (1, 2)]
    assert [one.mode for one in found] == [mode] * 2
    assert [one.seed for one in found] == seeds


def test_alarms_know_what_a_task_of_lm_eval_is(session: EvalSession, proof: Proof, tasks: dict[str, Path]) -> None:
    """A choice among given answers has none to be found in a reply, and the length of replies is the task's own."""
    choice, reply = (measured(session, proof, LmEvalSet(name=name, path=str(tasks[name]))) for name in tasks)
    assert choice.accuracy < 0.9
    assert reply_alarms(choice) == []
    assert reply.truncated > 0.1
    assert "a larger max_gen_toks of the task may change the score" in reply_alarms(reply)[0]


@pytest.mark.parametrize("name", ["choice", "reply"])
def test_every_request_is_a_prompt_of_its_own(
    session: EvalSession, proof: Proof, tasks: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are dealt whole prompts, which the part of an id before "#" names."""
    asked: list[Request] = []
    submit = NativeEngine.submit
    monkeypatch.setattr(NativeEngine, "submit", lambda self, some: asked.extend(some) or submit(self, some))
    measured(session, proof, LmEvalSet(name=name, path=str(tasks[name])))
    assert len({one.id.rpartition("#")[0] for one in asked}) == len(asked) > 1


def test_prompts_in_the_template_follow_its_settings(
    tasks: dict[str, Path], tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Its date is the constant one of all prompts, and its variables are those of the recipe."""
    settings = recipe(tmp_path, tiny_model_dir, "chat.template_kwargs.enable_thinking=false")
    tokenizer = load_tokenizer(resolve(settings.model))
    tokenizer.chat_template = "{{ strftime_now('%Y') }} thinks {{ enable_thinking }} " + str(tokenizer.chat_template)
    task = load_task(LmEvalSet(name="reply", path=str(tasks["reply"]), chat=True), ChatFormat(tokenizer, settings.chat))
    assert {one.args[0].partition("<|")[0] for one in task.task.instances} == {"2024 thinks False "}


def test_more_reply_tokens_than_the_context_has_are_refused(
    session: EvalSession, proof: Proof, tasks: dict[str, Path], tmp_path: Path
) -> None:
    path, context = tmp_path / "long.yaml", session.policy.context or 0
    path.write_text(tasks["reply"].read_text().replace("max_gen_toks: 9", f"max_gen_toks: {context}"))
    with pytest.raises(EvaluationError, match=f"max_gen_toks={context} leaves no room .* context has {context} tokens"):
        measured(session, proof, LmEvalSet(name="long", path=str(path)))


def test_an_answer_that_fills_the_context_is_refused(
    session: EvalSession, proof: Proof, tasks: dict[str, Path], tmp_path: Path
) -> None:
    context, path, data = session.policy.context or 0, tmp_path / "wide.yaml", tmp_path / "wide.jsonl"
    data.write_text(json.dumps({"question": "1", "choices": ["1", "2 " * context], "label": 0, "answer": "t"}) + "\n")
    text = tasks["choice"].read_text()
    path.write_text(text.replace(str(tasks["choice"].with_name("rows.jsonl")), str(data)))
    with pytest.raises(EvaluationError, match="tokens leaves no room for a prompt: the model's context"):
        measured(session, proof, LmEvalSet(name="wide", path=str(path)))


def test_settings_of_a_reply_that_are_not_followed_are_refused(
    tasks: dict[str, Path], tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = recipe(tmp_path, tiny_model_dir)
    chat = ChatFormat(load_tokenizer(resolve(settings.model)), settings.chat, None)
    path, text = tmp_path / "reply.yaml", tasks["reply"].read_text()
    path.write_text(text.replace("do_sample: false", "do_sample: false, num_beams: 4, repetition_penalty: 1.3"))
    with pytest.raises(EvaluationError, match=r"cannot be followed here: num_beams: 4, repetition_penalty: 1\.3"):
        load_task(LmEvalSet(name="reply", path=str(path)), chat)
    path.write_text(text.replace("do_sample: false", "do_sample: false, num_beams: 1, use_cache: true, min_p: null"))
    assert load_task(LmEvalSet(name="reply", path=str(path)), chat).metric


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"metric": "f1"}, "the task has no metric or filter .f1"),
        ({"filter": "strict"}, "the task has no metric or filter .strict"),
        ({"path": "nothing.yaml"}, "there is no file"),
    ],
)
def test_what_a_task_does_not_have_is_said(
    session: EvalSession, tasks: dict[str, Path], given: dict[str, Any], told: str
) -> None:
    with pytest.raises(EvaluationError, match=told):
        load_task(LmEvalSet(**{"name": "x", "path": str(tasks["choice"]), **given}), session.policy.chat)


def test_a_broken_yaml_is_said_and_names_differ(session: EvalSession, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("task: x\ndataset_path: json\noutput_type: [")
    with pytest.raises(EvaluationError, match="cannot load"):
        load_task(LmEvalSet(name="x", path=str(tmp_path / "broken.yaml")), session.policy.chat)
    with pytest.raises(ConfigError, match="differ"):
        recipe(tmp_path, tmp_path, "eval.lm_eval=[{name: a, path: b}, {name: a, path: c}]")

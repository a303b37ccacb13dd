"""Evaluates tasks of lm-eval: with its prompts, filters and metrics, and with our engine, proof of weights and intervals.

The package `lm-eval` is an optional dependency; it is imported when a recipe names such a task.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.chat.chat import ChatFormat
from lockstep.config.evaluate import LmEvalSet
from lockstep.errors import EvaluationError, Interrupted, LockstepError, MachineError
from lockstep.evaluation.plan import EvalPlan
from lockstep.evaluation.runner import require_numerics, require_proof, score_of, workers_of
from lockstep.seeds import seed_for
from lockstep.text import reason_of
from lockstep.types import Conditions, FinishReason, ItemResult, Proof, Request, RolloutEngine, Sampling, Score

FEWSHOT_SEED = 1234
"""lm-eval's own default, by which it draws few-shot examples."""
REPLY_TOKENS = 256
"""lm-eval's own default of a generated reply."""
READ = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"})
"""Settings of a generated reply that are followed; others are refused unless they ask for nothing, as those of IDLE do."""
IDLE = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "min_p": 0, "use_cache": True}
LISTED = "loglikelihood", "multiple_choice", "generate_until"
"""Kinds of tasks that can be measured; a rolling perplexity has no item that is right or wrong."""


@dataclass(frozen=True, slots=True)
class LmEvalTask:
    """A task of lm-eval with its requests."""

    settings: LmEvalSet
    task: Any
    metric: str
    filter: str
    hash: str
    """Digest of every prompt, choice, reference, filter and metric, and of lm-eval's version."""


def task_file(settings: LmEvalSet) -> Path:
    """Return the task's file, without reading it. Raises MachineError without lm-eval, EvaluationError without the file."""
    where = f"eval.lm_eval, {settings.name}"
    if importlib.util.find_spec("lm_eval") is None:
        raise MachineError("lm-eval is not installed", where=where, fix="pip install 'lockstep-rl[lm-eval]'")
    path = Path(settings.path).expanduser()
    if not path.is_file():
        raise EvaluationError(f"there is no file {path}", where=where, fix="give the YAML file of an lm-eval task")
    return path


def load_task(settings: LmEvalSet, chat: ChatFormat) -> LmEvalTask:
    """Read a task's YAML and its data, and build its prompts. Raises MachineError without lm-eval, EvaluationError."""
    where, path = f"eval.lm_eval, {settings.name}", task_file(settings)
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MachineError(
            f"lm-eval cannot be imported: {error}", where=where, fix="pip install 'lockstep-rl[lm-eval]'"
        ) from error
    try:
        with _quiet():
            (task,) = TaskManager(include_defaults=False).load(str(path.resolve()))["tasks"].values()
            if settings.fewshot is not None:
                task.set_config(key="num_fewshot", value=settings.fewshot)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)  # the examples are those that lm-eval draws
            task.build_all_requests(
                limit=settings.items,
                rank=0,
                world_size=1,
                apply_chat_template=settings.chat,
                fewshot_as_multiturn=settings.chat,
                chat_template=partial(_framed, chat) if settings.chat else None,
                tokenizer_name=chat.template_hash,
            )
    except Exception as error:  # a user's YAML, its templates and its data
        raise EvaluationError(
            f"lm-eval cannot load the task: {reason_of(error, 500)}",
            where=f"{where}, {path}",
            fix="try the task with `lm-eval run`; its data must be local (dataset_path: json, dataset_kwargs: {data_files: …})",
        ) from error
    if task.OUTPUT_TYPE not in LISTED:
        raise EvaluationError(
            f"tasks of output_type {task.OUTPUT_TYPE} cannot be evaluated",
            where=where,
            fix=f"choose a task of output_type {' or '.join(LISTED)}",
        )
    with _quiet():
        given, _ = _generation(task.config.generation_kwargs if task.OUTPUT_TYPE == "generate_until" else None)
    if unread := [
        f"{key}: {value}" for key, value in given.items() if key not in READ and value not in (None, IDLE.get(key))
    ]:
        raise EvaluationError(
            f"generation_kwargs of the task cannot be followed here: {', '.join(unread)}",
            where=f"{where}, {path}",
            fix=f"remove them from the YAML file; followed are {', '.join(sorted(READ))}",
        )
    metrics, filters = list(task.aggregation()), [str(one.name) for one in task._filters]
    metric, chosen = settings.metric or metrics[0], settings.filter or filters[0]
    for name, known in ((metric, metrics), (chosen, filters)):
        if name not in known:
            raise EvaluationError(
                f"the task has no metric or filter {name!r}", where=where, fix=f"choose one of {', '.join(known)}"
            )
    return LmEvalTask(settings, task, metric, chosen, _digest(task, lm_eval.__version__))


def conditions_of(task: LmEvalTask, chat: ChatFormat, plan: EvalPlan, proof: Proof) -> Conditions:
    """Return everything that the score depends on; known before anything is computed."""
    shots = task.task.config.num_fewshot or 0
    generates = task.task.OUTPUT_TYPE == "generate_until"
    with _quiet():
        settings, warm = _generation(task.task.config.generation_kwargs)
    sampled = generates and warm > 0
    mode = f"sampled(T={warm:.10g})" if sampled else "greedy"
    return Conditions(
        weights=proof.fingerprint,
        model=plan.model,
        numerics=plan.numerics,
        engine=plan.engine,
        mode=mode if generates else "loglikelihood",
        task=f"lm_eval/{task.settings.name}/{task.metric},{task.filter},{shots}-shot{',chat' * task.settings.chat}",
        data_hash=task.hash,
        template_hash=chat.template_hash if task.settings.chat else "none",
        max_tokens=settings["max_gen_toks"],
        seed=plan.seed if sampled else 0,  # nothing else depends on it, and runs of other seeds are to be comparable
    )


def evaluate_task(
    engine: RolloutEngine,
    task: LmEvalTask,
    chat: ChatFormat,
    plan: EvalPlan,
    proof: Proof,
    *,
    step: int,
    source: str = "",
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Score:
    """Measure a task with the engine's weights, of which `proof` must be; every item is right or wrong by the task's metric.

    Raises StaleWeightsError as `evaluate` does, EvaluationError for a metric that is neither 0 nor 1 for an item.
    """
    from lm_eval.evaluator import evaluate

    require_proof(engine, proof)
    require_numerics(engine, plan.numerics)
    started = time.perf_counter()
    model = _Model(engine, chat, plan, proof.version, progress)
    given = {task.settings.name: task.task}
    limit, framed = task.settings.items, task.settings.chat
    task.task.set_fewshot_seed(seed=FEWSHOT_SEED)  # the requests are built again
    try:
        with _quiet():
            found: Any = evaluate(
                model.lm(),
                given,
                limit=limit,
                bootstrap_iters=0,
                apply_chat_template=framed,
                fewshot_as_multiturn=framed,
            )
    except (LockstepError, Interrupted):
        raise
    except Exception as error:  # the task's own filters and metrics
        raise EvaluationError(
            f"lm-eval failed in this task: {reason_of(error, 500)}",
            where=f"eval.lm_eval, {task.settings.name}",
            fix="correct the task's YAML file, or the functions that it names",
        ) from error
    require_proof(engine, proof)
    samples = [one for rows in found["samples"].values() for one in rows if one["filter"] == task.filter]
    results = tuple(_item(task, one, model.made) for one in samples)
    seconds = time.perf_counter() - started
    conditions, workers = conditions_of(task, chat, plan, proof), workers_of(engine)
    return score_of(results, conditions, 1, step, proof, seconds, workers, source=source)


def _item(task: LmEvalTask, sample: dict[str, Any], made: dict[int, tuple[int, bool]]) -> ItemResult:
    value = float(sample[task.metric])
    if value not in (0.0, 1.0):
        raise EvaluationError(
            f"the metric {task.metric} of item {sample['doc_id']} is {value:g}, neither 0 nor 1",
            where=f"eval.lm_eval, {task.settings.name}",
            fix="set metric to one that is 0 or 1 for each item, such as acc or exact_match",
        )
    choice = task.task.OUTPUT_TYPE == "multiple_choice"
    replies = [str(one[0] if isinstance(one, list | tuple) else one) for one in sample["filtered_resps"]]
    tokens, cut = made.get(sample["doc_id"], (0, False))
    return ItemResult(
        id=f"{task.settings.name}/{sample['doc_id']}",
        sample=0,
        correct=value == 1.0,
        reward=value,
        extracted=None if choice else replies[0],
        answer=str(sample["target"]),
        text="log-likelihoods: " + ", ".join(replies) if choice else str(sample["resps"][0][0]),
        truncated=cut,
        tokens=tokens,
        method="" if choice else task.filter,  # there is no answer to find in a reply
        boxed=None,
        error=None,
    )


def _framed(chat: ChatFormat, messages: Sequence[Any], add_generation_prompt: bool = True) -> str:
    """Return messages in the model's template, with the recipe's variables for it, as text."""
    template: Any = chat.tokenizer.apply_chat_template
    how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
    return str(
        template(list(messages), chat_template=chat.template.source, tokenize=False, **how, **chat.template.kwargs)
    )


class _Model:
    """An engine as lm-eval asks a model."""

    def __init__(
        self,
        engine: RolloutEngine,
        chat: ChatFormat,
        plan: EvalPlan,
        version: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._engine, self._chat, self._tokenizer = engine, chat, chat.tokenizer
        self._seed, self._room, self._version, self._progress = plan.seed, plan.context or 2**31, version, progress
        self.made: dict[int, tuple[int, bool]] = {}
        """Item to the number of tokens of its reply, and whether it was cut off."""

    def lm(self) -> Any:
        """Return it as a class of lm-eval, whose rules split a context from its continuation."""
        from lm_eval.api.model import TemplateLM

        mine, tokenizer = self, self._tokenizer
        bos = bool(getattr(tokenizer, "add_bos_token", False))

        class Engine(TemplateLM):  # type: ignore[misc]
            eot_token_id = tokenizer.eos_token_id
            tokenizer_name = mine._chat.template_hash

            def tok_encode(self, string: str, add_special_tokens: bool | None = None, **given: object) -> list[int]:
                own = tokenizer.bos_token is not None and string.startswith(str(tokenizer.bos_token))
                special = bos and not own if add_special_tokens is None else add_special_tokens
                return list(tokenizer.encode(string, add_special_tokens=special))

            def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
                return _framed(mine._chat, chat_history, add_generation_prompt)

            def _loglikelihood_tokens(self, requests: Any, **given: object) -> list[tuple[float, bool]]:
                return mine.likelihoods([(tuple(context), tuple(rest)) for _, context, rest in requests])

            def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
                raise NotImplementedError("rolling log-likelihoods")

            def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
                return mine.replies(requests)

        engine: Any = Engine()
        self._encode = engine.tok_encode
        return engine

    def likelihoods(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether a greedy choice would have given it."""
        if (longest := max((len(rest) for _, rest in pairs), default=0)) >= self._room:
            raise EvaluationError(
                f"an answer of {longest} tokens leaves no room for a prompt: the model's context has {self._room} tokens",
                where="eval.lm_eval",
                fix="leave this item out of the task's data",
            )
        whole = [((*before, *rest)[-self._room :], len(rest)) for before, rest in pairs]
        scored = self._engine.score([ids for ids, _ in whole])
        sums = [sum(logprobs[len(logprobs) - count :]) for logprobs, (_, count) in zip(scored, whole, strict=True)]
        asked = [
            (ids[: len(ids) - count], Sampling(count, 0.0, ignore_eos=True), f"{number}#greedy")
            for number, (ids, count) in enumerate(whole)
        ]
        greedy = {one.request.id: one.ids for one in self._sampled(asked)}
        chosen = [greedy[f"{n}#greedy"] == ids[len(ids) - count :] for n, (ids, count) in enumerate(whole)]
        return list(zip(sums, chosen, strict=True))

    def replies(self, requests: Any) -> list[str]:
        """Return the reply to each request, cut at the first of its stop texts."""
        from lm_eval.models.utils import handle_stop_sequences

        asked, ends = [], []
        eos = self._tokenizer.decode([self._tokenizer.eos_token_id])
        for number, one in enumerate(requests):
            text, given = one.args
            settings, warm = _generation(given)
            until, count = handle_stop_sequences(settings.get("until"), eos=eos), settings["max_gen_toks"]
            sampling = Sampling(
                count,
                warm,
                top_k=int(settings.get("top_k", 0)),
                top_p=float(settings.get("top_p", 1.0)),
                stop=tuple(until),
            )
            if (room := self._room - count) < 1:
                raise EvaluationError(
                    f"max_gen_toks={count} leaves no room for a prompt: the model's context has {self._room} tokens",
                    where=f"eval.lm_eval, task {one.task_name}",
                    fix="lower generation_kwargs.max_gen_toks in the task's YAML file",
                )
            asked.append((tuple(self._encode(text)[-room:]), sampling, f"{one.doc_id}#{number}"))
            ends.append(until)
        found = {one.request.id: one for one in self._sampled(asked)}
        texts = []
        for (_, _, key), until in zip(asked, ends, strict=True):
            one = found[key]
            text = str(self._tokenizer.decode(list(one.ids), skip_special_tokens=True))
            for end in filter(None, until):
                text = text.split(end)[0]
            texts.append(text)
            self.made[int(key.partition("#")[0])] = len(one.ids), one.finish is FinishReason.LENGTH
        return texts

    def _sampled(self, asked: Sequence[tuple[tuple[int, ...], Sampling, str]]) -> list[Any]:
        self._engine.submit(
            [
                Request(key, ids, key, seed_for(self._seed, "lm_eval", key), sampling, self._version)
                for ids, sampling, key in asked
            ]
        )
        found = []
        for one in self._engine.completed():
            found.append(one)
            self._progress(len(found), len(asked))
        return found


def _generation(given: Mapping[str, Any] | None) -> tuple[dict[str, Any], float]:
    """Return settings of a generated reply as lm-eval reads them, and the temperature; 0 is greedy."""
    from lm_eval.models.utils import normalize_gen_kwargs

    settings: dict[str, Any] = dict(normalize_gen_kwargs(dict(given or {}), REPLY_TOKENS))
    return settings, float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0


def _digest(task: Any, version: str) -> str:
    """Return a digest of what is asked and how it is judged; functions of the YAML count by their source files' names alone."""
    asked = [[one.doc_id, one.idx, one.args] for one in task.instances]
    targets = [task.doc_to_target(one.doc) for one in task.instances]
    config = task.dump_config()
    kept = {key: config.get(key) for key in ("metric_list", "filter_list", "output_type", "process_results")}
    text = json.dumps([version, asked, targets, kept], default=str, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep lm-eval's bars and remarks out of the run's output."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)

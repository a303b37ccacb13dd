"""Scores the targets that a user names, in all their sets and modes, and optionally the base of each. It never trains.

Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lockstep.config.schema import EvalMode, EvalSet, LmEvalSet, Recipe
from lockstep.errors import EvaluationError
from lockstep.evaluation.alarms import identity_alarms
from lockstep.evaluation.brief import brief_of
from lockstep.evaluation.lm_eval import conditions_of, evaluate_task, load_task
from lockstep.evaluation.plan import EvalPlan, eval_plan
from lockstep.evaluation.records import read_brief, score_path, stored_score, write_score
from lockstep.evaluation.runner import evaluate, heldout_items, score_conditions
from lockstep.plan.devices import require_gpus
from lockstep.scoring.targets import Saved, Target, build_eval_session
from lockstep.types import Conditions, Proof, Score

if TYPE_CHECKING:
    from lockstep.scoring.workers import Session

Progress: TypeAlias = Callable[[int, int], None]
Watcher: TypeAlias = Callable[[str, int], Progress]
"""Maps a score's name and step to the callback that reports progress on its replies."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Options of scoring: what to measure of each target, and where to store it."""

    modes: Callable[[Recipe, EvalSet], Sequence[EvalMode]]
    sets: Callable[[Recipe], Sequence[EvalSet]]
    out: Path | None = None
    """Folder for the scores; None takes the run's own."""
    base: bool = True
    """True to measure also the weights that the target was trained from."""
    recipe_model: bool = False
    """True to measure also the recipe's own model, for a target model that the recipe does not name."""
    watch: Watcher | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The scores of one target, and of its base if that is evaluated, too."""

    target: Target
    proof: Proof
    scores: tuple[Score, ...]
    base: tuple[Score, ...] = ()
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    """Alarms about replies that equal those of a stored score in other numerics."""
    untrained: str = ""
    """Fingerprint of a target that equals its base; "" for any other."""


@dataclass(slots=True)
class Measuring:
    """One target that is being measured, and its results so far."""

    target: Target
    session: Session
    options: ScoreOptions
    numerics: str
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)


def score_targets(targets: Sequence[Target], options: ScoreOptions) -> Generator[Outcome]:
    """Yield one outcome per target. Checkpoints of one run share a model in memory and the score of their base."""
    from lockstep.device import free_memory
    from lockstep.scoring.workers import open_session

    for target in targets:  # before any slow work
        require_gpus(target.recipe, "--gpus 1 evaluates in one process")
    if options.out is not None:
        with _writing(options.out):
            options.out.mkdir(parents=True, exist_ok=True)
    session: Session | None = None
    last: Outcome | None = None
    with ExitStack() as stack:
        for target in targets:
            shares = session is not None and last is not None and _shares(last.target, target)
            if session is None or not shares:
                session = None  # before the next model is loaded
                stack.close()
                free_memory()  # fused layers refer to themselves
                recipe_model = _score_recipe_model(target, options)
                session = open_session(target.recipe, stack, replaced=target.whole and not options.base)
                last = _score(target, session, options, None, recipe_model)
            else:
                assert last is not None
                last = _score(target, session, options, last.base, None)
            yield last


def measure_once(target: Target, chosen: EvalSet, mode: EvalMode, progress: Progress | None = None) -> Score:
    """Return one score of a target; it is not stored."""
    from lockstep.run.evaluation import computing

    session = build_eval_session(target.recipe)
    numerics = target.recipe.numerics.label("eval", session.policy.numerics)
    plan = eval_plan(target.recipe, numerics, session.policy.context, chosen)
    proof = placed(target, session, saved_of(target, session))
    with computing(session.engine, numerics):
        return evaluate(
            session.engine,
            session.task,
            session.policy.chat,
            mode,
            plan,
            proof,
            step=target.step,
            source=target.label,
            progress=progress,
        )


def placed(target: Target, session: Session, saved: Saved | None) -> Proof:
    """Put a target's weights in place and prove that the engine has them; None means the model's own."""
    from lockstep.scoring.base import require_own_base

    if saved is not None:
        return session.prove_saved(saved)
    proof = session.prove()
    require_own_base(target, session, proof)
    return proof


def saved_of(target: Target, session: Session) -> Saved | None:
    """Return a target's own weights, if they are not the model's."""
    if target.checkpoint is not None:
        return session.read(target.checkpoint)
    return session.read_adapter(target.adapter) if target.adapter is not None else None


def _shares(one: Target, other: Target) -> bool:
    """Return whether the second can be loaded into the first's model: both are checkpoints of the same run."""
    both = one.checkpoint is not None and other.checkpoint is not None
    return both and one.run is not None and one.run == other.run and one.recipe == other.recipe


def _score_recipe_model(target: Target, options: ScoreOptions) -> Outcome | None:
    from lockstep.device import free_memory
    from lockstep.scoring.workers import open_session

    if not options.recipe_model or target.recipe_model is None:
        return None
    model = Target(target.recipe_model.model.path, target.recipe_model, 0)
    with ExitStack() as stack:
        outcome = _score(model, open_session(model.recipe, stack), replace(options, base=False), None, None)
    free_memory()
    return outcome


def _score(
    target: Target,
    session: Session,
    options: ScoreOptions,
    before: tuple[Score, ...] | None,
    recipe_model: Outcome | None,
) -> Outcome:
    """Score all sets and modes of one target; `before` are its base's scores if they are known."""
    from lockstep.scoring.base import base_fingerprint

    numerics = target.recipe.numerics.label("eval", session.policy.numerics)
    measuring = Measuring(target, session, options, numerics)
    measuring.notes += [f"warning: {note}" for note in target.notes]
    base = recipe_model.scores if recipe_model else ()
    saved = saved_of(target, session)  # first of all: a misfit is refused before any slow work
    if saved is not None:
        measuring.notes += [saved.note] if saved.note else []
        if options.base:
            base = _measure(measuring, placed(target, session, None), 0, reuse=True) if before is None else before
    proof = placed(target, session, saved)
    scores = _measure(measuring, proof, target.step, reuse=False)
    files = (*(recipe_model.files if recipe_model else ()), *measuring.files)
    untrained = base_fingerprint(session, proof) if saved is None else ""
    return Outcome(target, proof, scores, base, files, tuple(measuring.notes), tuple(measuring.alarms), untrained)


def _measure(measuring: Measuring, proof: Proof, step: int, *, reuse: bool) -> tuple[Score, ...]:
    """Return one score per set and mode for the weights of `proof`; with `reuse`, stored ones with equal conditions stay."""
    from lockstep.run.evaluation import computing

    session, recipe, scores = measuring.session, measuring.target.recipe, []
    with computing(session.engine, measuring.numerics):
        if session.engine.forward.numerics:
            layers = session.engine.set_forward(session.engine.forward).quantised_layers
            note = f"{measuring.numerics}: {layers} linear layers quantised"
            measuring.notes += [note] if note not in measuring.notes else []
        for chosen in measuring.options.sets(recipe):
            for mode in measuring.options.modes(recipe, chosen):
                scores.append(_one(measuring, proof, step, chosen, mode, reuse=reuse))
        scores += [_of_lm_eval(measuring, proof, step, asked, base=reuse) for asked in recipe.eval.lm_eval]
    return tuple(scores)


def _of_lm_eval(measuring: Measuring, proof: Proof, step: int, asked: LmEvalSet, *, base: bool) -> Score:
    """Return the score of a task of lm-eval, the stored one if its conditions are the same."""
    target, session, name = measuring.target, measuring.session, f"lm_eval.{asked.name}"
    chat, options = session.policy.chat, measuring.options
    plan = eval_plan(target.recipe, measuring.numerics, session.policy.context)
    task = load_task(asked, chat)
    conditions = conditions_of(task, chat, plan, proof)
    if options.out is not None:
        home = free_path(options.out / file_name(target, name, step, base=base), conditions)
    else:
        home = _home(measuring, name, conditions, step, own=_is_the_runs_own_task(measuring, asked, plan), base=base)
    score = stored_score(home, conditions)
    if score is None:
        progress = options.watch(name, step) if options.watch else lambda done, of: None
        source = f"the base of {target.label}" if base else target.label
        score = evaluate_task(session.engine, task, chat, plan, proof, step=step, source=source, progress=progress)
        _store(measuring, score, None, home)
    else:
        measuring.notes.append(f"{name} at step {step}: measured before under the same conditions ({home})")
    return score


def _one(measuring: Measuring, proof: Proof, step: int, chosen: EvalSet, mode: EvalMode, *, reuse: bool) -> Score:
    session, target = measuring.session, measuring.target
    name = target.recipe.eval.score_name(chosen.role, mode.name)
    plan = eval_plan(target.recipe, measuring.numerics, session.policy.context, chosen)
    items = heldout_items(session.task, plan)
    conditions = score_conditions(items, session.task, session.policy.chat, mode, plan, proof)
    home = _home(measuring, name, conditions, step, own=_is_the_runs_own(measuring, chosen, mode, plan), base=reuse)
    stored = stored_score(home, conditions, mode.numbers)
    if stored is not None and reuse:
        measuring.notes.append(f"{name} at step {step}: measured before under the same conditions ({home})")
        score = stored
    else:
        progress = measuring.options.watch(name, step) if measuring.options.watch else None
        source = f"the base of {target.label}" if reuse else target.label
        score = evaluate(
            session.engine,
            session.task,
            session.policy.chat,
            mode,
            plan,
            proof,
            step=step,
            source=source,
            progress=progress,
        )
        if stored is not None:
            measuring.notes.append(agreement(name, score, stored, home))
    out = measuring.options.out
    elsewhere = free_path(out / file_name(target, name, step, base=reuse), conditions) if out else home
    _store(measuring, score, home if stored is not None else None, elsewhere)
    if score is not stored:
        try:
            measuring.alarms += _same_as_before(target, name, step, score)
        except EvaluationError as error:  # a file of another score in the run's folder
            measuring.notes.append(f"warning: not compared with {error.where}: {error.what}")
    return score


def _same_as_before(target: Target, name: str, step: int, score: Score) -> list[str]:
    """Return a line for each stored score of the run's step with the same replies as this one, although its numerics differ.

    At step 0 the numerics alone count: a fresh adapter has other weights by another seed, and the base's replies.
    """
    if target.run is None:
        return []
    path = score_path(target.run, step, name)
    mine, others = (f"{target.label}, now", brief_of(score)), sorted(path.parent.rglob(path.name))
    found = [(str(other), read_brief(other)) for other in others]
    if step == 0:
        found = [one for one in found if one[1].score.conditions.numerics != score.conditions.numerics]
    return [alarm for one in found for alarm in identity_alarms([one, mine])]


def agreement(name: str, score: Score, stored: Score, path: Path) -> str:
    """Say whether a second measurement of the same weights gave the same replies."""
    pairs = list(zip(score.results, stored.results, strict=True))
    differing = [a.id for a, b in pairs if (a.correct, a.text) != (b.correct, b.text)]
    if not differing:
        return f"{name}: all {len(pairs)} replies are those of the stored score ({path})"
    return (
        f"warning: {name}: {len(differing)} of {len(pairs)} replies differ from those of the stored score ({path}), "
        f"first {differing[0]}; the weights are the same, so look at device, threads and versions"
    )


# --- where scores go ------------------------------------------------------------------------------------------------
def _home(measuring: Measuring, name: str, conditions: Conditions, step: int, *, own: bool, base: bool) -> Path:
    """Return the default path of a score, without --out. `own` tells whether the conditions are those of the run.

    In a run, scores under the run's own conditions are stored beside those of its training; others in a separate folder, so
    that they never mix. For a model or an adapter the first score has the plain name, one under other conditions a folder.
    """
    target = measuring.target
    if target.run is None or target.trained is None:
        return free_path(Path(target.recipe.runs_dir) / "scores" / file_name(target, name, step, base=base), conditions)
    path = score_path(target.run, step, name)
    if own:
        return free_path(path, conditions)  # data, template and model are files, which may have changed
    return path.parent / conditions_digest(replace(conditions, weights="")) / path.name


def free_path(path: Path, conditions: Conditions) -> Path:
    """Return the path, or one in a separate folder if it holds another score. Raises the errors of read_brief."""
    if not path.exists() or read_brief(path).score.conditions == conditions:
        return path
    return path.parent / conditions_digest(conditions) / path.name


def conditions_digest(conditions: Conditions) -> str:
    return hashlib.sha256(json.dumps(dataclasses.asdict(conditions), sort_keys=True).encode()).hexdigest()[:8]


def _is_the_runs_own(measuring: Measuring, chosen: EvalSet, mode: EvalMode, plan: EvalPlan) -> bool:
    target, policy = measuring.target, measuring.session.policy
    trained, recipe = target.trained, target.recipe
    mine = [one for one in trained.eval.sets if (one.role, one.items) == (chosen.role, chosen.items)] if trained else []
    if trained is None or not mine or mode not in mine[0].modes:
        return False
    own = eval_plan(trained, trained.numerics.label("eval", policy.numerics), policy.context, chosen)
    same_names = trained.eval.role == recipe.eval.role
    same_base = trained.warm_start == recipe.warm_start  # otherwise the score would replace the run's own
    return same_names and same_base and (own, trained.task, trained.chat) == (plan, recipe.task, recipe.chat)


def _is_the_runs_own_task(measuring: Measuring, asked: LmEvalSet, plan: EvalPlan) -> bool:
    target, policy = measuring.target, measuring.session.policy
    trained, recipe = target.trained, target.recipe
    if trained is None or asked not in trained.eval.lm_eval:
        return False
    mine = eval_plan(trained, trained.numerics.label("eval", policy.numerics), policy.context)
    computed = [(one.model, one.numerics, one.engine, one.seed) for one in (mine, plan)]
    return computed[0] == computed[1] and (trained.chat, trained.warm_start) == (recipe.chat, recipe.warm_start)


def _store(measuring: Measuring, score: Score, stored: Path | None, path: Path) -> None:
    """Write the score, unless it exists already. A stored score under the same conditions is kept."""
    if path != stored:
        with _writing(path):
            write_score(path, score)
    if path not in measuring.files:
        measuring.files.append(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the score cannot be written: {error.strerror}"
        raise EvaluationError(what, where=str(path), fix="give a folder that can be written: --out DIR") from error


def file_name(target: Target, mode: str, step: int, *, base: bool = False) -> str:
    """Return a file name. Example: "mine_step_000040_greedy.json". An adapter's base is named as such."""
    if target.name:
        name = target.name
    elif target.run is not None:
        name = target.run.resolve().name
    else:
        place = target.checkpoint.path if target.checkpoint else None
        place = target.adapter.path if target.adapter else place
        name = "_".join((place or Path(target.recipe.model.path)).parts[-2:])
    name += "_base" if base and target.adapter is not None else ""
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name).strip('_')}_step_{step:06d}_{mode}.json"

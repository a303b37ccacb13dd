"""report.html: one file that explains a run, without a network, a script or a library."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from lockstep.config.adapter import adapter_name
from lockstep.config.schema import FileTask, PythonTask, ReasoningGymTask, Recipe, Sft
from lockstep.evaluate.table import Row
from lockstep.report.charts import charts
from lockstep.report.elements import details, facts, long_text, note, page, section, table, text
from lockstep.report.gather import NamedScore, Outside, RunFacts, Samples, gather
from lockstep.report.svg import short
from lockstep.track.catalogue import find, healthy_text
from lockstep.track.files import write_atomic
from lockstep.track.rollouts import RolloutRow
from lockstep.track.rundir import RunDirectory
from lockstep.track.text import reading_line
from lockstep.track.writer import StepRecord, proof_from_json
from lockstep.types import Proof, Score

EVENTS_SHOWN = 200


def write_report(run_dir: str | Path | RunDirectory) -> Path:
    """Make the page of a run, finished or not, and return its path. Raises RunDirectoryError if it is none, OSError."""
    run = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory.open(run_dir)
    write_atomic(run.report_path, render(gather(run)))
    return run.report_path


def render(run: RunFacts) -> str:
    """The page as text."""
    parts = [
        _header(run),
        "".join(note(line) for line in run.notes),
        section("Base against trained", _comparison(run)),
        section("Curves", charts(run)),
        section("Outside the healthy range", _outside(run.outside)) if run.records else "",
        section("Proof of sync", _proofs(run.records)),
        section("Objective", _formula(run)),
        section("Samples", _samples(run.samples)),
        section("Events", _events(run)),
        section("Provenance", _provenance(run)),
    ]
    return page(f"{run.name} · Lockstep", "".join(parts))


def _header(run: RunFacts) -> str:
    trained = max((record.step for record in run.records), default=0)
    planned = f" of {run.recipe.steps}" if run.recipe is not None else ""
    attempts = len(run.manifest["attempts"])
    line = [f"{trained}{planned} steps", f"{attempts} attempt{'s' if attempts > 1 else ''}", *_when(run.records)]
    head = f'<h1>{text(run.name)}</h1><p class="soft">{text(" · ".join(line))}</p>'
    return f"<header>{head}{_recipe_facts(run)}{details('The whole recipe', long_text(run.recipe_yaml))}</header>"


def _when(records: Sequence[StepRecord]) -> list[str]:
    if not records:
        return ["no step yet"]
    first, last = records[0].time, records[-1].time
    seconds = (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
    return [f"{first[:16].replace('T', ' ')} UTC", f"{seconds / 60:.1f} min from the first row to the last"]


def _recipe_facts(run: RunFacts) -> str:
    recipe = run.recipe
    if recipe is None:
        return ""
    adapter = adapter_name(recipe.adapter)
    match recipe.task:
        case ReasoningGymTask(dataset=name):
            task = name
        case FileTask(data=data):
            task = data.source
        case PythonTask(path=path):
            task = path
        case other:
            task = other.kind
    rows: list[tuple[str, object]] = [
        ("model", recipe.model.path),
        *_parent(run),
        ("trained", f"{adapter}, {recipe.model.dtype}"),
        ("task", task),
        *(_sft(recipe.sft) if recipe.sft is not None else _rl(recipe)),
        ("optimizer", recipe.optimizer.kind),
        ("learning rate", f"{short(recipe.lr)}, {recipe.optimizer.schedule}, warm-up {recipe.optimizer.warmup_steps}"),
        ("response budget", f"{recipe.rollout.max_tokens} tokens at temperature {recipe.rollout.temperature:g}"),
        ("engine, sync", f"{recipe.rollout.engine}, {recipe.sync.transport}"),
        ("seed", recipe.seed),
    ]
    return facts(rows)


def _rl(recipe: Recipe) -> list[tuple[str, object]]:
    return [
        ("algorithm", f"{recipe.algorithm.kind}, {recipe.algorithm.aggregation}"),
        (
            "prompts × samples",
            f"{recipe.prompts_per_step} × {recipe.samples_per_prompt} = {recipe.samples_per_step} a step",
        ),
        ("optimizer steps a step", recipe.updates_per_step),
    ]


def _sft(sft: Sft) -> list[tuple[str, object]]:
    source = sft.data.source if sft.data is not None else f"replies of {sft.rollouts.run if sft.rollouts else ''}"
    return [
        ("algorithm", f"supervised, {sft.aggregation}, loss on {sft.train_on}"),
        ("rows", source),
        ("rows a step", f"{sft.sequences_per_step} of at most {sft.max_tokens} tokens"),
    ]


def _parent(run: RunFacts) -> list[tuple[str, object]]:
    """The chain of runs that this one started from, back to a model."""
    steps, parent = [], run.manifest.get("parent")
    while parent:
        steps.append(f"{parent['run']} at step {parent['step']}, weights {parent['fingerprint']}")
        parent = parent.get("parent")
    return [("warm start from", ", which started from ".join(steps))] if steps else []


def _formula(run: RunFacts) -> str:
    formula = run.manifest.get("formula")
    return f"<pre>{text(formula)}</pre>" if formula else ""


def _comparison(run: RunFacts) -> str:
    if run.rows:
        columns = ("task", "mode", "items", "base", "trained", "difference, points", "rose / fell", "p", "verdict")
        warnings = "".join(note(f"{row.mode}: {row.comparison.warning}") for row in run.rows if row.comparison.warning)
        return (
            table(columns, [_row(row) for row in run.rows], style="comparison")
            + warnings
            + _conditions(run.rows[-1].trained)
        )
    head = ("step", "mode", "items", "accuracy", "truncated", "unscored", "mean tokens")
    return table(head, [_score(named) for named in run.scores]) if run.scores else ""


def _score(named: NamedScore) -> tuple[object, ...]:
    s = named.score
    return s.step, named.mode, s.items, _share(s), f"{100 * s.truncated:.1f} %", s.unscored, f"{s.mean_tokens:.1f}"


def _row(row: Row) -> tuple[object, ...]:
    c = row.comparison
    difference = f"{100 * c.difference:+.1f} [{100 * c.low:+.1f}, {100 * c.high:+.1f}]"
    p = f"{c.p:.2g}" if c.p >= 1e-4 else "< 0.0001"
    return (
        row.task,
        row.mode,
        c.n,
        _share(row.base),
        _share(row.trained),
        difference,
        f"{c.c} / {c.b}",
        p,
        c.verdict.value,
    )


def _share(score: Score) -> str:
    return f"{100 * score.accuracy:.1f} % [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def _conditions(score: Score) -> str:
    c = score.conditions
    what = f"{c.numerics}, engine {c.engine}, {c.max_tokens} tokens, data {c.data_hash[:12]}, template {c.template_hash[:12]}"
    return (
        f'<p class="soft">Steps 0 and {score.step}; {text(what)}; 1 item = {100 / max(score.items, 1):.2g} points.</p>'
    )


def _outside(rows: Sequence[Outside]) -> str:
    if not rows:
        return "<p>No metric left its healthy range.</p>"
    cells: list[tuple[object, ...]] = []
    for row in rows:
        info = find(row.name)
        values = short(row.first) if len(row.steps) == 1 else f"{short(row.first)} … {short(row.last)}"
        healthy, advice = (healthy_text(info), info.advice) if info is not None else ("–", "")
        cells.append((row.name, _steps(row.steps), values, healthy, advice))
    return table(("metric", "steps", "value there", "healthy", "what to do"), cells)


def _steps(steps: Sequence[int]) -> str:
    where = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    return where if len(steps) == 1 else f"{len(steps)} steps, {where}"


def _proofs(records: Sequence[StepRecord]) -> str:
    proofs = [(record.step, proof_from_json(record.proof)) for record in records if record.proof is not None]
    if not proofs:
        return note("No step has a proof that the engine's weights are the learner's.") if records else ""
    failed = [(step, proof) for step, proof in proofs if not proof.passed]
    probes = [proof.probe for _, proof in proofs if proof.probe is not None]
    _, last = proofs[-1]
    rows: list[tuple[str, object]] = [
        ("steps with a proof", f"{len(proofs)}, of which {len(proofs) - len(failed)} passed"),
        ("compared at each sync", f"{last.tensors} tensors, {last.bytes / 2**20:.1f} MiB"),
        ("changed in the last step", f"{last.changed} tensors"),
        ("probes", f"{len(probes)} of {probes[0].tokens} tokens" if probes else "none"),
        ("largest probe mean |Δ log p|", short(max(p.mean for p in probes)) if probes else "–"),
        ("largest probe maximum", short(max(p.max for p in probes)) if probes else "–"),
        ("mean time", f"{1e3 * sum(proof.seconds for _, proof in proofs) / len(proofs):.1f} ms"),
        ("weights at the end", f"version {last.version}, fingerprint {last.fingerprint}"),
    ]
    return facts(rows) + "".join(note(_failure(step, proof)) for step, proof in failed)


def _failure(step: int, proof: Proof) -> str:
    if proof.mismatched:
        return f"Step {step}: {len(proof.mismatched)} tensors differ: {', '.join(proof.mismatched[:5])}"
    probe = proof.probe
    return f"Step {step}: probe mean {probe.mean:.3g} exceeds {probe.tolerance:.3g}" if probe else f"Step {step} failed"


def _samples(samples: Samples | None) -> str:
    if samples is None:
        return ""
    intro = (
        f"<p class='soft'>{len(samples.rows)} replies of step {samples.step}: unscored, wrong and right ones in turn. Questions "
        "are shown without what the recipe puts around them; <code>lockstep rollouts RUN --seen</code> shows all of it.</p>"
    )
    return intro + "".join(_sample(row) for row in samples.rows)


def _sample(row: RolloutRow) -> str:
    word, css = {None: ("unscored", "bad"), False: ("wrong", "bad"), True: ("right", "good")}[row.right]
    reward = "–" if row.reward is None else f"{row.reward:g}"
    verdict = f"{reading_line(row.extracted, row.method, row.answer)}, reward {reward}, advantage {row.advantage:.3g}"
    question = "\n\n".join(
        f"{m['role']}: {m['content']}" if len(row.messages) > 1 else m["content"] for m in row.messages
    )
    ended = "" if row.finish == "stop" else f", ended by {row.finish}"
    return (
        f'<article class="sample"><p><b class="{css}">{word}</b> · {text(verdict)}</p>'
        f'<p class="soft">question ({text(row.prompt_id)})</p>{long_text(question)}'
        f'<p class="soft">reply, sample {row.sample}, {len(row.ids)} tokens{text(ended)}</p>{long_text(row.text)}'
        + (note(f"not scored: {row.error}") if row.error else "")
        + "</article>"
    )


def _events(run: RunFacts) -> str:
    shown = run.events[-EVENTS_SHOWN:]
    rows = [
        (e.time[:19].replace("T", " "), e.attempt, "–" if e.step is None else e.step, e.kind, e.message) for e in shown
    ]
    if not rows:
        return ""
    left = len(run.events) - len(shown)
    more = f'<p class="soft">{left} earlier ones are in events.jsonl.</p>' if left else ""
    body = table(("time, UTC", "attempt", "step", "what", "message"), rows) + more
    return body if len(rows) <= 12 else details(f"{len(run.events)} events", body)


def _provenance(run: RunFacts) -> str:
    m = run.manifest
    code, cpu = m.get("code") or {}, m.get("cpu") or {}
    commit = code.get("commit")
    changed = f", {code.get('changed_files')} files changed" if code.get("changed_files") else ""
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in m.get("gpu") or [])
    rows: list[tuple[str, object]] = [
        ("code", f"{commit[:12]}{changed}" if commit else code.get("why", "unknown")),
        ("lockstep", m.get("lockstep", "unknown")),
        (
            "machine",
            f"{cpu.get('model', 'unknown')}, {cpu.get('threads', '?')} threads, {cpu.get('memory_gib', '?')} GiB",
        ),
        ("GPU", gpus or "none"),
        ("python", m.get("python", "unknown")),
        ("platform", m.get("platform", "unknown")),
        ("threads used", m.get("threads", "unknown")),
        ("command", " ".join(m.get("command") or []) or "unknown"),
    ]
    packages = table(("package", "version"), list((m.get("packages") or {}).items()))
    return facts(rows) + details("Packages", packages)

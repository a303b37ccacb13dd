"""Writes report.html: one file that explains a run and loads no other file. `lockstep view` draws charts with the same code."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import jinja2

from lockstep.config.adapter import adapter_name
from lockstep.config.schema import FileTask, PythonTask, ReasoningGymTask, Recipe, Sft
from lockstep.report import tables
from lockstep.report.data import page_data
from lockstep.report.figures import figures, marks
from lockstep.report.gather import RunFacts, gather
from lockstep.report.tables import short
from lockstep.track.console import duration
from lockstep.track.files import write_atomic
from lockstep.track.rollouts import RolloutRow
from lockstep.track.rundir import RunDirectory, ancestors
from lockstep.track.text import reading_line, visible
from lockstep.track.writer import Event, StepRecord, proof_from_json
from lockstep.types import Proof

Fact: TypeAlias = tuple[str, object]
EVENTS_SHOWN = 200
LONGEST = 6000
"""Characters of one text on the page."""
SCRIPTS = ("uplot.min.js", "charts.js", "report.js")
STYLES = ("uplot.min.css", "base.css", "report.css")


def write_report(run_dir: str | Path | RunDirectory) -> Path:
    """Make the page of a run, finished or not, and return its path. Raises RunDirectoryError if it is none, OSError."""
    run = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory.open(run_dir)
    write_atomic(run.report_path, render(gather(run)))
    return run.report_path


def render(run: RunFacts) -> str:
    """Render the page as text. Its policy names the digests of its own scripts and styles, so that no other can run."""
    ranges = run.recipe.health.ranges if run.recipe else {}
    shown_marks = marks(run.records, run.events, ranges)
    charts = page_data({"figures": figures(run.records, run.scores, ranges), "marks": shown_marks})
    style, script = "\n".join(map(asset, STYLES)), "\n".join(map(asset, SCRIPTS))
    policy = f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; base-uri 'none'; form-action 'none'"
    shown = run.events[-EVENTS_SHOWN:]
    return (
        _templates()
        .get_template("report.html")
        .render(
            run=run,
            style=style,
            script=script,
            policy=policy,
            charts=charts,
            summary=_summary(run),
            recipe=_recipe_facts(run),
            tables=tables,
            proofs=_proofs(run.records),
            events=shown,
            earlier=len(run.events) - len(shown),
            provenance=_provenance(run.manifest),
            longest=LONGEST,
        )
    )


def asset(name: str) -> str:
    """Read a script or a style of the page."""
    return resources.files("lockstep.report").joinpath("assets", name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """Return a source of a Content-Security-Policy that allows this inline text alone."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _templates() -> jinja2.Environment:
    """Everything is escaped, and control characters are made visible, whatever a template forgets."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lockstep.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else visible(str(value)),
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "comparison": tables.comparison_row, "score": tables.score_row, "outside": tables.outside_row,
        "verdict": _verdict, "event": _event,
    }  # fmt: skip
    return environment


def _summary(run: RunFacts) -> str:
    trained = max((record.step for record in run.records), default=0)
    planned = f" of {run.recipe.steps}" if run.recipe is not None else ""
    attempts = len(run.manifest["attempts"])
    parts = [f"{trained}{planned} steps", f"{attempts} attempt{'s' if attempts > 1 else ''}", *_when(run.records)]
    return " · ".join(parts)


def _when(records: Sequence[StepRecord]) -> list[str]:
    if not records:
        return ["no step yet"]
    first, last = records[0].time, records[-1].time
    seconds = (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
    return [f"{first[:16].replace('T', ' ')} UTC", f"{duration(seconds)} from the first row to the last"]


def _recipe_facts(run: RunFacts) -> list[Fact]:
    recipe, parents = run.recipe, ancestors(run.manifest)
    if recipe is None:
        return []
    match recipe.task:
        case ReasoningGymTask(dataset=name):
            task = name
        case FileTask(data=data):
            task = data.source
        case PythonTask(path=path):
            task = path
        case other:
            task = other.kind
    return [
        ("model", recipe.model.path),
        *([("warm start from", ", which started from ".join(parents))] if parents else []),
        ("trained", f"{adapter_name(recipe.adapter)}, {recipe.model.dtype}"),
        ("task", task),
        *(_sft(recipe.sft) if recipe.sft is not None else _rl(recipe)),
        ("optimizer", recipe.optimizer.kind),
        (
            "learning rate",
            f"{short(recipe.lr)}, {recipe.optimizer.schedule}, warm-up {recipe.optimizer.warmup(recipe.policy_updates)}",
        ),
        ("response budget", f"{recipe.rollout.max_tokens} tokens at temperature {recipe.rollout.temperature:g}"),
        ("engine, sync", f"{recipe.rollout.engine}, {recipe.sync.transport}"),
        ("seed", recipe.seed),
    ]


def _rl(recipe: Recipe) -> list[Fact]:
    prompts, samples = recipe.prompts_per_step, recipe.samples_per_prompt
    return [
        ("algorithm", f"{recipe.algorithm.kind}, {recipe.algorithm.aggregation}"),
        ("prompts × samples", f"{prompts} × {samples} = {recipe.samples_per_step} a step"),
        ("optimizer steps a step", recipe.updates_per_step),
    ]


def _sft(sft: Sft) -> list[Fact]:
    source = sft.data.source if sft.data is not None else f"replies of {sft.rollouts.run if sft.rollouts else ''}"
    return [
        ("algorithm", f"supervised, {sft.aggregation}, loss on {sft.train_on}"),
        ("rows", source),
        ("rows a step", f"{sft.sequences_per_step} of at most {sft.max_tokens} tokens"),
    ]


def _proofs(records: Sequence[StepRecord]) -> tuple[list[Fact], list[str]]:
    """Sum up the proofs of sync, and name each that failed."""
    proofs = [(record.step, proof_from_json(record.proof)) for record in records if record.proof is not None]
    if not proofs:
        return [], ["No step has a proof that the engine's weights are the learner's."] if records else []
    failed = [(step, proof) for step, proof in proofs if not proof.passed]
    probes = [proof.probe for _, proof in proofs if proof.probe is not None]
    _, last = proofs[-1]
    facts: list[Fact] = [
        ("steps with a proof", f"{len(proofs)}, of which {len(proofs) - len(failed)} passed"),
        ("compared at each sync", f"{last.tensors} tensors, {last.bytes / 2**20:.1f} MiB"),
        ("changed in the last step", f"{last.changed} tensors"),
        ("probes", f"{len(probes)} of {probes[0].tokens} tokens" if probes else "none"),
        ("largest probe mean |Δ log p|", short(max(p.mean for p in probes)) if probes else "–"),
        ("largest probe maximum", short(max(p.max for p in probes)) if probes else "–"),
        ("mean time", f"{1e3 * sum(proof.seconds for _, proof in proofs) / len(proofs):.1f} ms"),
        ("weights at the end", f"version {last.version}, fingerprint {last.fingerprint}"),
    ]
    return facts, [_failure(step, proof) for step, proof in failed]


def _failure(step: int, proof: Proof) -> str:
    if proof.mismatched:
        return f"Step {step}: {len(proof.mismatched)} tensors differ: {', '.join(proof.mismatched[:5])}"
    probe = proof.probe
    return f"Step {step}: probe mean {probe.mean:.3g} exceeds {probe.tolerance:.3g}" if probe else f"Step {step} failed"


def _verdict(row: RolloutRow) -> str:
    reward = "–" if row.reward is None else f"{row.reward:g}"
    return f"{reading_line(row.extracted, row.method, row.answer)}, reward {reward}, advantage {row.advantage:.3g}"


def _event(event: Event) -> tuple[object, ...]:
    step = "–" if event.step is None else event.step
    return event.time[:19].replace("T", " "), event.attempt, step, event.kind, event.message


def _provenance(m: dict[str, Any]) -> list[Fact]:
    code, cpu = m.get("code") or {}, m.get("cpu") or {}
    commit = code.get("commit")
    changed = f", {code.get('changed_files')} files changed" if code.get("changed_files") else ""
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in m.get("gpu") or [])
    machine = f"{cpu.get('model', 'unknown')}, {cpu.get('threads', '?')} threads, {cpu.get('memory_gib', '?')} GiB"
    return [
        ("code", f"{commit[:12]}{changed}" if commit else code.get("why", "unknown")),
        ("lockstep", m.get("lockstep", "unknown")),
        ("machine", machine),
        ("GPU", gpus or "none"),
        ("python", m.get("python", "unknown")),
        ("platform", m.get("platform", "unknown")),
        ("threads used", m.get("threads", "unknown")),
        ("command", " ".join(m.get("command") or []) or "unknown"),
    ]

"""Writes the model card of an export: its origin, how to prompt it, its scores, and how it was verified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lockstep
from lockstep.config.adapter import adapter_name
from lockstep.evaluation.records import read_brief
from lockstep.evaluation.table import estimate_line
from lockstep.export.prompt import asking_code, kind_of_load, prompt_section
from lockstep.export.verify import Verified
from lockstep.models import resolve
from lockstep.models.resolve import Source as From
from lockstep.scoring.targets import Target
from lockstep.track.rundir import RunDirectory, ancestors

LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank from its default on."""
LIBRARIES = {"model": "transformers", "adapter": "peft", "gguf": "gguf"}


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of an export."""

    label: str
    base: str
    revision: str | None
    step: int
    loop: str
    adapter: str
    numerics: str
    """Precision of training."""
    weights: str
    """Fingerprint of the trained weights, adapters apart from the base, as the checkpoint has it; "" for an untrained model."""
    architecture: str
    lineage: tuple[str, ...]
    """Runs that this one started from, newest first."""


def source_of(target: Target, architecture: str) -> Source:
    recipe, info = target.recipe, target.checkpoint
    meta: Any = info.meta if info is not None else {}
    saved = str(meta.get("numerics", recipe.model.dtype))
    return Source(
        label=target.label,
        base=recipe.model.path,
        revision=recipe.model.revision,
        step=target.step,
        loop=recipe.loop,
        adapter=adapter_name(recipe.adapter),
        numerics=recipe.numerics.label("train", "bf16" if saved == "bf16" else "fp32"),
        weights=str(meta.get("fingerprint", "")),
        architecture=architecture,
        lineage=tuple(ancestors(RunDirectory.open(target.run).manifest())) if target.run else (),
    )


def name_of(target: Target) -> str:
    return target.run.name if target.run else Path(target.label).name


def model_card(
    target: Target, source: Source, verified: Verified, kind: Literal["model", "adapter", "gguf"], dtype: str
) -> str:
    """Return the README.md of the folder."""
    front = ["---", f"library_name: {LIBRARIES[kind]}"]
    front += [f"base_model: {source.base}"] if resolve(target.recipe.model).source is From.HUB else []
    sections = [
        "\n".join([*front, "pipeline_tag: text-generation", "tags: [lockstep]", "---"]),
        f"# {name_of(target)}",
        *_about(source, dtype),
        "## Prompt",
        prompt_section(target.recipe, source.numerics),
        "## Use",
        _use(target, source, kind, dtype),
        "## Scores",
        *_scores(target, "start" if source.lineage else "base"),
        "## Verified",
        f"{verified.line}.",
        _HOW_GGUF if kind == "gguf" else _HOW_VERIFIED,
    ]
    if target.run is not None and (formula := RunDirectory.open(target.run).manifest().get("formula")):
        sections += ["## Objective", f"```\n{formula}\n```"]
    return "\n\n".join(sections) + "\n"


def _about(source: Source, dtype: str) -> list[str]:
    revision = f" at revision {source.revision}" if source.revision else ""
    rows = [
        ("Base", f"{source.base}{revision}"),
        ("Trained by", f"lockstep {lockstep.__version__}, loop {source.loop}, {source.step} steps, {source.adapter}"),
        ("Source", f"{source.label}{f', weights {source.weights}' if source.weights else ''}"),
        ("Computed in", f"{source.numerics} (training); the files hold {dtype}"),
    ]
    rows += [("Started from", line) for line in source.lineage]
    return ["\n".join(f"- **{name}**: {text}" for name, text in rows)]


def _scores(target: Target, first: str) -> list[str]:
    """Return the scores on record of exactly these weights, beside those of step 0: of the base, or of the run's start."""
    folder = target.run / "scores" if target.run else None
    if folder is None or not folder.is_dir():
        return ["None on record. `lockstep eval` measures it."]
    own = [read_brief(path).score for path in sorted(folder.glob(f"step_{target.step:06d}_*.json"))]
    base = [read_brief(path).score for path in sorted(folder.glob("step_000000_*.json"))] if target.step else []
    weights = str(target.checkpoint.meta["fingerprint"]) if target.checkpoint else None
    rows = []
    for score in own:
        c = score.conditions
        if weights is not None and c.weights != weights:
            continue
        before = [s for s in base if (s.conditions.task, s.conditions.mode) == (c.task, c.mode)]
        told = estimate_line(before[0].estimates[0]) if before else "–"
        rows.append(f"| {c.task} | {c.mode} | {c.numerics} | {told} | {estimate_line(score.estimates[0])} |")
    if not rows:
        return [f"None on record for step {target.step}. `lockstep eval` measures it."]
    return ["\n".join([f"| task | mode | numerics | {first} | this model |", "|---|---|---|---|---|", *rows])]


_HOW_VERIFIED = (
    "A fresh process loaded this folder with plain transformers (and PEFT for an adapter) and computed log-probabilities in "
    "fp32; they were compared with those of the model in training. `lockstep_export.json` has the figures."
)


_HOW_GGUF = (
    "Lockstep's own reader made a plain fp32 model of `model.gguf`; a fresh process loaded that with plain transformers and "
    "computed log-probabilities, which were compared with those of the model in training. llama.cpp itself was not run. "
    "`lockstep_export.json` has the figures."
)


def _use(target: Target, source: Source, kind: Literal["model", "adapter", "gguf"], dtype: str) -> str:
    if kind == "gguf":
        return "```\nllama-cli -m model.gguf --jinja\nllama-quantize model.gguf small.gguf Q4_K_M\n```"
    code = asking_code(target.recipe, target.run, kind_of_load(kind, source.base))
    if kind == "adapter":
        rank = getattr(target.recipe.adapter, "rank", 0)
        most = next((size for size in LORA_RANKS if size >= rank), rank)
        serve = f"vllm serve BASE --enable-lora --max-lora-rank {most} --lora-modules tuned=FOLDER"
        lm = f"pretrained=BASE,peft=FOLDER,dtype={dtype}"
    else:
        serve, lm = "vllm serve FOLDER", "pretrained=FOLDER,dtype=auto"
    return (
        f"```python\n{code}\n```\n\nServed or measured by other programs it needs the same prompt: they add neither suffix nor "
        f"examples.\n\n```\n{serve}\nlm_eval --model hf --model_args {lm} --tasks gsm8k --apply_chat_template\n```"
    )

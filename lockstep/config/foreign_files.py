"""Reads settings from recipes of verl, OpenRLHF and TRL (YAML, JSON, shell scripts, Python calls) without executing them.

Used by `lockstep config translate`; translate.py then makes a recipe of the settings.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from lockstep.config.foreign_settings import System
from lockstep.config.foreign_shell import number_of, shell_settings
from lockstep.config.section import Json
from lockstep.errors import ConfigError

MARKS: Mapping[System, str] = {
    "verl": r"\bverl\.|actor_rollout_ref|ppo_mini_batch_size",
    "openrlhf": r"openrlhf|--(actor|algo|rollout)\.|\b(actor_learning_rate|n_samples_per_prompt|init_kl_coef)\b",
    "trl": r"\btrl\b|GRPOConfig|num_generations|per_device_train_batch_size",
}
"""Words by which a file of each system is known."""
CONFIGS = ("GRPOConfig", "TrainingArguments")
LORA_DEFAULTS: Mapping[str, Json] = {"use_peft": True, "lora.r": 8, "lora.lora_alpha": 8}
"""Settings of a LoraConfig without keywords."""


def read_settings(path: Path) -> tuple[str, dict[str, Json]]:
    """Return a file's text and its settings by name. Raises ConfigError for a file that has none."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ConfigError([f"{path}: a folder, pipe or device, not a regular file"], fix="name the file of the run")
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    try:
        match path.suffix:
            case ".py":
                settings = dict(_python(text, str(path)))
            case ".json" | ".yaml" | ".yml":
                settings = dict(_flat(_data(text, path)))
            case _:
                settings = dict(shell_settings(text))
    except (RecursionError, MemoryError):
        raise ConfigError(
            [f"{path}: its values are nested too deeply, or one holds itself"], fix="write these values out"
        ) from None
    if not settings:
        raise ConfigError([f"{path}: no settings found; it is read as {path.suffix or 'a command line'}"])
    return text, settings


def system_of(text: str) -> System:
    """Return the system whose words a file has. Raises ConfigError if it has none."""
    found = [system for system, mark in MARKS.items() if re.search(mark, text)]
    if not found:
        raise ConfigError(
            ["no setting in the file shows whether it was written for verl, OpenRLHF or TRL"],
            fix="name the system: --from verl, --from openrlhf or --from trl",
        )
    return found[0]


def _data(text: str, path: Path) -> Json:
    try:
        found: Json = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"{path}: {' '.join(str(error).split())}"]) from None
    return found


def _flat(value: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    if not isinstance(value, dict):
        yield prefix, number_of(value) if isinstance(value, str) else value
        return
    for name, inner in value.items():
        if name not in ("defaults", "hydra", "_target_"):
            yield from _flat(inner, f"{prefix}.{name}" if prefix else str(name))


def _python(text: str, path: str) -> Iterator[tuple[str, Json]]:
    """Yield the keywords of the calls GRPOConfig(…), LoraConfig(…) and GRPOTrainer(…) whose values are written out."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        raise ConfigError([f"{path}{line}: not Python: {error.msg}"]) from None
    constants: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                constants[name] = value
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
                prefix = {"LoraConfig": "lora.", "GRPOTrainer": "trainer."}.get(called)
                if called == "LoraConfig":
                    yield from LORA_DEFAULTS.items()
                for keyword in node.keywords if called in CONFIGS or prefix else ():
                    if keyword.arg not in ("args", "peft_config"):
                        yield from _keyword(keyword, constants, prefix or "")


def _keyword(keyword: ast.keyword, constants: Mapping[str, ast.expr], prefix: str) -> Iterator[tuple[str, Json]]:
    """Yield what a keyword sets: for **names each of a mapping that is written out, else the expression."""
    found = _literal(keyword.value, constants)
    if keyword.arg is not None:
        yield from _flat(found, f"{prefix}{keyword.arg}")
    elif isinstance(found, dict):
        for name, value in found.items():
            yield from _flat(value, f"{prefix}{name}")
    else:
        yield f"{prefix}**", found


def _literal(node: ast.expr, constants: Mapping[str, ast.expr]) -> Json:
    if isinstance(node, ast.Name) and node.id in constants and not isinstance(constants[node.id], ast.Call):
        others = {name: value for name, value in constants.items() if name != node.id}  # [name] may hold itself
        return _literal(constants[node.id], others)
    if isinstance(node, ast.List):
        return [_literal(item, constants) for item in node.elts]
    try:
        found: Json = ast.literal_eval(node)
    except (ValueError, TypeError):  # {[1]: 2} has a key that cannot be one
        return ast.unparse(node)
    return found

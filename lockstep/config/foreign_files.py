"""Reads settings from recipes of verl, OpenRLHF and TRL (YAML, JSON, shell scripts, Python calls) without executing them.

Used by `lockstep config translate`; translate.py then makes a recipe of the settings.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from lockstep.config.foreign_settings import System
from lockstep.config.section import Json
from lockstep.errors import ConfigError

MARKS: Mapping[System, str] = {
    "verl": r"\bverl\.|actor_rollout_ref|ppo_mini_batch_size",
    "openrlhf": r"openrlhf|--(actor|algo|rollout)\.|\b(actor_learning_rate|n_samples_per_prompt|init_kl_coef)\b",
    "trl": r"\btrl\b|GRPOConfig|num_generations|per_device_train_batch_size",
}
"""Words by which a file of each system is known."""
CONFIGS = ("GRPOConfig", "TrainingArguments")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")


def read_settings(path: Path) -> tuple[str, dict[str, Json]]:
    """Return a file's text and its settings by name. Raises ConfigError for a file that has none."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    match path.suffix:
        case ".py":
            settings = dict(_python(text, str(path)))
        case ".json" | ".yaml" | ".yml":
            settings = dict(_flat(_data(text, path)))
        case _:
            settings = dict(_shell(text))
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
        yield prefix, _number(value) if isinstance(value, str) else value
        return
    for name, inner in value.items():
        if name not in ("defaults", "hydra", "_target_"):
            yield from _flat(inner, f"{prefix}.{name}" if prefix else str(name))


def _shell(text: str) -> Iterator[tuple[str, Json]]:
    """Yield overrides (a.b=v, +a.b=v) and options (--a v) of a script's commands, its variables put in."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
    variables = {"HOME": "~"}
    for line in joined.splitlines():
        assigned = _ASSIGNED.match(line)
        if assigned and assigned[2].startswith("("):  # an array of options
            line = assigned[2][1:]
        elif assigned:
            variables[assigned[1]] = " ".join(_words(_filled(assigned[2], variables)))
            continue
        yield from _options(_words(_filled(line, variables)))


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation over several lines
        return line.split()


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Put in variables that the script itself sets, and work out $((a * b)). Others stay as they are."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0]).strip("\"'")

    def result(match: re.Match[str]) -> str:
        bare = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        try:
            return str(_arithmetic(ast.parse(bare.strip(), mode="eval").body))
        except (SyntaxError, ValueError):
            return match[0]

    return re.sub(r"\$\(\((.*?)\)\)", result, _VARIABLE.sub(value, text))


def _arithmetic(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _arithmetic(left) * _arithmetic(right)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _arithmetic(left) + _arithmetic(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _arithmetic(left) - _arithmetic(right)
    raise ValueError("not whole numbers with + - *")


def _options(words: list[str]) -> Iterator[tuple[str, Json]]:
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if override := re.fullmatch(r"(?:--|\+{1,2})?([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL):
            yield override[1], _value(override[2])
        elif word.startswith("--") and len(word) > 2:
            values = []
            while position < len(words) and (not words[position].startswith("-") or _NUMBER.fullmatch(words[position])):
                values.append(_value(words[position].rstrip(")")))
                position += 1
            yield word[2:], True if not values else values[0] if len(values) == 1 else list(values)


def _value(text: str) -> Json:
    try:
        found: Json = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return _number(found) if isinstance(found, str) else found


def _number(text: str) -> Json:
    """Return 1e-6, which YAML reads as a text, as the number that it is."""
    return float(text) if _NUMBER.fullmatch(text) and not text.isdecimal() else text


def _python(text: str, path: str) -> Iterator[tuple[str, Json]]:
    """Yield the keywords of the calls GRPOConfig(…), LoraConfig(…) and GRPOTrainer(…) whose values are written out."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError([f"{path}:{error.lineno}: not Python: {error.msg}"]) from None
    constants: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                constants[name] = value
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
                prefix = {"LoraConfig": "lora.", "GRPOTrainer": "trainer."}.get(called)
                if called == "LoraConfig":
                    yield "use_peft", True
                for keyword in node.keywords if called in CONFIGS or prefix else ():
                    if keyword.arg not in (None, "args", "peft_config"):
                        yield from _flat(_literal(keyword.value, constants), f"{prefix or ''}{keyword.arg}")


def _literal(node: ast.expr, constants: Mapping[str, ast.expr]) -> Json:
    if isinstance(node, ast.Name) and node.id in constants and not isinstance(constants[node.id], ast.Call):
        node = constants[node.id]
    if isinstance(node, ast.List):
        return [_literal(item, constants) for item in node.elts]
    try:
        found: Json = ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
    return found

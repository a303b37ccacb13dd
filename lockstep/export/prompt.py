"""The prompt format of an exported model, as it was trained and scored with, and example code that uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from lockstep.chat.chat import ChatFormat
from lockstep.config.schema import Recipe
from lockstep.errors import RunDirectoryError
from lockstep.models import load_tokenizer, resolve
from lockstep.track.rollouts import read_rollouts, rollout_steps
from lockstep.track.rundir import RunDirectory
from lockstep.track.text import one_line

_SINGLE = ("reasoning_gym", "file", "python", "none")
"""Kinds of tasks whose questions are answered with one reply."""


def prompt_section(recipe: Recipe, numerics: str) -> str:
    """Return the text around each question in training and evaluation, and the sampling of replies."""
    chat, budget = recipe.chat, recipe.eval.max_tokens or recipe.rollout.max_tokens
    scored = [
        f"{mode.name} (temperature {mode.temperature:g}, {mode.samples} a question)" for _, mode in recipe.eval.pairs
    ]
    trained = f"sampled at temperature {recipe.rollout.temperature:g}" if recipe.loop == "rl" else "none (supervised)"
    rows = [
        ("System text", f"`{one_line(chat.system, 200)}`" if chat.system is not None else "none of the recipe's"),
        ("Examples", f"{len(chat.examples)} before each question" if chat.examples else "none"),
        ("Suffix", f"`{one_line(chat.suffix, 200)}` after each question" if chat.suffix else "none"),
        ("Template variables", f"`{json.dumps(chat.template_kwargs)}`" if chat.template_kwargs else "none"),
        ("Tokens of a reply", f"at most {recipe.rollout.max_tokens} in training, {budget} in evaluations"),
        ("Stop texts", ", ".join(f"`{text}`" for text in recipe.rollout.stop) or "none but the end tokens"),
        ("Replies in training", trained),
        ("Replies in evaluations", ", ".join(scored) if recipe.eval.enabled else "none"),
        ("Precision", f"{numerics} in training; {recipe.numerics.label('eval', numerics)} in evaluations"),
    ]
    lines = [
        "The model was trained and scored with this prompt. Asked in another way, it may answer in another way.",
        "",
    ]
    lines += [f"- **{name}**: {text}" for name, text in rows]
    if recipe.task.kind not in _SINGLE:
        lines += [
            "",
            "Its task has several turns (tools, an environment, a game): the code below asks for the first reply.",
        ]
    return "\n".join(lines)


def asking_code(recipe: Recipe, run: Path | None, load: str) -> str:
    """Return a Python program that asks the exported model as it was trained. `load` defines `model`, from FOLDER."""
    chat = recipe.chat
    examples = "".join(f"    ({example.user!r}, {example.assistant!r}),\n" for example in chat.examples)
    ends = list(chat_format(recipe).stop_ids)
    kwargs = "".join(f", {name}={value!r}" for name, value in chat.template_kwargs.items())
    budget = recipe.eval.max_tokens or recipe.rollout.max_tokens
    stops = f", stop_strings={recipe.rollout.stop!r}, tokenizer=tokenizer" if recipe.rollout.stop else ""
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "."  # this folder
SYSTEM = {chat.system!r}
EXAMPLES = [{chr(10) if examples else ""}{examples}]
SUFFIX = {chat.suffix!r}

{load}
tokenizer = AutoTokenizer.from_pretrained(FOLDER)


def ask(question):
    messages = [] if SYSTEM is None else [{{"role": "system", "content": SYSTEM}}]
    for user, assistant in EXAMPLES:
        messages += [{{"role": "user", "content": user + SUFFIX}}, {{"role": "assistant", "content": assistant}}]
    messages.append({{"role": "user", "content": question + SUFFIX}})
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{kwargs}
    ).to(model.device)
    reply = model.generate(**prompt, max_new_tokens={budget}, do_sample=False, eos_token_id={ends}{stops})
    return tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


print(ask({_question(run)!r}))"""


def kind_of_load(kind: Literal["model", "adapter"], base: str) -> str:
    """Return the lines that load the model."""
    if kind == "model":
        return 'model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")'
    return (
        f"from peft import PeftModel\n\nBASE = {base!r}  # the model that was trained, or its folder\n"
        'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, dtype="auto"), FOLDER)'
    )


def chat_format(recipe: Recipe) -> ChatFormat:
    """Return the chat format of the recipe's model, as a run has it; no weights are loaded."""
    resolved = resolve(recipe.model)
    generation = resolved.path / "generation_config.json"
    ends = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.is_file() else None
    return ChatFormat(load_tokenizer(resolved), recipe.chat, ends)


def _question(run: Path | None) -> str:
    """Return a question of the run's last stored step; a stand-in where none is stored."""
    if run is None:
        return "YOUR QUESTION"
    directory = RunDirectory.open(run)
    steps = rollout_steps(directory)
    try:
        rows = read_rollouts(directory, steps[-1]) if steps else []
    except RunDirectoryError:  # a damaged file of rollouts is no reason to have no card
        rows = []
    asked = [message["content"] for row in rows[:1] for message in row.messages if message["role"] == "user"]
    return asked[-1] if asked else "YOUR QUESTION"

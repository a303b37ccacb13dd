"""Whole games against a frozen adapter: its moves are those of its own weights, and what is no opponent is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from lockstep.build.build import build_task_of
from lockstep.build.opponents import OpponentSampler, load_opponent, pinned_opponents
from lockstep.checkpoint.store import list_checkpoints
from lockstep.config import schema
from lockstep.config.load import load
from lockstep.config.schema import Lora, Recipe
from lockstep.envs.runners import Fault
from lockstep.envs.spiel.rival import RivalRunner
from lockstep.envs.spiel.states import state_at
from lockstep.envs.spiel.text import question
from lockstep.errors import EngineError, LockstepError, ModelError, TaskError
from lockstep.learner.adapter_files import Base, save_adapter
from lockstep.learner.adapters import attach
from lockstep.loops.start import start_run
from lockstep.models import load_model, resolve
from lockstep.models.attention import NAME
from lockstep.rollout.native import NativeEngine
from lockstep.tasks.open_spiel import SpielGames
from lockstep.track.rollouts import read_rollouts
from lockstep.track.writer import read_metrics
from lockstep.types import Prompt, Request, Sampling, Turn
from tests.envs.played import engine_of
from tests.loops.runs import LORA, NO_EVAL, words
from tests.tiny import write_tiny_model

GAMES = {
    "kind": "open_spiel",
    "games": ["tic_tac_toe"],
    "reward_mode": "game",
    "num_tasks_per_case": 20,
    "max_random_steps": 2,
    "answer": "reply",
    "illegal_moves": 3,
    "opponent": "adapter",
    "turns": {"limit": 5, "reply_tokens": 8},
}


def recipe(folder: Path, model: Path, rival: Path | str, *overrides: str, **settings: Any) -> Recipe:
    (path, *_) = words(folder, model)
    content = yaml.safe_load(Path(path).read_text())
    task = {**GAMES, "rival": {"path": str(rival), "max_tokens": 6, **settings}}
    content |= {"task": task, "rollout": {"max_tokens": 700, "slots": 8}}
    Path(path).write_text(yaml.safe_dump(content))
    return load([path, *overrides])


def moved_model(model: Path, seed: int = 3) -> tuple[Any, Base, Lora]:
    """The tiny model with an adapter that is far from its start."""
    settings = Lora(rank=4)
    resolved = resolve(schema.Model(path=str(model), dtype="fp32"))
    base = load_model(resolved, dtype=torch.float32, device="cpu", attention=NAME)
    origin = Base.of(base, resolved.name)
    made = attach(base, settings, seed, origin)
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=numbers))
    return made, origin, settings


def adapter_of(folder: Path, model: Path) -> Path:
    made, origin, settings = moved_model(model)
    save_adapter(folder / "rival", made, settings, origin)
    return folder / "rival"


def replies(sampler: OpponentSampler, asked: dict[str, tuple[Any, int]]) -> dict[str, str]:
    for key, (messages, seed) in asked.items():
        sampler.ask(key, messages, seed)
    found: dict[str, str] = {}
    while len(found) < len(asked):
        found |= dict(sampler.poll(30.0))
    return found


def test_its_replies_are_those_of_its_own_weights_whatever_is_asked_beside(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    made = recipe(tmp_path, tiny_model_dir, adapter_of(tmp_path, tiny_model_dir))
    states = [state_at("tic_tac_toe", history) for history in ((), (4,), (4, 0), (0, 8), (2, 3, 5))]
    asked = {
        f"q{i}": (question(state, "tic_tac_toe", "reply", show_moves=True), 10 + i) for i, state in enumerate(states)
    }
    assert isinstance(made.task, schema.OpenSpielTask)
    assert made.task.rival is not None
    sampler = load_opponent(made.task.rival, made)
    together = replies(sampler, asked)
    alone = {key: replies(sampler, {key: value})[key] for key, value in asked.items()}
    assert together == alone
    engine = NativeEngine(
        moved_model(tiny_model_dir)[0].requires_grad_(False),
        slots=2,
        stop_ids=frozenset(sampler._chat.stop_ids),
        decode=sampler._chat.tokenizer.decode,
    )
    engine.load(iter(()), 0)
    for key, (messages, seed) in asked.items():
        engine.submit([Request(key, sampler._chat.render(messages), key, seed, Sampling(6), 0)])
        (completion,) = engine.completed()
        assert sampler._chat.answer(completion.ids) == together[key]
    assert "frozen, over" in sampler.note
    assert len(set(together.values())) > 1


def test_a_whole_game_is_played_against_it(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The player takes the first free cell; the tiny model's replies are no moves, so it moves at random, which is counted."""
    task = build_task_of(recipe(tmp_path, tiny_model_dir, adapter_of(tmp_path, tiny_model_dir)))
    assert isinstance(task, SpielGames)
    assert any("the opponent is" in note for note in task.notes)
    runner = task.runner(task.batch(0, 1)[0])
    assert isinstance(runner, RivalRunner)
    prompts = {f"g{i}": prompt for i, prompt in enumerate(task.batch(0, 4))}
    ends = _courses(runner, prompts)
    again = _courses(runner, prompts)
    for key, turns in ends.items():
        assert turns[-1].done
        assert turns == again[key]  # by the seeds alone
        assert sum(turn.reward or 0.0 for turn in turns) == turns[-1].metrics["value"]
        assert sum(turn.metrics.get("rival_illegal", 0.0) for turn in turns) >= len(turns) - 1


def _courses(runner: RivalRunner, prompts: dict[str, Prompt]) -> dict[str, list[Turn]]:
    """All turns of each game, of a player that takes the first move that is listed."""
    turns: dict[str, list[Turn]] = {key: [] for key in prompts}
    for number, (key, prompt) in enumerate(prompts.items()):
        runner.begin(key, prompt, number)
    open_games = set(prompts)
    while open_games:
        for key, said in runner.poll(30.0):
            assert isinstance(said, Turn)
            if said.done:
                open_games.discard(key)
                runner.end(key)
            else:
                (line,) = [ln for ln in said.observation[0]["content"].splitlines() if ln.startswith("Legal moves: ")]
                runner.step(key, line.removeprefix("Legal moves: ").partition(", ")[0])
            turns[key].append(said)
    return {key: said[1:] for key, said in turns.items()}  # without the openings


class Scripted:
    """A rival that says what it was given, in turn."""

    note = ""

    def __init__(self, *said: str) -> None:
        self.said, self.asked, self.out = list(said), [], []

    def ask(self, key: str, question: Any, seed: int) -> None:
        self.asked.append(question[0]["content"])
        self.out.append((key, self.said.pop(0)))

    def poll(self, seconds: float) -> list[tuple[str, str]]:
        out, self.out = self.out, []
        return out


def test_it_is_asked_in_the_players_words_and_its_legal_moves_are_made() -> None:
    settings = schema.OpenSpielTask.model_validate({**GAMES, "rival": {"path": "x"}})
    prompt = Prompt("x", (), "", "tic_tac_toe", {"game": "tic_tac_toe", "case": "tic_tac_toe", "history": []})
    rival = Scripted("o(0,0)", "o(9,9)", "o(0,2)")
    runner = RivalRunner(settings, rival)
    runner.begin("g", prompt, 5)
    (_, opening), *_ = runner.poll(0.0)
    assert isinstance(opening, Turn)
    said: list[Turn] = []
    for reply in ("x(1,0)", "x(1,1)"):
        runner.step("g", reply)
        ((_, turn),) = runner.poll(1.0)
        assert isinstance(turn, Turn)
        said.append(turn)
    assert "To move: o (player 2 of 2)" in rival.asked[0]
    assert "x(1,0)" not in rival.asked[0].split("Legal moves: ")[1]
    assert "o..\nx.." in said[0].observation[0]["content"]
    assert said[0].metrics == {"legal_moves": 1.0, "rival_illegal": 0.0}
    assert said[1].metrics == {"legal_moves": 1.0, "rival_illegal": 1.0}
    board = said[1].observation[0]["content"].partition("To move")[0].partition("tic_tac_toe\n")[2]
    assert (board.count("x"), board.count("o")) == (2, 2)  # a move at random was made
    runner.end("g")
    assert runner.poll(0.0) == []


def test_an_error_in_a_game_costs_its_own_episode() -> None:
    settings = schema.OpenSpielTask.model_validate({**GAMES, "rival": {"path": "x"}})
    place = {"game": "tic_tac_toe", "case": "tic_tac_toe", "history": []}
    runner = RivalRunner(settings, Scripted("o(0,0)"))  # of its next question it makes an IndexError
    runner.begin("g", Prompt("x", (), "", "tic_tac_toe", place), 5)
    runner.begin("h", Prompt("x", (), "", "", {}), 5)
    first, second = dict(runner.poll(0.0)).values()
    assert isinstance(first, Turn)
    assert isinstance(second, Fault)
    for reply in ("x(1,0)", "x(1,1)"):
        runner.step("g", reply)
        ((_, found),) = runner.poll(1.0)
    assert isinstance(found, Fault)
    assert found.why.startswith("IndexError: pop from empty list")


@pytest.mark.slow
def test_a_run_trains_against_the_checkpoint_of_another(tmp_path: Path, tiny_model_dir: Path) -> None:
    first = start_run(load(words(tmp_path / "first", tiny_model_dir, *LORA, NO_EVAL, "steps=1", "name=first")))
    made = recipe(
        tmp_path, tiny_model_dir, first.path, *LORA, "steps=2", "eval.items=4", "update.drop_zero_advantage=false"
    )
    newest = list_checkpoints(first.path)[-1].path
    assert pinned_opponents(made).task.rival.path == str(newest)  # type: ignore[union-attr]
    run = start_run(made)
    assert load([str(run.recipe_path)]).task.rival.path == str(newest)  # type: ignore[union-attr]
    assert "at step 1, frozen" in run.log_path.read_text()
    for step in read_metrics(run):
        if "batch/tokens_trained" in step.metrics:
            assert step.metrics["batch/tokens_trained"] == step.metrics["env/tokens_sampled"]
            assert step.metrics["env/failures"] == 0
    assert all(sum(row.trained) for row in read_rollouts(run, 2))


def test_what_is_no_opponent_is_refused_before_anything_is_loaded(tmp_path: Path, tiny_model_dir: Path) -> None:
    def refusal(rival: Path, model: Path = tiny_model_dir) -> LockstepError:
        with pytest.raises(LockstepError) as error:
            build_task_of(recipe(tmp_path, model, rival))
        return error.value

    gone = refusal(tmp_path / "nowhere")
    assert isinstance(gone, TaskError)
    assert "there is no such folder" in str(gone)
    assert "task.rival.path" in str(gone)
    assert "holds no adapter" in str(refusal(tiny_model_dir))
    full = start_run(load(words(tmp_path / "full", tiny_model_dir, NO_EVAL, "steps=1")))
    assert "this run or checkpoint trained all weights and has no adapter" in str(refusal(full.path))
    write_tiny_model(tmp_path / "other", seed=9)
    foreign = refusal(adapter_of(tmp_path, tiny_model_dir), tmp_path / "other")
    assert isinstance(foreign, ModelError)
    assert "the adapter was made for" in str(foreign)
    lora = start_run(load(words(tmp_path / "lora", tiny_model_dir, *LORA, NO_EVAL, "steps=1")))
    assert f"was trained on {tiny_model_dir}, but this run trains" in str(refusal(lora.path, tmp_path / "other"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_mode": "game", "opponent": "adapter"}, "opponent=adapter needs an adapter: set rival.path"),
        ({"reward_mode": "game", "rival": {"path": "x"}}, "opponent=random is not adapter: rival has no effect"),
        ({"rival": {"path": "x"}}, "rival applies to reward_mode=game"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        schema.OpenSpielTask.model_validate(settings)


def test_an_engine_that_fails_stops_the_run_with_its_reason(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = recipe(tmp_path, tiny_model_dir, adapter_of(tmp_path, tiny_model_dir), max_tokens=5000)
    assert isinstance(made.task, schema.OpenSpielTask)
    assert made.task.rival is not None
    sampler = load_opponent(made.task.rival, made)
    sampler.ask("q", question(state_at("tic_tac_toe", ()), "tic_tac_toe", "reply", show_moves=True), 1)
    with pytest.raises(EngineError, match="the opponent's engine failed"):
        sampler.poll(30.0)


def test_both_engines_sample_at_once_and_neither_notices(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = recipe(tmp_path, tiny_model_dir, adapter_of(tmp_path, tiny_model_dir), max_tokens=40)
    assert isinstance(made.task, schema.OpenSpielTask)
    assert made.task.rival is not None
    sampler, own = load_opponent(made.task.rival, made), engine_of(tiny_model_dir)
    ids = sampler._chat.render(({"role": "user", "content": "State the answer"},))

    def sampled() -> list[Any]:
        own.submit([Request(f"r{i}", ids, f"r{i}", i, Sampling(120, ignore_eos=True), 0) for i in range(8)])
        return sorted((c.request.id, c.ids, c.logprobs) for c in own.completed())

    asked = {
        f"q{i}": (question(state_at("tic_tac_toe", (i % 9,)), "tic_tac_toe", "reply", show_moves=True), i)
        for i in range(24)
    }
    alone, said = sampled(), replies(sampler, asked)
    for key, (messages, seed) in asked.items():
        sampler.ask(key, messages, seed)
    assert sampled() == alone
    found: dict[str, str] = {}
    while len(found) < len(asked):
        found |= dict(sampler.poll(30.0))
    assert found == said

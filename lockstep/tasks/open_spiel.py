"""The task `open_spiel`: different states of each game case; no state is both trained on and held out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lockstep.config import schema
from lockstep.envs.runners import InlineRunner, ProcessRunner, Runner
from lockstep.envs.spiel.cases import Case, load, pyspiel, select
from lockstep.envs.spiel.game import CASE, GAME, HISTORY, place_of, spiel_maker
from lockstep.envs.spiel.outcome import pool
from lockstep.envs.spiel.play import scaled_reward
from lockstep.envs.spiel.rival import RivalRunner, Sampler
from lockstep.envs.spiel.states import StateDraw, draw, moves_at, state_at
from lockstep.envs.spiel.text import question, read_move, written
from lockstep.errors import DEFECT, TaskError
from lockstep.tasks.base import BuiltTask, draw_batch, no_such_role
from lockstep.tasks.generator import Side
from lockstep.types import Grade, Prompt
from lockstep.verifiers.base import shown, unscored
from lockstep.workers.pool import Answered

ROLE = "id_probe"
GARBAGE = "lorem ipsum dolor sit amet"
_WHERE = "task.kind=open_spiel"


class SpielStates(BuiltTask):
    """States to move in. A grade depends on the prompt and the reply alone: the state is rebuilt from its moves."""

    name = "open_spiel"

    def __init__(self, settings: schema.OpenSpielTask, seed: int) -> None:
        """Load the games and draw the states. Raises TaskError for a game that is missing or cannot be played this way."""
        self._settings, self._seed = settings, seed
        self.cases = select(settings)
        searches = "mcts" in (settings.playout, settings.opponent)
        for case in self.cases if searches else ():
            _refuse_hidden(case)

    @property
    def notes(self) -> tuple[str, ...]:
        drawn, s = self._drawn, self._settings
        names = ", ".join(case.name for case in self.cases)
        enumerated = [case.name for case, found in zip(self.cases, drawn, strict=True) if found.enumerated]
        lines = [
            f"{self.name}: {len(self.cases)} case{'s' if self.cases[1:] else ''}: {names}",
            f"{self.name}: {sum(len(found.histories) for found in drawn)} different states to train on, "
            f"{s.num_tasks_per_case} of each case, from {sum(found.draws for found in drawn)} draws of 0 to "
            f"{s.max_random_steps} random moves; half of all states are held out, and none of those is among them",
        ]
        if enumerated:
            lines.append(f"{self.name}: draws did not find enough of {', '.join(enumerated)}: the rest was enumerated")
        return tuple(lines)

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return draw_batch(self._train, step, size, self._seed, _WHERE)

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """Return `size` held-out states, the same number for each case. Raises TaskError if there are fewer."""
        if role != ROLE:
            no_such_role(role, [ROLE], _WHERE)
        each = -(-size // len(self.cases))
        rows = [self._prompts(case, self._draw(case, Side.HELDOUT, each), "heldout") for case in self.cases]
        return [row[index] for index in range(each) for row in rows][:size]

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        s, game, history = self._settings, *place_of(prompt)
        move = read_move(reply, s.answer)
        action = moves_at(game, history).get(move or "")
        metrics = {"has_answer": float(move is not None), "legal": float(action is not None)}
        extracted = None if move is None else shown(move)
        if action is None:
            return Grade(scaled_reward(0.0, s.reward_range), {"correct": 0.0, **metrics}, extracted, s.answer)
        if s.reward_mode == "legal":
            return Grade(scaled_reward(1.0, s.reward_range), {"correct": 1.0, **metrics}, extracted, s.answer)
        how = {"playout": s.playout, "simulations": s.simulations, "playouts": s.playouts, "seed": s.seed}
        played = pool(s.workers).call({"game": game, "history": list(history), "action": action, **how})
        if not isinstance(played, Answered):
            return unscored(f"its playouts did not end: {played.error}")
        share = float(played.value)
        metrics |= {"correct": float(share > 0.5), "value": share}
        return Grade(scaled_reward(share, s.reward_range), metrics, extracted, s.answer)

    def problems(self, prompt: Prompt) -> list[str]:
        """Run the self-test: a legal move gets a reward; an empty reply, garbage, another player's move, two moves, and extra
        text do not.
        """
        moves, answer, found = tuple(moves_at(*place_of(prompt))), self._settings.answer, []
        low = scaled_reward(0.0, self._settings.reward_range)
        ends = {moves[0], moves[-1]} if self._settings.reward_mode == "legal" else {moves[0]}  # playouts take time
        for move in ends:
            reply = written(move, answer)
            grade, again = self.grade(prompt, reply), self.grade(prompt, reply)
            if grade != again or grade.metrics["legal"] != 1.0 or grade.reward is None or grade.reward < low:
                found.append(f"{prompt.id}: the legal move {move!r} is graded {grade} and {again}")
        one, pair = written(moves[0], answer), written(f"{moves[0]} {moves[-1]} {moves[0]}", answer)
        for reply in ("", " ", GARBAGE, written(f"{moves[0]}?", answer), pair, f"{one} {one}", f"{one} is it"):
            if (grade := self.grade(prompt, reply)).reward != low:
                found.append(f"{prompt.id}: {reply!r} gets a reward of {grade.reward}, not {low}")
        return found

    # --- states ---------------------------------------------------------------------------------------------------
    @cached_property
    def _drawn(self) -> tuple[StateDraw, ...]:
        return tuple(self._draw(case, Side.TRAIN, self._settings.num_tasks_per_case) for case in self.cases)

    @cached_property
    def _train(self) -> tuple[Prompt, ...]:
        pairs = zip(self.cases, self._drawn, strict=True)
        return tuple(prompt for case, drawn in pairs for prompt in self._prompts(case, drawn, "train"))

    def _draw(self, case: Case, side: Side, want: int) -> StateDraw:
        """Draw states of a case. Raises TaskError if the case has fewer different states on this side."""
        s = self._settings
        stream = f"train {s.seed}" if side is Side.TRAIN else "heldout"
        drawn = draw(case.game, stream, side, want, s.max_random_steps)
        if len(drawn.histories) == want:
            return drawn
        number = f"{len(drawn.histories)} different ones" + ("" if drawn.complete else " that could be found")
        setting = "task.num_tasks_per_case" if side is Side.TRAIN else "eval.items"
        most = len(drawn.histories) * (1 if side is Side.TRAIN else len(self.cases))
        whole = drawn.complete and s.max_random_steps >= load(case.game).max_game_length()
        raised = "" if whole else ", or raise task.max_random_steps"
        raise TaskError(
            f"{want} states of this case are needed for {'training' if side is Side.TRAIN else 'evaluation'}, but there are only "
            f"{number} within {s.max_random_steps} random moves",
            where=f"{_WHERE}, case {case.name}",
            fix=f"set {setting}={most} or lower{raised}"
            if most
            else f"raise task.max_random_steps, or leave {case.name} out",
        )

    def _prompts(self, case: Case, drawn: StateDraw, stream: str) -> tuple[Prompt, ...]:
        return tuple(self._prompt(case, history, f"{stream}/{i}") for i, history in enumerate(drawn.histories))

    def _prompt(self, case: Case, history: tuple[int, ...], number: str) -> Prompt:
        s, state = self._settings, state_at(case.game, history)
        seed = f"{s.seed}/" if number.startswith("train") else ""
        return Prompt(
            f"{case.name}/{s.max_random_steps}/{seed}{number}",
            question(state, case.name, s.answer, show_moves=s.show_moves),
            next(iter(moves_at(case.game, history))) if s.reward_mode == "legal" else "",
            case.name,
            {GAME: case.game, CASE: case.name, HISTORY: list(history)},
        )

    # --- outcomes -------------------------------------------------------------------------------------------------
    @property
    def workers(self) -> int:
        """Workers for outcomes; the legality of a move is checked here in microseconds."""
        return self._settings.workers if self._settings.reward_mode == "outcome" else 0


class SpielGames(SpielStates):
    """Whole games that open with the same states."""

    plays = True

    def __init__(self, settings: schema.OpenSpielTask, seed: int) -> None:
        super().__init__(settings, seed)
        self.rival, self.turns = settings.rival, settings.turns
        """Adapter that must be seated before the first game."""
        self._sampler: Sampler | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return (*super().notes, *((f"{self.name}: {self._sampler.note}",) if self._sampler is not None else ()))

    def seat(self, sampler: Sampler) -> None:
        """Set the sampler of the opponent's moves."""
        self._sampler = sampler

    def grade(self, prompt: Prompt, reply: str) -> Grade:
        return unscored(f"{self.name} with reward_mode game is played, not graded by one reply")

    def problems(self, prompt: Prompt) -> list[str]:
        """Return nothing, as one reply cannot show a fault."""
        return []

    def runner(self, prompt: Prompt) -> Runner | None:
        return self._runner

    @cached_property
    def _runner(self) -> Runner:
        """Return a runner in this process for an opponent that moves in microseconds, a separate one for others."""
        if self.rival is not None:
            if self._sampler is None:
                raise TaskError("the case's opponent was not loaded", where=_WHERE, fix=DEFECT)
            return RivalRunner(self._settings, self._sampler)
        if self._settings.opponent == "random":
            return InlineRunner(spiel_maker(self._settings))
        return ProcessRunner(self._settings, self._settings.turns.step_seconds)


def build_spiel(settings: schema.OpenSpielTask, seed: int) -> SpielStates:
    """Build the task. Raises TaskError if OpenSpiel is not installed, or a game is not available."""
    if settings.reward_mode == "game":
        if settings.rival is None:
            spiel_maker(settings)  # a missing opponent is reported now
        return SpielGames(settings, seed)
    return SpielStates(settings, seed)


def _refuse_hidden(case: Case) -> None:
    game: Any = load(case.game)
    if game.get_type().information != pyspiel().GameType.Information.PERFECT_INFORMATION:
        raise TaskError(
            "the opponent mcts cannot play this game: it would see hidden information",
            where=f"{_WHERE}, case {case.name}",
            fix="set task.opponent=random, or to a function of your own (file.py:function)",
        )

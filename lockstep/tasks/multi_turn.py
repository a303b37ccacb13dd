"""Tasks whose prompts start episodes of several turns in an environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import cast

from lockstep.config import schema
from lockstep.data.questions import question_digest
from lockstep.envs.guess import opening
from lockstep.envs.make import SEED, env_maker, is_env_task, own_class
from lockstep.envs.programs import CommandPrograms, Programs
from lockstep.envs.runners import MOST, Fault, InlineRunner, ProcessRunner, Runner
from lockstep.envs.tool_env import explained, schemas
from lockstep.envs.tools import BUILT_IN, build_tools
from lockstep.errors import TaskError
from lockstep.seeds import seed_for
from lockstep.tasks.base import BuiltTask, Episodes, OfOthers, draw_batch, first_heldout
from lockstep.tasks.generator import Side, side_of
from lockstep.tasks.python import UserTask, as_task
from lockstep.types import EnvTask, Message, Prompt
from lockstep.verifiers.python import UserFunction, make_object

OPENINGS = 32
"""Number of openings that are requested together."""


class PlayedQuestions(OfOthers):
    """Questions of another task, which are answered in an episode; the final answer is graded as theirs."""

    plays = True

    def __init__(self, questions: BuiltTask, turns: schema.Turns) -> None:
        self._questions, self.members, self.turns = questions, (questions,), turns
        self.name = questions.name

    def own(self, prompt: Prompt) -> tuple[BuiltTask, Prompt]:
        return self._questions, prompt

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return [self._asked(prompt) for prompt in self._questions.batch(step, size)]

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        return [self._asked(prompt) for prompt in self._questions.heldout(role, size)]

    def _asked(self, prompt: Prompt) -> Prompt:
        """Return a question as the episode begins with it."""
        return prompt


class ToolQuestions(PlayedQuestions):
    """Questions that replies may answer with the help of tools."""

    def __init__(self, settings: schema.ToolTask, questions: BuiltTask) -> None:
        """Wrap the questions. Raises TaskError for a tool that is missing."""
        super().__init__(questions, settings.turns)
        self._settings = settings
        self._tools = build_tools(settings.tools)

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self._questions.notes, f"{self.name}: replies may call {', '.join(self._tools)}")

    def runner(self, prompt: Prompt) -> Runner | None:
        return self._runner

    @cached_property
    def _runner(self) -> Runner:
        """Return a runner in this process for tools that come with Lockstep, a separate one for others."""
        if all(isinstance(tool, schema.Tool) and tool.path in BUILT_IN for tool in self._settings.tools):
            return InlineRunner(env_maker(self._settings))
        return ProcessRunner(self._settings, self.turns.step_seconds)

    def _asked(self, prompt: Prompt) -> Prompt:
        if self._settings.format == "hermes":
            return replace(prompt, tools=schemas(self._tools))
        if not self._settings.explain:
            return prompt
        last = prompt.messages[-1]
        text = Message(role=last["role"], content=f"{explained(self._tools)}\n\n{last['content']}")
        return replace(prompt, messages=(*prompt.messages[:-1], text))


class AgentQuestions(PlayedQuestions):
    """Questions that a program answers, which asks the run's endpoint for its model."""

    def __init__(self, settings: schema.AgentTask, questions: BuiltTask) -> None:
        """Wrap the questions. Raises TaskError for a command that is not there."""
        super().__init__(questions, settings.turns)
        self._settings = settings
        self._programs = CommandPrograms(settings)

    @property
    def notes(self) -> tuple[str, ...]:
        how = "in a sandbox" if self._settings.isolation == "strict" else "with your rights on files and network"
        return (*self._questions.notes, f"{self.name}: played by {self._settings.command}, {how}")

    def keep_in(self, folder: Path) -> None:
        super().keep_in(folder)
        self._programs.logs = folder / "agents"

    def programs(self, prompt: Prompt) -> Programs | None:
        return self._programs


class Guessing(Episodes):
    """Games of guessing a number. Every number is either asked in training or held out: half of the numbers by hash."""

    name = "guess_number"
    notes: tuple[str, ...] = ()

    def __init__(self, settings: schema.GuessNumberTask, seed: int) -> None:
        self._settings, self._seed, self.turns = settings, seed, settings.turns
        sides: dict[Side, list[int]] = {Side.TRAIN: [], Side.HELDOUT: []}
        for number in sorted(range(settings.low, settings.high + 1), key=lambda n: seed_for("guess_number", n)):
            sides[min(sides, key=lambda side: len(sides[side]))].append(number)
        self._train, self._heldout = (
            tuple(self._prompt(number) for number in sides[side]) for side in (Side.TRAIN, Side.HELDOUT)
        )
        self._runner = InlineRunner(env_maker(settings))
        self.notes = (f"{self.name}: {len(self._train)} numbers to train on, {len(self._heldout)} others held out",)

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return draw_batch(self._train, step, size, self._seed, f"task {self.name}")

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        return first_heldout({"id_probe": self._heldout}, role, size, f"task {self.name}", "episodes")

    def runner(self, prompt: Prompt) -> Runner | None:
        return self._runner

    def _prompt(self, number: int) -> Prompt:
        s = self._settings
        return Prompt(f"guess_number/{s.low}-{s.high}/{number}", opening(s.low, s.high), str(number), self.name)


class SeededEpisodes(Episodes):
    """Episodes of one environment, distinguished by their seeds.

    If openings differ from seed to seed, training and held-out episodes share no opening: its hash decides. If they are alike
    (a game that begins with an empty board), the two have different seeds.
    """

    def __init__(
        self,
        settings: schema.EnvTask | schema.GymnasiumTask | schema.TextArenaTask | schema.OpenEnvTask,
        name: str,
        seed: int,
        most: int = MOST,
    ) -> None:
        """Build the environment, of which `most` episodes run at a time. Raises TaskError if it cannot be made or started."""
        self.name, self._settings, self._seed, self.turns = name, settings, seed, settings.turns
        self._where = f"task {name}"
        self._runner = ProcessRunner(settings, settings.turns.step_seconds, most)
        try:
            first = self._first_openings()
        except BaseException:
            self._runner.close()
            raise
        self._by_opening = len({question_digest(prompt.messages) for prompt in first}) > 1

    @property
    def notes(self) -> tuple[str, ...]:
        how = "no opening is in both" if self._by_opening else "all openings are alike, their seeds differ"
        return (f"{self.name}: {len(self._train)} episodes to train on, others held out; {how}",)

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        return draw_batch(self._train, step, size, self._seed, self._where)

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        drawn = self._drawn("heldout", size, Side.HELDOUT) if role == "id_probe" else ()
        return first_heldout({"id_probe": drawn}, role, size, self._where, "episodes")

    def runner(self, prompt: Prompt) -> Runner | None:
        return self._runner

    @cached_property
    def _train(self) -> tuple[Prompt, ...]:
        return self._drawn("train", self._settings.seeds, Side.TRAIN)

    def _drawn(self, stream: str, want: int, side: Side) -> tuple[Prompt, ...]:
        """Return the first `want` episodes of a stream of seeds, on one side, each opening once if openings differ."""
        found: dict[bytes, Prompt] = {}
        index, idle = 0, 0
        while len(found) < want and idle < 20 + 2 * len(found):
            seeds = [self._seed_of(stream, index + i) for i in range(OPENINGS)]
            before, index = len(found), index + OPENINGS
            for prompt in self._openings(seeds):
                digest = question_digest(prompt.messages)
                if not self._by_opening:
                    found.setdefault(prompt.id.encode(), prompt)
                elif side_of(digest) is side:
                    found.setdefault(digest, prompt)
            idle = 0 if len(found) > before else idle + OPENINGS
        return tuple(found.values())[:want]

    def _seed_of(self, stream: str, index: int) -> int:
        return seed_for("episode", self.name, stream, index) % 2**31

    def _first_openings(self) -> list[Prompt]:
        """Return some openings. Raises TaskError if a seed does not open alike each time."""
        seeds = [self._seed_of("heldout", index) for index in range(OPENINGS)]
        first = self._openings(seeds)
        if self._openings(seeds[:1]) != first[:1]:
            raise TaskError(
                "the environment started two episodes with the same seed differently",
                where=self._where,
                fix="draw all random numbers of the environment from the seed",
            )
        return first

    def _openings(self, seeds: Sequence[int]) -> list[Prompt]:
        """Return the prompts of these seeds, from the environments themselves. Raises TaskError if one does not start."""
        blank = {seed: Prompt(f"{self.name}/{seed}", (), "", self.name, {SEED: seed}) for seed in seeds}
        by_key = {f"opening/{seed}": prompt for seed, prompt in blank.items()}
        for key, prompt in by_key.items():
            self._runner.begin(key, prompt, 0)
        found: dict[str, Prompt] = {}
        while len(found) < len(by_key):
            for key, said in self._runner.poll(1.0):
                self._runner.end(key)
                prompt = by_key[key]
                if isinstance(said, Fault) or said.done or not said.observation:
                    why = (
                        said.why if isinstance(said, Fault) else "the first turn of an episode has no text, or ends it"
                    )
                    raise TaskError(
                        why, where=f"{self._where}, seed {prompt.data[SEED]}", fix="correct the environment"
                    )
                found[key] = replace(prompt, messages=said.observation)
        return [found[key] for key in by_key]


class OwnEpisodes(UserTask):
    """A user's class with batch, heldout and env; its prompts are checked like those of any user-defined task."""

    plays = True

    def __init__(self, task: EnvTask, settings: schema.EnvTask) -> None:
        grader = UserFunction(settings.path, settings.grading, settings.settings)
        grader.pool.close()  # the class is known to load; many environments never need a grade
        super().__init__(task, Path(settings.path.rpartition(":")[0]).expanduser(), grader)
        self._settings, self.turns = settings, settings.turns

    def runner(self, prompt: Prompt) -> Runner | None:
        return self._runner

    @cached_property
    def _runner(self) -> Runner:
        return ProcessRunner(self._settings, self.turns.step_seconds)

    def problems(self, prompt: Prompt) -> list[str]:
        """Return nothing, as one reply cannot show a fault: `grade` may never be called."""
        return []

    def _digest(self, prompt: Prompt) -> bytes:
        """Return a digest that includes answer and data: episodes may begin alike."""
        rest = json.dumps([prompt.answer, dict(prompt.data)], sort_keys=True, default=repr)
        return question_digest((*prompt.messages, Message(role="data", content=rest)))


def build_own(settings: schema.EnvTask, seed: int) -> SeededEpisodes | OwnEpisodes:
    """Return the user's class as a task. Raises TaskError if it is missing, cannot be made, or lacks a method."""
    made = own_class(settings.path)
    if not is_env_task(made):
        return SeededEpisodes(settings, made.__name__, seed)
    task = as_task(make_object(made, settings.settings, settings.path), settings.path)
    return OwnEpisodes(cast(EnvTask, task), settings)

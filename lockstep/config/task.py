"""Tasks: the source of questions, and the chat around them."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from lockstep.config.data import Data
from lockstep.config.section import Json, Section
from lockstep.config.verifier import NumericVerifier, OwnGrading, Verifier


class NoTask(Section):
    """No questions: for loop = sft alone, which then measures the validation loss and generates nothing."""

    kind: Literal["none"] = "none"


class ReasoningGymTask(Section):
    """A procedural data set of reasoning-gym, by name."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(default="chain_sum", min_length=1)
    """Its name in reasoning-gym."""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Its own settings. Example: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"""
    seed: int = Field(default=1, ge=0)
    """Seed of the questions; held-out questions are those that training never asks."""
    size: int = Field(default=2000, ge=1)
    """Training questions drawn before the first repeats; duplicates are dropped and counted."""
    repeat_heldout: bool = False
    """Ask held-out questions again when there are fewer different ones than eval.items; otherwise that is an error."""
    scoring: Literal["auto", "verifier", "data_set"] = "auto"
    """Who grades: the verifier below, or the data set's own score function. auto is the verifier, unless none was chosen and the
    default one does not give the data set's own answers full marks: then the data set."""
    partial: bool = False
    """Give partial rewards by the data set's own score function; off rewards fully right answers only."""
    verifier: Verifier = NumericVerifier()


class FileTask(Section):
    """Questions and answers from a hub data set, from files, or from a generator."""

    kind: Literal["file"] = "file"
    data: Data
    """Training rows. A text is short for their source."""
    heldout: dict[Literal["id_probe", "ood_probe", "sanity"], Data] = Field(default_factory=dict)
    """Rows for each held-out role; without id_probe, `heldout_rows` are split off `data` by hash."""
    heldout_rows: int = Field(default=200, ge=0)
    """Questions split off when there is no id_probe."""
    near_overlap: Literal["warn", "refuse", "allow"] = "warn"
    """Action when held-out questions share 13 words in a row with training questions; equal questions are always refused."""
    verifier: Verifier = NumericVerifier()


class PythonTask(Section):
    """A class from your file with the methods of lockstep.types.Task."""

    kind: Literal["python"] = "python"
    path: str = Field(pattern=r".+\.py:\w+$")
    """file.py:Class"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the class as keyword arguments."""
    grading: OwnGrading = OwnGrading()
    """Its `grade` runs on other objects of the class, each in a process of its own."""


Questions: TypeAlias = Annotated[ReasoningGymTask | FileTask | PythonTask, Field(discriminator="kind")]
"""Tasks of one reply."""


class Turns(Section):
    """Limits of an episode. All its tokens after the first prompt, sampled and observed, share rollout.max_tokens."""

    limit: int = Field(default=8, ge=1, le=1000)
    """Replies of an episode; after the last it ends with what it has earned."""
    reply_tokens: int | None = Field(default=None, ge=1)
    """Longest single reply, in tokens; none is whatever rollout.max_tokens leaves."""
    step_seconds: float = Field(default=30.0, gt=0)
    """Time for one step of an environment in a process of its own; a slower one is ended, and its sample is not scored."""
    memory_gib: float = Field(default=8.0, gt=0)
    """Address space of an environment's process."""
    credit: Literal["end", "turn"] = "end"
    """end: what the turns earned counts as one reward at the last token; turn: each reply's reward stands at its own last token
    (advantages of kind gae and whitened; others compare totals)."""


class Tool(Section):
    """A function that replies may call."""

    path: str = Field(pattern=r"(.+\.py:\w+|calculator)$")
    """file.py:function, or calculator."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Tool name shown to the model; none takes the function's name."""
    description: str | None = None
    """Description shown to the model; none takes the function's docstring."""
    parameters: dict[str, Json] | None = None
    """JSON schema of its arguments, an object; none is made from the function's signature."""


class ToolTask(Section):
    """Questions that may be answered with the help of tools: a reply with calls gets their results, one without is the answer."""

    kind: Literal["tools"] = "tools"
    questions: Questions = ReasoningGymTask()
    tools: list[Tool] = Field(default_factory=lambda: [Tool(path="calculator")], min_length=1)
    """Tools that replies may call. Example: [{path: calculator}, {path: tools.py:look_up}]"""
    format: Literal["hermes", "plain"] = "hermes"
    """hermes: <tool_call>{"name": …, "arguments": …}</tool_call>, the tools shown by the model's own chat template where it
    can; plain: name(arguments) on a line of its own, explained in the question, for models that know no tool calls."""
    explain: bool = True
    """Explain the tools before each question (format plain); turn it off if chat.system or examples show the tools."""
    turns: Turns = Turns(limit=4)


class GuessNumberTask(Section):
    """Guess a hidden number from the hints higher and lower. Half of all numbers are held out."""

    kind: Literal["guess_number"] = "guess_number"
    low: int = 1
    """Smallest number."""
    high: int = 100
    """Largest number."""
    progress: float = Field(default=0.0, ge=0, le=1)
    """Paid to an episode that does not find the number, times the share of the range that its hints have ruled out."""
    turns: Turns = Turns(limit=8)

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.high - self.low < 3:
            raise ValueError(
                f"high = {self.high} leaves fewer than 4 numbers above low = {self.low}: none could be held out"
            )
        return self


class EnvTask(Section):
    """A class from your file with the methods of lockstep.types.Env, or of lockstep.types.EnvTask."""

    kind: Literal["env"] = "env"
    path: str = Field(pattern=r".+\.py:\w+$")
    """file.py:Class"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the class as keyword arguments."""
    seeds: int = Field(default=200, ge=1)
    """Different episodes to train on, for a class with start and step: each is one seed given to start."""
    grading: OwnGrading = OwnGrading()
    """Processes for a class with `grade`: it runs on other objects of the class, one in each process."""
    turns: Turns = Turns()


class GymnasiumTask(Section):
    """A gymnasium environment whose observations can be said in words and whose actions are text or a choice."""

    kind: Literal["gymnasium"] = "gymnasium"
    env: str = Field(min_length=1)
    """A registered id (FrozenLake-v1), or file.py:Class."""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the environment as keyword arguments."""
    instructions: str = ""
    """Said before the first observation: the rules, and how to answer."""
    actions: list[str] = Field(default_factory=list)
    """Names of the actions of a discrete environment, in order; none takes their numbers."""
    solved: float | None = None
    """Total reward from which an episode counts as correct; none is 1."""
    seeds: int = Field(default=200, ge=1)
    """Different episodes to train on: each is one seed given to reset."""
    turns: Turns = Turns(limit=20)


class TextArenaTask(Section):
    """A game of TextArena, alone or against one opponent. Needs pip install 'lockstep-rl[envs]'."""

    kind: Literal["textarena"] = "textarena"
    game: str = Field(min_length=1)
    """Its id. Example: GuessTheNumber-v0"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the game as keyword arguments."""
    opponent: str = Field(default="random", pattern=r"^(random|.+\.py:\w+)$")
    """Of a two-player game: random takes one of the moves that the game lists, file.py:function is called with what the
    opponent is shown and a random.Random, and gives its action."""
    seat: int = Field(default=0, ge=0, le=1)
    """Which player is trained: 0 begins."""
    seeds: int = Field(default=200, ge=1)
    """Different games to train on: each is one seed given to reset."""
    turns: Turns = Turns(limit=20)


class Rival(Section):
    """A frozen adapter that moves for the opponent, sampled by a model of its own on the CPU."""

    path: str = Field(min_length=1)
    """An adapter in PEFT's layout, a checkpoint of a run that trained one, or the run, whose newest checkpoint it then is. It
    must have been made for this recipe's model."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of its moves; 0 takes the likeliest tokens."""
    max_tokens: int = Field(default=32, ge=1)
    """Longest reply."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Games in which it moves at once."""


class OpenSpielTask(Section):
    """States of OpenSpiel's games to move in, or whole games. Needs pip install 'lockstep-rl[envs]'."""

    kind: Literal["open_spiel"] = "open_spiel"
    games: list[str] = Field(default_factory=list)
    """Names or load strings; a name stands for all cases of the suite that begin with it. None takes the 18 cases of the suite.
    Example: [hex, go, "connect_four(rows=5,columns=5)"]"""
    game_list: list[str] = Field(default_factory=list)
    """Instead of games: OpenSpiel's names, with parameters in game_configs."""
    game_configs: dict[str, list[dict[str, Json]]] = Field(default_factory=dict)
    """Parameters of each game in game_list, one set for each case. Example: {hex: [{board_size: 5}, {board_size: 7}]}"""
    num_tasks_per_case: int = Field(default=100, ge=1)
    """Different states of each case to train on; a case that has fewer is refused. Half of all states are held out."""
    max_random_steps: int = Field(default=20, ge=0)
    """Number of random moves before each state, drawn evenly from 0 to this."""
    seed: int = Field(default=1, ge=0)
    """Seed of the training states and of the playouts; held-out states are the same for every seed."""
    reward_mode: Literal["legal", "outcome", "game"] = "legal"
    """legal: full reward for a legal move; outcome: what playouts from the move bring; game: the game is played to its end."""
    reward_range: Literal["zero_one", "signed"] = "zero_one"
    """From the game's worst to its best result: 0 to 1, or -1 to 1. An illegal move earns the lowest."""
    playouts: int = Field(default=8, ge=1)
    """Playouts of an outcome, averaged."""
    playout: Literal["random", "mcts"] = "random"
    """Policy of both sides in a playout."""
    workers: int = Field(default=2, ge=1, le=64)
    """Processes for playouts."""
    opponent: str = Field(default="random", pattern=r"^(random|mcts|adapter|.+\.py:\w+)$")
    """Of whole games: random, mcts, adapter (see rival), or file.py:function, which is called with a pyspiel state and a
    random.Random and gives an action or its name."""
    rival: Rival | None = None
    """The adapter of opponent: adapter."""
    simulations: int = Field(default=64, ge=2)
    """Simulations for each move of mcts."""
    illegal_moves: int = Field(default=0, ge=0)
    """Illegal replies that a whole game forgives, and asks again; the next one loses it."""
    answer: Literal["tag", "line", "reply"] = "tag"
    """Place of the move, alone: in <move>…</move> at the end, in the last line, or it is the whole reply."""
    show_moves: bool = True
    """List the legal moves in the prompt, all of them."""
    turns: Turns = Turns(limit=200)
    """Limits of whole games."""

    @model_validator(mode="after")
    def _cases(self) -> Self:
        if self.games and self.game_list:
            raise ValueError("games and game_list both name games: set one of them")
        if strange := sorted(set(self.game_configs) - set(self.game_list)):
            raise ValueError(f"game_configs has {strange[0]!r}, which is not in game_list")
        if empty := [name for name in (*self.games, *self.game_list) if not name.strip()]:
            raise ValueError(f"{empty[0]!r} is no name of a game")
        for name, config in ((name, config) for name, configs in self.game_configs.items() for config in configs):
            for key, value in config.items():
                if not isinstance(value, str | int | float):
                    raise ValueError(f"game_configs.{name}: {key} is no text, number or boolean")
        return self

    @model_validator(mode="after")
    def _unused(self) -> Self:
        modes = {
            "playouts": "outcome",
            "playout": "outcome",
            "workers": "outcome",
            "opponent": "game",
            "rival": "game",
            "illegal_moves": "game",
            "turns": "game",
        }
        for name, mode in modes.items():
            field = type(self).model_fields[name]
            if self.reward_mode != mode and getattr(self, name) != field.get_default(call_default_factory=True):
                raise ValueError(f"{name} is of reward_mode {mode}, not of {self.reward_mode}")
        if (self.opponent == "adapter") is not (self.rival is not None):
            has = "names no adapter: set rival.path" if self.rival is None else "is not adapter: rival has no effect"
            raise ValueError(f"opponent = {self.opponent} {has}")
        return self


Single: TypeAlias = Annotated[
    ReasoningGymTask
    | FileTask
    | PythonTask
    | ToolTask
    | GuessNumberTask
    | EnvTask
    | GymnasiumTask
    | TextArenaTask
    | OpenSpielTask,
    Field(discriminator="kind"),
]


class Share(Section):
    """One task of a mix."""

    weight: float = Field(default=1.0, gt=0)
    """Its share of the prompts, relative to the other weights."""
    task: Single


class Curriculum(Section):
    """Asks more of those tasks that the model solves sometimes."""

    low: float = Field(default=0.1, ge=0, lt=1)
    """A task that is solved less often than this is too hard for now."""
    high: float = Field(default=0.9, gt=0, le=1)
    """A task that is solved more often is learnt."""
    outside: float = Field(default=0.1, gt=0, le=1)
    """Factor on the weight of a task outside the band. Above 0, so that its solve rate goes on being measured."""
    memory: float = Field(default=0.8, ge=0, lt=1)
    """Smoothing of the solve rate: 0.8 averages over about five steps with the task."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} is not below high = {self.high}: no task could be inside the band")
        return self


class MixedTask(Section):
    """Several tasks in one run, each with its own metrics."""

    kind: Literal["mixed"] = "mixed"
    tasks: dict[str, Share] = Field(min_length=1)
    """The tasks by name. Example: {sums: {task: {kind: reasoning_gym}}, games: {weight: 2, task: {kind: guess_number}}}"""
    curriculum: Curriculum | None = None
    """Moves the shares with the solve rates; none keeps the weights."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        for name in self.tasks:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ValueError(f"{name!r} is no name for a task: letters, digits, dots, dashes and underscores")
        return self


Task: TypeAlias = Annotated[
    ReasoningGymTask
    | FileTask
    | PythonTask
    | ToolTask
    | GuessNumberTask
    | EnvTask
    | GymnasiumTask
    | TextArenaTask
    | OpenSpielTask
    | MixedTask
    | NoTask,
    Field(discriminator="kind"),
]


class Example(Section):
    """One solved turn shown before the question."""

    user: str
    """The example question."""
    assistant: str
    """The example reply."""


class Chat(Section):
    """Chat format around each question."""

    system: str | None = None
    """System text; none leaves it to the model's template."""
    examples: list[Example] = Field(default_factory=list)
    """Solved turns before the question (few-shot)."""
    suffix: str = ""
    """Text appended to the question, to the examples' too. It is part of a score's conditions."""
    template_kwargs: dict[str, Json] = Field(default_factory=dict)
    """Extra variables for the model's chat template."""
    parser: Literal["auto", "none", "think", "harmony"] = "auto"
    """Separation of thoughts from the answer, which alone is graded: think tags, harmony's channels, or none (all is graded).
    auto goes by the model's template."""

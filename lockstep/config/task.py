"""Settings of tasks: the source of questions, and the chat around them."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from lockstep.config.data import Data
from lockstep.config.openenv import OpenEnvTask
from lockstep.config.section import CodePath, Command, Json, Section
from lockstep.config.spiel import OpenSpielTask
from lockstep.config.tools import AnyTool, Tool, Turns
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
    """Source of grades: the verifier below, or the data set's own score function. auto is the verifier, unless none was chosen
    and the default one does not give the data set's own answers the full reward."""
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
    path: CodePath
    """file.py:Class"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the class as keyword arguments."""
    grading: OwnGrading = OwnGrading()
    """Its `grade` runs on other objects of the class, each in a process of its own."""


Questions: TypeAlias = Annotated[ReasoningGymTask | FileTask | PythonTask, Field(discriminator="kind")]
"""Tasks of one reply."""


class ToolTask(Section):
    """Questions that may be answered with the help of tools: a reply with calls gets their results, one without is the answer."""

    kind: Literal["tools"] = "tools"
    questions: Questions = ReasoningGymTask()
    tools: list[AnyTool] = Field(default=[Tool(path="calculator")], min_length=1)
    """Tools that replies may call. Example: [{path: calculator}, {path: tools.py:look_up}, {mcp: python shop_server.py}]"""
    format: Literal["hermes", "plain"] = "hermes"
    """hermes: <tool_call>{"name": …, "arguments": …}</tool_call>, the tools shown by the model's own chat template where it
    can; plain: name(arguments) on a line of its own, explained in the question, for models that know no tool calls."""
    explain: bool = True
    """Explain the tools before each question (format plain); turn it off if chat.system or examples show the tools."""
    turns: Turns = Turns(limit=4)


class AgentTask(Section):
    """Questions that a program answers. It asks the run's endpoint for replies, as OpenAI's and Anthropic's clients do."""

    kind: Literal["agent"] = "agent"
    questions: Questions = ReasoningGymTask()
    """Its questions, and the verifier that grades its final answer."""
    command: Command
    """The program and its arguments; {question} stands for the question's text. It gets the question as JSON on standard input
    and in the file $LOCKSTEP_TASK; OPENAI_BASE_URL, ANTHROPIC_BASE_URL … name the endpoint. `python`: the one that runs Lockstep.
    Example: python agent.py"""
    result: Literal["answer", "reward"] = "answer"
    """answer: what it prints is its final answer, which the questions' verifier grades; reward: the last line that it prints is
    {"reward": 1.0}, with an "answer" and "metrics" if it likes."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables. From this process it gets PATH and the language alone."""
    seconds: float = Field(default=600.0, gt=0)
    """Time for an episode, sampling included; a slower program is ended, and its sample is not scored."""
    running: int = Field(default=64, ge=1, le=1000)
    """Most programs that run at a time; further episodes wait."""
    isolation: Literal["none", "strict"] = "none"
    """strict runs it in a sandbox: it sees the system, its own files and `readable`, writes to a folder that goes away, and has
    no network but the run's endpoint; where a measure is missing, the run does not start. none: it has your rights on files and
    network; let it act on replies (a shell, code) in a container of your own only."""
    readable: list[str] = Field(default_factory=list)
    """Further files and folders that it can read in the sandbox, which has the Python of the command, and the files and folders
    that the command names. Example: [agent/, ~/data/notes.db]"""
    memory_gib: float = Field(default=8.0, gt=0)
    """Address space of each of its processes."""
    file_mib: int = Field(default=256, ge=1)
    """Largest file that it writes; in the sandbox also all its files together, which are held in memory and go with it."""
    processes: int = Field(default=256, ge=1)
    """Processes and threads of an episode together, in the sandbox."""
    requests: int = Field(default=64, ge=1, le=1000)
    """Most replies of an episode. A request beyond is refused, and so is one when rollout.max_tokens sampled tokens are spent."""
    reply_tokens: int | None = Field(default=None, ge=1)
    """Longest single reply, in tokens; none is what the request asks for."""

    @model_validator(mode="after")
    def _unused(self) -> Self:
        if self.isolation == "none" and self.readable:
            raise ValueError("readable applies to isolation=strict only: with none it reads what you can read")
        return self

    @property
    def turns(self) -> Turns:
        """Limits of an episode."""
        return Turns(limit=self.requests, reply_tokens=self.reply_tokens)


class VerifiersTask(Section):
    """A taskset or environment of the package verifiers (0.4), with its own data, prompts, tools and rewards."""

    kind: Literal["verifiers"] = "verifiers"
    env: str = Field(min_length=1)
    """Its id, as installed where `python` finds it; or a file or folder of yours. Example: gsm8k-v1"""
    python: str = "python"
    """Interpreter that has verifiers and the environment: mostly one of an environment of its own. Example: ~/hub/bin/python"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Settings of the taskset."""
    harness: str = "null"
    """Program of verifiers that runs the chat: null is a plain one with the task's tools."""
    config: dict[str, Json] = Field(default_factory=dict)
    """Further keys of verifiers' [env] block; an `agent` here takes the place of harness and its limits."""
    size: int = Field(default=1000, ge=1)
    """Tasks that are read, from the first."""
    heldout_rows: int = Field(default=20, ge=0)
    """Tasks held out for evaluations, by hash."""
    seconds: float = Field(default=600.0, gt=0)
    """Time for an episode; a slower one is not scored."""
    requests: int = Field(default=64, ge=1, le=1000)
    """Most replies of an episode."""
    reply_tokens: int | None = Field(default=None, ge=1)
    """Longest single reply, in tokens."""


class GuessNumberTask(Section):
    """Guess a hidden number from the hints higher and lower. Half of all numbers are held out."""

    kind: Literal["guess_number"] = "guess_number"
    low: int = 1
    """Smallest number."""
    high: int = 100
    """Largest number."""
    progress: float = Field(default=0.0, ge=0, le=1)
    """Reward of an episode that does not find the number, times the share of the range that its hints have ruled out."""
    turns: Turns = Turns(limit=8)

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.high - self.low < 3:
            raise ValueError(
                f"high={self.high} leaves fewer than 4 numbers above low={self.low}: none could be held out"
            )
        return self


class EnvTask(Section):
    """A class from your file with the methods of lockstep.types.Env, or of lockstep.types.EnvTask."""

    kind: Literal["env"] = "env"
    path: CodePath
    """file.py:Class"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the class as keyword arguments."""
    seeds: int = Field(default=200, ge=1)
    """Different episodes to train on, for a class with start and step: each is one seed given to start."""
    grading: OwnGrading = OwnGrading()
    """Processes for a class with `grade`: it runs on other objects of the class, one in each process."""
    turns: Turns = Turns()


class GymnasiumTask(Section):
    """A gymnasium environment whose observations can be put into words and whose actions are text or a choice."""

    kind: Literal["gymnasium"] = "gymnasium"
    env: str = Field(min_length=1)
    """A registered id (FrozenLake-v1), or file.py:Class."""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the environment as keyword arguments."""
    instructions: str = ""
    """Text before the first observation: the rules, and how to answer."""
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
    """Opponent in a two-player game: random takes one of the moves that the game lists; file.py:function is called with what the
    opponent is shown and a random.Random, and returns its action."""
    seat: int = Field(default=0, ge=0, le=1)
    """Player that is trained: 0 begins."""
    seeds: int = Field(default=200, ge=1)
    """Different games to train on: each is one seed given to reset."""
    turns: Turns = Turns(limit=20)


_Single: TypeAlias = (
    ReasoningGymTask
    | FileTask
    | PythonTask
    | ToolTask
    | AgentTask
    | VerifiersTask
    | GuessNumberTask
    | EnvTask
    | GymnasiumTask
    | TextArenaTask
    | OpenEnvTask
    | OpenSpielTask
)
Single: TypeAlias = Annotated[_Single, Field(discriminator="kind")]


class Share(Section):
    """One task of a mix."""

    weight: float = Field(default=1.0, gt=0)
    """Its share of the prompts, relative to the other weights."""
    task: Single


class Curriculum(Section):
    """Draws more prompts from tasks that the model solves sometimes."""

    low: float = Field(default=0.1, ge=0, lt=1)
    """A task that is solved less often than this is too hard for now."""
    high: float = Field(default=0.9, gt=0, le=1)
    """A task that is solved more often counts as learned."""
    outside: float = Field(default=0.1, gt=0, le=1)
    """Factor on the weight of a task outside the band. Above 0, so that its solve rate goes on being measured."""
    memory: float = Field(default=0.8, ge=0, lt=1)
    """Smoothing of the solve rate: 0.8 averages over about five steps with the task."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} is not below high={self.high}: no task could be inside the band")
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
                raise ValueError(
                    f"{name!r} is not a name for a task: use letters, digits, dots, dashes and underscores"
                )
        return self


Task: TypeAlias = Annotated[_Single | MixedTask | NoTask, Field(discriminator="kind")]


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

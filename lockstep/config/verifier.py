"""Settings of verifiers, which decide the reward of a reply."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from lockstep.config.section import CodePath, Json, Section

ANSWER = "ANSWER"
"""Stands for the answer in `shown_as`."""


def compile_pattern(pattern: str) -> Any:
    """Return the pattern, compiled by RE2, whose time is linear. Raises ValueError if it is none."""
    import re2

    quiet = re2.Options()
    quiet.log_errors = False
    try:
        return re2.compile(pattern, quiet)
    except re2.error as error:
        text = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"pattern is not RE2 (which has no backreferences or lookaround): {text}") from error


class NumericVerifier(Section):
    """Match of a number within `tolerance`: last boxed answer, else (if allowed) the last number of the reply."""

    kind: Literal["numeric"] = "numeric"
    fallback: Literal["none", "last_number"] = "none"
    """Fallback when nothing is boxed. last_number can reward guesses."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Largest difference that still counts as equal, relative for |answer| > 1. Two integers must be the same."""


class TextVerifier(Section):
    """Exact match of text after trimming and case folding: last boxed answer, else (if allowed) the last line."""

    kind: Literal["text"] = "text"
    fallback: Literal["none", "last_line"] = "none"
    """Fallback when nothing is boxed."""


class MathVerifier(Section):
    """A mathematical expression: as a number or as the same text at once, else by math-verify in a process with limits."""

    kind: Literal["math"] = "math"
    fallback: Literal["none", "last_line"] = "none"
    """Fallback when nothing is boxed."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Tolerance between two written numbers, as in numeric."""
    written_out: bool = False
    """If the reference is a number, accept only a number: 17 * 23 is then no answer to 17 * 23."""
    cpu_seconds: float = Field(default=0.5, gt=0, le=60)
    """CPU time of one comparison by math-verify; an answer that takes longer is wrong and counted as too hard."""
    memory_gib: float = Field(default=0.5, gt=0)
    """Memory of one comparison; an answer that takes more is wrong and counted as too hard."""
    workers: int = Field(default=2, ge=1, le=64)
    """Processes for comparisons."""


class ChoiceVerifier(Section):
    """Multiple choice: the letter of an option, alone or before its text, as in B, (B) or B) Paris."""

    kind: Literal["choice"] = "choice"
    options: int = Field(default=4, ge=2, le=26)
    """Number of options: 4 is A to D."""
    several: bool = False
    """Several letters may be right together: A, C. All of them must be named, in any order."""
    fallback: Literal["none", "last_line"] = "none"
    """Fallback when nothing is boxed; last_line also reads 'Answer: B' and 'The answer is B.'"""


class SetVerifier(Section):
    """Several answers in any order, separated by commas or semicolons: numbers are compared as numbers, the rest as text."""

    kind: Literal["set"] = "set"
    fallback: Literal["none", "last_line"] = "none"
    """Fallback when nothing is boxed."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Tolerance between two written numbers, as in numeric."""
    repeats: Literal["count", "ignore"] = "count"
    """count: 1, 1, 2 is not 1, 2; ignore: it is."""


class RegexVerifier(Section):
    """An answer found by a pattern, or a reference that is a pattern. RE2 syntax: linear time, no backreferences."""

    kind: Literal["regex"] = "regex"
    pattern: str | None = None
    """Finds the answer near the end of the reply: the last match, its first group if it has one. None: the reference is a
    pattern that the whole boxed answer (or the last line) must match."""
    compare: Literal["text", "number"] = "text"
    """Comparison of the answer with the reference, as in the verifiers text and numeric."""
    shown_as: str = ANSWER
    """A right reply with ANSWER in the place of the answer, for the test before the run. Example: '#### ANSWER'"""

    @model_validator(mode="after")
    def _pattern_reads_its_example(self) -> Self:
        if self.pattern is None:
            if self.compare != "text" or self.shown_as != ANSWER:
                raise ValueError("compare and shown_as have no effect without a pattern")
            return self
        found = compile_pattern(self.pattern)
        if found.groups > 1:
            raise ValueError(f"pattern has {found.groups} groups: make all but the answer's non-capturing, (?:...)")
        sample = "7"
        matches = list(found.finditer(self.shown_as.replace(ANSWER, sample)))
        if ANSWER not in self.shown_as or not matches or matches[-1].group(found.groups).strip() != sample:
            raise ValueError(
                f"pattern does not read 7 from shown_as={self.shown_as!r} with ANSWER = 7: give a right reply's form"
            )
        return self


class JsonVerifier(Section):
    """A JSON value that fits a schema: the last ```json block, else the whole final part of the reply."""

    kind: Literal["json"] = "json"
    json_schema: dict[str, Json] = Field(default_factory=dict)
    """JSON Schema (2020-12 unless $schema says otherwise) that the value must fit; empty fits everything."""
    equal: bool = True
    """The value must also equal the reference, which is then JSON; key order does not matter. Off accepts
    any value that fits."""
    cpu_seconds: float = Field(default=0.5, gt=0, le=60)
    """CPU time of one validation; a value that takes longer is wrong."""
    workers: int = Field(default=2, ge=1, le=64)
    """Processes for validations."""

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if not self.json_schema and not self.equal:
            raise ValueError("json without json_schema and with equal=false would accept any JSON")
        return self


class OwnGrading(Section):
    """Limits of a `grade` of your own, which runs in processes that are ended when it goes beyond them."""

    seconds: float = Field(default=5.0, gt=0, le=3600)
    """Longest time of one call; its process is then killed and the reply is unscored."""
    memory_gib: float | None = Field(default=4.0, gt=0)
    """Memory that a call may take beyond what the file took when it was loaded; none sets no limit (needed for CUDA)."""
    workers: int = Field(default=2, ge=1, le=64)
    """Processes that call it. Several workers share them (docs/several_gpus.md)."""


class PythonVerifier(OwnGrading):
    """A function from your file: def grade(prompt, reply) returning a number or a Grade. It runs in a process of its own."""

    kind: Literal["python"] = "python"
    path: CodePath
    """file.py:function"""


class TrlVerifier(OwnGrading):
    """Reward functions written for TRL's GRPOTrainer, called as TRL calls them: lists of prompts, completions, completion_ids,
    and each column of the row as a list. A reply for which all of them return None is unscored."""

    kind: Literal["trl"] = "trl"
    path: CodePath | list[CodePath]
    """file.py:function, or a list of them (TRL: reward_funcs). The first that applies to a reply decides whether it is correct:
    1 or more."""
    weights: list[float] | None = None
    """Weight of each function in the sum (TRL: reward_weights); none weighs each by 1."""
    call: Literal["group", "reply"] = "group"
    """group: one call for all samples of a prompt; reply: one call for each sample, so that a call that fails costs only one."""
    completions: Literal["auto", "messages", "text"] = "auto"
    """Form of prompts and completions: messages as for TRL's conversational data, or text. auto takes text if the row's column
    `prompt` is text, else messages."""
    seconds: float = Field(default=30.0, gt=0, le=3600)
    """Longest time of one call; its process is then killed and its replies are unscored."""

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if not self.paths:
            raise ValueError("path is an empty list: give at least one function")
        if self.weights is not None and len(self.weights) != len(self.paths):
            raise ValueError(
                f"weights has {len(self.weights)} numbers for {len(self.paths)} functions: give one for each"
            )
        return self


class VerlVerifier(OwnGrading):
    """A reward function written for verl: compute_score(data_source, solution_str, ground_truth, extra_info) returning a number,
    or a dict with `score`."""

    kind: Literal["verl"] = "verl"
    path: CodePath | dict[str, CodePath]
    """file.py:function; or one for each data_source, as a mapping. Functions of a mapping get those of the four arguments that
    they name."""
    reward_kwargs: dict[str, Json] = Field(default_factory=dict)
    """Further arguments of each call (verl: custom_reward_function.reward_kwargs)."""
    seconds: float = Field(default=30.0, gt=0, le=3600)
    """Longest time of one call; its process is then killed and the reply is unscored."""


class RubricVerifier(OwnGrading):
    """Rewards written for the package verifiers, which must be installed: a vf.Rubric (0.1.12 to 0.3), or a vf.Task of
    verifiers.v1 with methods marked @vf.reward. The reward is their sum by weight; a reply for which one fails is unscored."""

    kind: Literal["verifiers"] = "verifiers"
    path: CodePath
    """file.py:name of a Rubric, of a function or class that makes one, of load_environment, or of a Task class."""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Arguments of a function or class that makes a Rubric."""
    seconds: float = Field(default=30.0, gt=0, le=3600)
    """Longest time of one call, for all samples of a prompt; its process is then killed and they are unscored."""


class CodeVerifier(Section):
    """A Python program, run against the row's tests in a sandbox: no network, no files of the machine, no processes, limits."""

    kind: Literal["code"] = "code"
    tests: str = Field(default="tests", min_length=1)
    """Column with the tests: assert statements, inputs and outputs, or calls and results (docs/verifiers.md)."""
    isolation: Literal["strict", "best_effort"] = "strict"
    """strict refuses to start where one of the sandbox's measures is missing; best_effort goes on and names those missing."""
    cpu_seconds: int = Field(default=4, ge=1, le=600)
    """Processor time of one run of the program, in whole seconds."""
    wall_seconds: float = Field(default=20.0, gt=0, le=3600)
    """Time for all tests of a reply together; waits for a processor do not count."""
    memory_mib: int = Field(default=256, ge=16)
    """Memory of the program."""
    file_mib: int = Field(default=16, ge=1)
    """All files that the program writes; they are held in memory and go with it."""
    output_kib: int = Field(default=1024, ge=1)
    """Longest output of one run, beyond the expected output."""
    threads: int = Field(default=16, ge=1, le=1024)
    """Threads of the program. It can start no process."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Tolerance between a returned number and the expected one in calls and results, as in numeric."""
    workers: int = Field(default=2, ge=1, le=64)
    """Programs that run at once."""


# To add a kind: a Section here, its name in the union, a case in verifiers/build.py.
_Rules: TypeAlias = (
    NumericVerifier
    | TextVerifier
    | MathVerifier
    | ChoiceVerifier
    | SetVerifier
    | RegexVerifier
    | JsonVerifier
    | CodeVerifier
    | PythonVerifier
)
RuleVerifier: TypeAlias = Annotated[_Rules, Field(discriminator="kind")]
"""Verifiers that decide by a rule, without a model."""


class JudgeVerifier(Section):
    """A language model as judge, over an OpenAI-compatible endpoint. A judge that cannot be asked leaves a reply unscored."""

    kind: Literal["judge"] = "judge"
    url: str = Field(pattern=r"^https?://[^@\s]+$")
    """Base URL of its API. Example: http://localhost:8000/v1"""
    model: str = Field(min_length=1)
    """Name of the model at that URL."""
    key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the API key; none sends no key. The key itself is never written anywhere."""
    instructions: str = Field(
        default="Judge whether the reply answers the question correctly and completely. 10 is perfect, 0 worthless.",
        min_length=1,
    )
    """Criteria in words; scores are whole numbers from 0 to 10."""
    rule: RuleVerifier | None = None
    """Verifier that decides first: the judge is then asked about right replies only, and adds to their reward."""
    weight: float = Field(default=0.5, gt=0, lt=1)
    """With a rule, the judge's share of the reward: a right reply scores at least 1 - weight, a wrong one 0."""
    passes: int = Field(default=8, ge=1, le=10)
    """Without a rule, the score from which a reply counts as correct."""
    seconds: float = Field(default=60.0, gt=0, le=600)
    """Longest time of one request."""
    attempts: int = Field(default=5, ge=1, le=20)
    """Requests for one verdict when the judge is busy, fails, or gives no verdict."""
    patience_seconds: float = Field(default=120.0, gt=0, le=3600)
    """Time for one verdict with all attempts and the waits between them."""
    max_tokens: int = Field(default=1024, ge=16)
    """Longest answer of the judge."""
    workers: int = Field(default=8, ge=1, le=256)
    """Requests under way at once."""

    @field_validator("url")
    @classmethod
    def _can_be_asked(cls, url: str) -> str:
        _ = urlsplit(url).port  # raises ValueError for a port above 65535, or a host that is none
        return url


_Plain: TypeAlias = _Rules | TrlVerifier | VerlVerifier | RubricVerifier | JudgeVerifier
PlainVerifier: TypeAlias = Annotated[_Plain, Field(discriminator="kind")]


class Part(Section):
    """One verifier of several."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Its reward is logged as answer/part_<name>."""
    verifier: PlainVerifier
    weight: float = Field(default=1.0, gt=0)
    """Its share of the reward, relative to the other parts'."""


class CompositeVerifier(Section):
    """Several verifiers together. The first part decides what is right; no wrong reply scores more than a right one."""

    kind: Literal["composite"] = "composite"
    parts: list[Part] = Field(min_length=2)
    """The verifiers. A reply that one of them cannot score is unscored."""
    combine: Literal["all", "weighted"] = "all"
    """all gives 1 if every part gives at least 1, else 0. weighted gives the mean by weight, in which the first part counts as
    right or wrong; its weight must exceed the others' together."""

    @model_validator(mode="after")
    def _invariants(self) -> Self:
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError("two parts have the same name")
        first, rest = self.parts[0].weight, sum(part.weight for part in self.parts[1:])
        if self.combine == "weighted" and not first > rest:
            raise ValueError(
                f"part {names[0]} has weight {first:g}, the others have {rest:g} together: a wrong reply could then score "
                f"more than a right one; give {names[0]} more than {rest:g}"
            )
        # A saved recipe holds every value: that a weight is there does not say that the user chose it.
        if self.combine == "all" and any(part.weight != Part.model_fields["weight"].default for part in self.parts):
            raise ValueError("weights have no effect with combine=all")
        return self


Verifier: TypeAlias = Annotated[_Plain | CompositeVerifier, Field(discriminator="kind")]


def reads_rows(verifier: Verifier) -> bool:
    """Return whether it reads whole rows as its own system lays them out, not just a reference answer."""
    match verifier:
        case TrlVerifier() | VerlVerifier() | RubricVerifier():
            return True
        case CompositeVerifier():
            return any(reads_rows(part.verifier) for part in verifier.parts)
        case _:
            return False

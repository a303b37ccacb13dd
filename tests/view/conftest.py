from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import RunWriter, write_rollouts
from lockstep.types import Branch, FinishReason, Grade, Group, Message, Prompt, Rollout
from lockstep.view.api import Viewer
from lockstep.view.server import Server
from tests.track.runs import FACTS, HOSTILE, metrics, proof
from tests.view.serving import serving

CORPUS = (
    HOSTILE,
    "<svg onload=alert(3)>", "<iframe srcdoc='<script>parent.alert(4)</script>'></iframe>", "javascript:alert(5)",
    "<style>body{display:none}</style><meta http-equiv=refresh content='0;url=http://evil.example/'>",
    "\u202e\u2066right\u2069", "{{7*7}} ${alert(6)} `'\"><b>", "<a href='http://evil.example/' autofocus onfocus=alert(7)>x</a>",
    "\x00\x1b]8;;http://evil.example\x07link", "<template><script>alert(8)</script></template><!-- --><![CDATA[",
    "<script>alert(10)</script>", "<img src=x onerror=alert(11)>", "<body onload=alert(12)>", 
    "<details open ontoggle=alert(13)>",
    "<math><mtext><style><img src=x onerror=alert(14)>",
    "<object data=javascript:alert(15)>", "<embed src=//evil.example/a>", "<link rel=stylesheet href=//evil.example/a.css>",
    "<base href=//evil.example/>", "<form action=//evil.example><input autofocus>", "<video src=x onerror=alert(16)>",
    "data:text/html,<script>alert(17)</script>", "<noscript><p title='</noscript><img src=x>'>",
    "__proto__", "constructor", "😀" * 50 + "\ud83d", "<img src=http://evil.example/a.png>" * 20,
)  # fmt: skip
"""Replies, questions, prompt ids, errors and metrics that try to be markup, scripts, addresses or names of JavaScript."""


def reply(prompt: Prompt, sample: int, text: str, reward: float | None, **given: object) -> Rollout:
    """A rollout of three tokens; unscored with an error if the reward is None."""
    error = None if reward is not None else str(given.get("error", "the grader died"))
    correct = {} if reward is None else {"correct": float(reward >= 1)}
    extracted = given.get("extracted")
    grade = Grade(reward, correct, None if extracted is None else str(extracted), "boxed", error)
    count = int(str(given.get("length", 3)))
    ids, trained = tuple(range(5, 5 + count)), given.get("trained", (True,) * count)
    finish = FinishReason.LENGTH if given.get("cut") else FinishReason.STOP
    logprobs = tuple(-0.5 * i for i in range(count))
    return Rollout(prompt, (1, 3, 4), ids, logprobs, trained, text, finish, 3, grade, sample)  # type: ignore[arg-type]


def prompt(identity: str, question: str = "What is 4 + 3?") -> Prompt:
    return Prompt(identity, (Message(role="user", content=question),), "7", "sums")


def groups(step: int) -> tuple[list[Group], list[list[float]]]:
    """Three groups: rewards that differ, rewards that are equal, and one with a cut, an unscored and an empty reply."""
    a, b, c = prompt(f"a{step}", "Compare 4 with Ärger"), prompt(f"b{step}"), prompt(f"c{step}")
    first = [
        reply(a, 0, "It is \\boxed{7}", 1.0, extracted="7"),
        reply(a, 1, "It is \\boxed{8}", 0.0, extracted="8", length=9),
    ]
    second = [reply(b, 0, "no idea", 0.0), reply(b, 1, "NO ÄRGER", 0.0, length=2)]
    third = [
        reply(c, 0, "so long", 0.0, cut=True, length=12),
        reply(c, 1, "good", 0.5, extracted="x"),
        reply(c, 2, "??", None, error="timed out"),
        reply(c, 3, "", 0.0, length=0),
    ]
    kept = [Group(one, tuple(rows)) for one, rows in ((a, first), (b, second), (c, third))]
    return kept, [[0.7, -0.7], [0.0, 0.0], [0.0, 0.5, 0.0, 0.0]]


def write(run: RunDirectory, steps: range) -> None:
    """Write metrics and rollouts of some steps."""
    with RunWriter(run) as writer:
        for step in steps:
            writer.step(step, metrics(step), proof(step))
            write_rollouts(run, step, *groups(step))


@pytest.fixture
def run(tmp_path: Path, tiny_model_dir: Path) -> RunDirectory:
    """A run of four steps whose tokenizer is at hand."""
    recipe = f"name: demo\nsteps: 30\nmodel: {{path: {tiny_model_dir}}}\n"
    with RunDirectory.create(tmp_path / "demo", recipe, FACTS) as made:
        write(made, range(1, 5))
    return RunDirectory.open(made.path)


@pytest.fixture
def hostile(tmp_path: Path, tiny_model_dir: Path) -> RunDirectory:
    """A run in which every text is hostile."""
    recipe = f"name: '<b>x'\nsteps: 3\nmodel: {{path: {tiny_model_dir}}}\n"
    with RunDirectory.create(tmp_path / "<img src=x onerror=alert(9)>", recipe, {**FACTS, "formula": HOSTILE}) as made:
        asked = [prompt(text, text) for text in CORPUS]
        rows = [
            Group(
                one,
                tuple(
                    replace(
                        reply(one, i, text, value, error=text, extracted=text[:9]),
                        branches=(Branch((1, 3, 9), (5, 6), (-0.5, 0.0), (True, False), text),),
                    )
                    for i, value in enumerate((1.0, 0.0, None))
                ),
            )
            for one, text in zip(asked, CORPUS, strict=True)
        ]
        with RunWriter(made) as writer:
            for step in (1, 2):
                writer.step(step, {**metrics(step), HOSTILE: 1.0, "eval/<b>/accuracy": 0.5}, proof(step))
            writer.event("warning", HOSTILE, step=1)
        write_rollouts(made, 1, rows, [[0.7, -0.7, 0.0]] * len(rows))
    return RunDirectory.open(made.path)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Serve runs until the test ends."""
    with serving() as start:
        yield start


@pytest.fixture
def viewer(run: RunDirectory) -> Viewer:
    made = Viewer([run.path])
    made.index.refresh()
    return made

"""Episodes whose history was rewritten or forked: what the server says of their branches, and what the pages draw."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lockstep.loops.start import start_run
from lockstep.report.html import write_report
from lockstep.track.rollouts import RolloutRow, read_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.types import Branch
from lockstep.view.server import Server
from lockstep.view.tokens import shown_branches
from tests.browser import chromium
from tests.loops.test_agents import PROGRAM, recipe
from tests.view.test_page import opened
from tests.view.test_server import get

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> RunDirectory:
    """One step of an agent that plays ten turns and replaces its history by a summary of its own after every four."""
    return start_run(
        recipe(tmp_path_factory.mktemp("agent"), tiny_model_dir, PROGRAM, "steps=1", "update.drop_zero_advantage=false")
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def asked(server: Server, path: str) -> Any:
    status, _, body = get(server, f"{urlsplit(server.address).path}api/{path}")
    assert status == 200
    return json.loads(body)


def test_the_server_sets_each_branch_against_those_before_it(serve: Start, agent: RunDirectory) -> None:
    """All that the engine was asked and what it sampled can be put together again from what the page gets."""
    server = serve(agent.path)
    found, stored = asked(server, "rollout?step=1&row=0"), read_rollouts(agent, 1)[0]
    assert len(found["branches"]) == len(stored.branches) == 2
    for shown, branch in zip(found["branches"], stored.branches, strict=True):
        start = shown["shared"] + shown["context"]
        assert sum(len(part["pieces"]) for part in start) == len(branch.prompt_ids)
        assert "Go on." in "".join("".join(part["pieces"]) for part in shown["context"])
        assert not any(part["sampled"] for part in shown["context"])
        own = [part for part in shown["stretches"] if part["sampled"]]
        assert sum(len(part["pieces"]) for part in own) == sum(branch.trained)
        gaps = [a - b for part in own for a, b in zip(part["learner"], part["logprobs"], strict=True)]
        assert max(map(abs, gaps)) < 1e-4
        assert all(entropy > 0 for part in own for entropy in part["entropies"])
        assert sum(len(part["pieces"]) for part in shown["shared"]) >= len(stored.prompt_ids)
    rows = (stored, *stored.branches)
    logprobs = [x for row in rows for x, own in zip(row.logprobs, row.trained, strict=True) if own]
    assert found["sampled"] == len(logprobs)
    assert found["logprob"] == pytest.approx(sum(logprobs) / len(logprobs))
    (listed, *_) = asked(server, "rollouts?order=oldest")["rows"]
    assert (listed["branches"], listed["length"]) == (3, sum(len(row.ids) for row in rows))
    assert "turn 8." not in stored.text + stored.branches[0].text
    assert listed["id"] in {row["id"] for row in asked(server, "rollouts?text=Turn+8.")["rows"]}


def test_a_fork_in_the_middle_of_a_reply_belongs_to_the_branch_that_it_left() -> None:
    """Ids are their own text: the second branch repeats all up to the first's second reply, the third one token of the second."""
    first = Branch((1, 2), (3, 4, 5, 6), (-1.0, -2.0, 0.0, -3.0), (True, True, False, True))
    second = Branch((1, 2, 3, 4, 5), (7, 8), (-4.0, -5.0), (True, True))
    third = Branch((1, 2, 3, 4, 5, 7, 9), (6,), (-6.0,), (True,))
    values: dict[str, Any] = dict.fromkeys(RolloutRow.__dataclass_fields__, "")
    values |= {name: getattr(first, name) for name in ("prompt_ids", "ids", "logprobs", "trained")}
    row = RolloutRow(**{**values, "learner_logprobs": (), "branches": (second, third)})
    found = shown_branches(row, lambda ids: "".join(map(str, ids)))
    parts = [[[(one.sampled, "".join(one.pieces)) for one in part] for part in (b.shared, b.context)] for b in found]
    assert parts[0] == [[(False, "12"), (True, "34"), (False, "5")], []]
    assert parts[1] == [[(False, "12345"), (True, "7")], [(False, "9")]]
    assert [one.parent for one in found] == [1, 2]
    assert found[0].shared[1].logprobs == (-1.0, -2.0)
    assert found[1].stretches[0].logprobs == (-6.0,)


def test_branches_are_drawn_and_reached_by_keyboard(browser: Any, serve: Start, agent: RunDirectory) -> None:
    told: list[str] = []
    page = opened(browser, serve(agent.path), told, "rollouts")
    page.wait_for_selector("li[role=option]")
    assert "3 branches" in page.locator("li[role=option] .line").first.inner_text()
    page.keyboard.press("j")
    page.wait_for_selector(".branch")
    assert [text.split("\n")[0] for text in page.locator(".branch h3").all_inner_texts()] == [
        f"Branch {number} of 3" for number in (1, 2, 3)
    ]
    shown = page.evaluate("[...document.querySelectorAll('.lane .soft')].map((one) => parseInt(one.textContent))")
    row = read_rollouts(agent, 1)[0]
    assert shown == [sum(one.trained) for one in (row, *row.branches)]
    assert page.locator(".same .text").first.is_hidden()  # the beginning that is shared is shown once
    page.keyboard.press("b")
    page.keyboard.press("b")
    page.keyboard.press("t")  # the colours change, the focus stays
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Branch 2 of 3"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator(".same .text").first.is_visible()
    own = page.locator(".branch:nth-of-type(2) .turn.assistant .token").count()
    assert own == sum(row.branches[0].trained)
    page.locator(".lane").nth(2).press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Branch 3 of 3"
    page.keyboard.press("g")
    page.wait_for_selector(".card")
    assert "3 branches" in page.locator(".card header").first.inner_text()
    assert told == []


def test_the_report_shows_the_text_of_each_branch(agent: RunDirectory) -> None:
    page = write_report(agent).read_text(encoding="utf-8")
    assert page.count("branch 1 of 3") == page.count("branch 3 of 3") == len(read_rollouts(agent, 1))
    assert page.count("after a history that was rewritten or forked") == 2 * len(read_rollouts(agent, 1))

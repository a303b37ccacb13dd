from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import load_mapping
from lockstep.config.metric import Range
from lockstep.errors import RunDirectoryError
from lockstep.evaluation.records import score_path, write_score
from lockstep.report import tables
from lockstep.report.figures import marks
from lockstep.report.gather import choose_samples, find_outside, gather
from lockstep.report.html import _when, asset, digest, write_report
from lockstep.track.rollouts import read_rollouts, write_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import Event, RunWriter, StepRecord
from tests.browser import chromium
from tests.evaluation.scores import score
from tests.track.runs import FACTS, HOSTILE, RECIPE, finished_run, group, metrics, proof, write_steps

LAUGHS = (
    "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n"
    + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise("abcdefghij")
    )
    + "name: *j\n"
)

VOID = {"meta", "br", "img", "link", "input", "hr"}
OPTIONAL_END = {"li", "p", "td", "tr", "th"}


class Page(HTMLParser):
    """The tags, attributes and text of a page; fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.titles: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def charts(self) -> dict[str, Any]:
        """The charts by title, as the page's script gets them."""
        (data,) = [word for word in self.words if word.startswith('{"figures"')]
        return {figure["title"]: figure for figure in json.loads(data)["figures"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_has_all_its_parts(page: Page) -> None:
    assert page.titles == [
        "Base against trained", "Curves", "Outside the healthy range", "Proof of sync", "Objective", "Samples", "Events",
        "Provenance",
    ]  # fmt: skip
    assert "30 of 30 steps · 2 attempts" in page.text
    assert "LoRA rank 16" in page.text
    assert FACTS["formula"] in page.text
    assert "0123456789ab, 2 files changed" in page.text


def test_it_needs_no_network_and_runs_no_other_script(page: Page, run: Path) -> None:
    assert not {"link", "iframe", "object", "img", "base", "form"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert not names & {"src", "href", "srcset", "action", "background"}
    assert page.tags.count("script") == 2  # the data and the code
    source = (run / "report.html").read_text(encoding="utf-8")
    (policy,) = [value for name, value in page.attributes if value and value.startswith("default-src")]
    code = source.rpartition("<script>")[2].partition("</script>")[0]
    assert digest(code) in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "url(" not in source
    assert "@import" not in source
    assert "prefers-color-scheme: dark" in source


def test_the_chart_library_is_the_one_that_was_vendored() -> None:
    digests = {name: hashlib.sha256(asset(name).encode()).hexdigest() for name in ("uplot.min.js", "uplot.min.css")}
    assert digests == {
        "uplot.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }  # uPlot 1.6.32
    assert "MIT License" in asset("uplot.LICENSE")


def test_hostile_replies_are_text(page: Page, run: Path) -> None:
    assert "alert(1)" in page.text
    assert "<script>alert(1)</script>" in page.text  # as words of the page
    assert "b" not in page.tags  # the question's <b>5</b> is text
    assert "What is <b>5</b> + 2?" in page.text
    source = (run / "report.html").read_bytes()
    assert not {0x00, 0x07, 0x1B} & set(source)
    assert "\\x1b[2J" in page.text
    assert "\\u202etxet" in page.text


def test_base_against_trained_is_the_paired_comparison(page: Page) -> None:
    assert "25.0 % [14.2, 40.2]" in page.text  # 10 of 40, Wilson
    assert "70.0 %" in page.text
    assert "+45.0" in page.text
    assert page.text.count("improved") == 2
    assert "greedy" in page.text
    assert "sampled" in page.text


def test_the_curves_are_there_and_empty_ones_are_not(page: Page) -> None:
    charts = page.charts
    assert list(charts) == [
        "Held-out accuracy", "Reward", "Answers", "Response length", "Truncated and unscored", "Groups without a difference",
        "Entropy", "Gradient norm before clipping", "Learning rate", "Rollout against learner", "Policy loss", "Memory",
        "Time of a step by phase",
    ]  # fmt: skip
    (norm,) = charts["Gradient norm before clipping"]["series"]
    assert norm["y"][norm["x"].index(17)] == 250
    assert charts["Gradient norm before clipping"]["healthy"] == [0.0, 100.0]
    greedy, sampled = charts["Held-out accuracy"]["series"]
    assert greedy["x"] == [0, 10, 20, 30]
    at = {step: [round(greedy[end][i], 3) for end in ("y", "low", "high")] for i, step in enumerate(greedy["x"])}
    assert at[0] == [0.25, 0.142, 0.402]  # from the score
    assert at[10] == [0.467, 0.367, 0.617]  # from the metrics
    assert sampled["high"][1] is None  # not finite: no interval
    # nothing was evaluated or saved in these steps
    assert [one["label"] for one in charts["Time of a step by phase"]["series"]] == [
        "rollout",
        "grade",
        "update",
        "sync",
    ]


def test_events_and_spikes_stand_on_the_curves(run: Path) -> None:
    facts = gather(RunDirectory.open(run))
    events = [*facts.events, Event("t", 1, "checkpoint", 20, "step_000020"), Event("t", 1, "sync", 1, "")]
    found = marks(facts.records, events, {})
    kinds = {(mark.step, mark.kind) for mark in found}
    assert {(17, "spike"), (20, "checkpoint"), (10, "evaluation")} <= kinds
    assert not any(mark.kind == "sync" for mark in found)
    steady = [StepRecord(step, 1, "t", {"grad/norm": 150.0}) for step in range(1, 9)]
    assert {mark.kind for mark in marks(steady, [], {})} == {"spike"}  # above the table's range
    assert not marks(steady, [], {"grad/norm": Range(high=1000.0)})


def test_warnings_name_the_steps_and_the_remedy(page: Page) -> None:
    assert "3 steps, 28 to 30" in page.text
    assert "grad/norm" in page.text
    assert "Raise rollout.max_tokens" in page.text


def test_the_proof_is_summed_up(page: Page) -> None:
    assert "30, of which 30 passed" in page.text
    assert f"version 30, fingerprint {30:016x}" in page.text
    assert "No step has a proof" not in page.text


def test_samples_show_question_reply_extraction_answer_and_reward(page: Page) -> None:
    assert "4 replies of step 30" in page.text
    assert "extracted '7' by boxed, answer '7', reward 1, advantage 0.5" in page.text
    assert "State the final answer: 4 + 3 = (step 30)" in page.text
    assert "not scored: the verifier's worker was killed after 2 s" in page.text


def test_a_failed_proof_and_steps_without_one_are_said(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run, RunWriter(run) as writer:
        writer.step(1, metrics(1))
        assert "No step has a proof" in Page(write_report(run.path).read_text(encoding="utf-8")).text
        writer.step(2, metrics(2), proof(2, mismatched=("model.layers.0.mlp.up_proj.weight: values differ",)))
        writer.step(3, metrics(3), proof(3, mean=0.5))
        text = Page(write_report(run.path).read_text(encoding="utf-8")).text
    assert "2, of which 0 passed" in text
    assert "Step 2: 1 tensors differ: model.layers.0.mlp.up_proj.weight: values differ" in text
    assert "Step 3: probe mean 0.5 exceeds 0.0001" in text


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, {}) as run:
        page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "no step yet" in page.text
    assert page.titles == ["Provenance"]


def test_what_cannot_be_read_or_compared_is_a_note(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", "name: a\nstepps: 3\n", FACTS) as run:
        write_steps(run, 1, 3)
        marks = [True, False] * 20
        write_score(score_path(run.path, 0, "greedy"), score(marks))
        write_score(score_path(run.path, 2, "greedy"), score(marks, step=2, weights="b" * 16, max_tokens=99))
        write_score(score_path(run.path, 9, "greedy"), score(marks, step=9, weights="c" * 16))
        damaged = score_path(run.path, 3, "greedy")
        damaged.write_text(score_path(run.path, 2, "greedy").read_text().replace('"accuracy": 0.5', '"accuracy": 0.9'))
        (run.rollouts_path / "step_000003.parquet").write_bytes(b"PAR1")
    facts = gather(RunDirectory.open(run.path))
    assert facts.rows == ()
    assert facts.samples is None
    notes = "\n".join(facts.notes)
    assert "step_000003_greedy.json is left out: the record's checksum" in notes
    assert "step_000009_greedy.json is left out: its weights belong to an attempt" in notes
    assert "not compared" in notes
    assert "max_tokens: 16 against 99" in notes
    assert "not a recipe of this version" in notes
    assert "rollouts of step 3 are left out" in notes
    text = Page(write_report(run.path).read_text(encoding="utf-8")).text
    assert "max_tokens: 16 against 99" in text
    assert "50.0 % [35.2, 64.8]" in text  # the scores are still listed, each for itself


def test_a_pair_that_cannot_be_compared_does_not_take_the_others_along(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        write_steps(run, 1, 3)
        for step, weights in ((0, "a" * 16), (3, "b" * 16)):
            for mode in ("greedy", "sampled(T=1)", "other"):
                numerics = "fp8" if (step, mode) == (3, "greedy") else "fp32"
                if (step, mode) == (0, "other"):
                    continue
                found = score([True, False] * 20, step=step, weights=weights, mode=mode, numerics=numerics)
                write_score(score_path(run.path, step, mode[:7]), found)
    facts = gather(RunDirectory.open(run.path))
    assert [row.mode for row in facts.rows] == ["sampled(T=1)"]
    notes = "\n".join(facts.notes)
    assert "numerics: fp32 against fp8" in notes
    assert "only one of the two sides has a score of other" in notes


def test_the_last_step_is_that_of_the_attempt_that_counts(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        write_steps(run, 1, 9)
    with RunDirectory.resume(tmp_path / "a", FACTS) as run:
        write_steps(run, 4, 5)
    facts = gather(RunDirectory.open(run.path))
    assert [record.step for record in facts.records] == [1, 2, 3, 4, 5]
    assert facts.samples is not None
    assert facts.samples.step == 5


def test_metrics_outside_are_found_in_order_of_how_often() -> None:
    steps = [StepRecord(i, 1, "t", {"length/truncated": 0.9, "grad/norm": 0.0 if i == 2 else 1.0}) for i in (1, 2, 3)]
    assert [(row.name, row.steps, row.first) for row in find_outside(steps, {})] == [
        ("length/truncated", (1, 2, 3), 0.9),
        ("grad/norm", (2,), 0.0),
    ]


def test_a_range_of_the_recipe_is_the_one_that_is_named() -> None:
    own = load_mapping({"health": {"ranges": {"grad/norm": {"high": 0.5, "until": 4}}}})
    steps = [StepRecord(i, 1, "t", {"grad/norm": 2.0}) for i in (1, 2)]
    (row,) = find_outside(steps, own.health.ranges)
    values, healthy = tables.outside_row(row)[2:4]
    assert values == "2"
    assert str(healthy).startswith("≤ 0.5 at steps 1 to 4 (health.ranges)")


def test_samples_are_a_mix_of_different_prompts(tmp_path: Path) -> None:
    right = [group(f"right/{i}", "?", [("a", True), ("b", True), ("c", True)]) for i in range(6)]
    mixed = [group(f"wrong/{i}", "?", [("d", False)]) for i in range(3)] + [group("none", "?", [("e", None)])]
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        write_rollouts(run, 1, right + mixed, [[0.0] * 3] * 6 + [[0.0]] * 4)
    chosen = choose_samples(read_rollouts(run, 1))
    assert [row.prompt_id for row in chosen] == [
        "none", "wrong/0", "right/0", "wrong/1", "right/1", "wrong/2", "right/2", "right/3", "right/4", "right/5",
    ]  # fmt: skip


def test_a_long_reply_is_cut_with_a_count(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", RECIPE, FACTS) as run:
        write_rollouts(run, 1, [group("long", "?", [("x" * 10_000, True)])], [[0.0]])
        source = write_report(run).read_text(encoding="utf-8")
    assert "x" * 6000 in source
    assert "x" * 6001 not in source
    assert "4000 more characters" in source


def test_no_run_no_page(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no such run"):
        write_report(tmp_path / "nothing")


def test_making_the_page_loads_no_torch(run: Path) -> None:
    program = (
        "import sys; from lockstep.report.html import write_report; write_report(sys.argv[1]);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_hostile_text_in_every_place_stays_text(tmp_path: Path) -> None:
    recipe, facts = f"name: a # {HOSTILE[:60]!a}\n", {**FACTS, "formula": HOSTILE}
    values = {HOSTILE: 1.0, f"eval/{HOSTILE[6:14]}/accuracy": 0.5, "length/truncated": 1.0}
    with RunDirectory.create(tmp_path / "<b>", recipe, facts) as run:
        with RunWriter(run) as writer:
            writer.event(HOSTILE, HOSTILE)
            writer.step(1, values, proof(1, mismatched=(HOSTILE,)))
        write_rollouts(run, 1, [group(HOSTILE, HOSTILE, [(HOSTILE, None)])], [[0.0]])
        page = Page(write_report(run).read_text(encoding="utf-8"))
    assert page.tags.count("script") == 2  # its own
    assert "img" not in page.tags
    (series,) = page.charts["Held-out accuracy"]["series"]
    assert (series["label"], series["y"]) == ("<script>", [0.5])


@pytest.mark.parametrize("text", [LAUGHS, "a: [" * 5000, "- 1\n", ""], ids=["aliases", "nested", "a list", "empty"])
def test_a_stored_recipe_that_is_none_is_a_note_on_the_page(tmp_path: Path, text: str) -> None:
    path = finished_run(tmp_path / "run", steps=13)
    (path / "recipe.yaml").write_text(text)
    assert "recipe.yaml is not a recipe of this version" in Page(write_report(path).read_text()).text


def test_a_page_shows_what_a_resume_refuses(tmp_path: Path) -> None:
    """Scores with a link in their place are not read from elsewhere."""
    path = finished_run(tmp_path / "run", steps=13)
    (path / "report.html").symlink_to(tmp_path / "diary.txt")
    with pytest.raises(RunDirectoryError, match=r"report\.html: this is a symbolic link"):
        write_report(path)
    assert not (tmp_path / "diary.txt").exists()


def test_the_page_draws_its_charts_and_runs_nothing_else(tmp_path: Path) -> None:
    """A real browser, with a reply that tries to be markup and a metric named like a tag."""
    path = finished_run(tmp_path / "run", steps=13)
    with RunDirectory.resume(path, FACTS) as run, RunWriter(run) as writer:
        writer.step(14, {**metrics(14), f"eval/{HOSTILE[6:14]}/accuracy": 0.5}, proof(14))
        writer.event("warning", HOSTILE, step=14)
        write_rollouts(run, 14, [group(HOSTILE, HOSTILE, [(HOSTILE, None)])], [[0.0]])
    write_report(path)
    told: list[str] = []
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("dialog", lambda dialog: (told.append(dialog.message), dialog.dismiss()))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("console", lambda message: told.append(message.text))
        page.on("request", lambda request: told.append(request.url) if not request.url.startswith("file:") else None)
        page.goto((path / "report.html").as_uri())
        assert page.locator("figure canvas").count() == page.locator("figure").count() >= 12
        wide = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.set_viewport_size({"width": 390, "height": 800})
        page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")  # charts are drawn again first
        page.locator("figure .u-over").first.hover()
        assert "step" in page.locator(".tip:visible").first.inner_text()
    assert wide
    assert told == []


def test_a_run_of_seconds_does_not_take_0_minutes() -> None:
    times = ("2026-01-01T10:00:00.000Z", "2026-01-01T10:00:02.700Z")
    records = [StepRecord(step, 1, time, {}) for step, time in enumerate(times)]
    assert _when(records)[1] == "3s from the first row to the last"

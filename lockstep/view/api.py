"""Answers the requests of the web page with JSON, from the files of its runs and the parameters of the request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.errors import EvaluationError, LockstepError, RunDirectoryError
from lockstep.evaluation.collect import Pair, base_and_last, newest, pair, records_of
from lockstep.evaluation.compare import power_line
from lockstep.evaluation.table import row_of
from lockstep.report.figures import Curve, Figure, curve_figure, figures, marks, times
from lockstep.report.tables import COMPARISON, SCORES, comparison_row, score_row
from lockstep.track.catalogue import find
from lockstep.track.rollouts import LEARNED, RolloutRow, read_rollouts
from lockstep.types import Branch
from lockstep.view.differences import differences
from lockstep.view.funnel import funnel
from lockstep.view.index import Index
from lockstep.view.prompts import Prompter, PromptRequest, prompt_places, sampling_of
from lockstep.view.query import LARGEST, Query
from lockstep.view.runs import ViewedRun, open_runs
from lockstep.view.timing import phase_times
from lockstep.view.tokens import shown_branches, stretches

Params: TypeAlias = Mapping[str, str]
log = logging.getLogger(__name__)
MOST_CURVES = 30
"""Charts that one search for metrics shows."""
JOIN_S = 10.0
"""Seconds that closing waits for a look that is under way."""
BY_TOKEN = ("ids", "prompt_ids", "logprobs", "trained", "branches", *LEARNED)
"""Columns that the page gets by stretches."""
PAUSE_S = 2.0
"""Least seconds between looks for news."""
LONGEST_S = 60.0
"""Most seconds between them."""
REST = 400
"""Rest after a look, in times of the CPU seconds that it took: the page and the reader of rollouts each take 0.25 % of a core."""


class Ask(BaseModel):
    """Parameters of the smaller questions; runs are numbered in the order of the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: int = Field(default=0, ge=0, le=LARGEST)
    other: int = Field(default=0, ge=0, le=LARGEST)
    step: int = Field(default=0, le=LARGEST)
    row: int = Field(default=0, ge=0, le=LARGEST)
    first: int = Field(default=0, ge=-LARGEST, le=LARGEST)
    last: int = Field(default=LARGEST, ge=-LARGEST, le=LARGEST)
    prompt: str = Field(default="", max_length=1000)
    text: str = Field(default="", max_length=200)


Asked = TypeVar("Asked", bound=BaseModel)


class Viewer:
    """The runs of a page and the answers to its questions. `follow` keeps the rollouts up to date until `close`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.runs = open_runs(paths)
        self.index = Index([one.run for one in self.runs])
        self._prompter = Prompter()
        self._spent = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rollouts", daemon=True)
        self.answers: dict[str, Callable[[Params], object]] = {
            "state": self.state, "curves": self.curves, "metrics": self.metrics, "events": self.events,
            "rollouts": self.rollouts, "rollout": self.rollout, "group": self.group, "funnel": self.funnel,
            "settings": self.settings, "scores": self.scores, "compare": self.compare,
            "time": self.time, "places": self.places, "sample": self.sample, "stop": self.stop,
        }  # fmt: skip

    def follow(self) -> None:
        """Start to read rollouts, in a thread of its own; new steps are found within seconds."""
        self._thread.start()

    def close(self) -> None:
        """Stop to follow, and close the database: DuckDB complains at exit otherwise."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        self._prompter.close()
        self.index.close()

    def state(self, params: Params) -> object:
        """Say what runs there are, how far each is, what has changed, and in how many seconds to ask again."""
        runs = [self._state(number, one) for number, one in enumerate(self.runs)]
        spent, self._spent = self._spent, 0.0
        return {"runs": runs, "pause": PAUSE_S if any(run["read"] != run["stored"] for run in runs) else _rest(spent)}

    def spend(self, seconds: float) -> None:
        """Count the CPU seconds of an answer."""
        self._spent += seconds

    def curves(self, params: Params) -> object:
        """Return the charts of a run, what stands on them, and the names of all its metrics."""
        one = self._run(_read(Ask, params).run)
        facts = one.facts()
        names = sorted({name for record in facts.records for name in record.metrics})
        shown = figures(facts.records, facts.scores, one.ranges)
        found = marks(facts.records, facts.events, one.ranges)
        return {"figures": shown, "marks": found, "names": names, "notes": facts.notes}

    def metrics(self, params: Params) -> object:
        """Return a chart of each metric whose name contains a text."""
        ask = _read(Ask, params)
        records, ranges = self._run(ask.run).facts().records, self._run(ask.run).ranges
        names = sorted({name for record in records for name in record.metrics if ask.text.lower() in name.lower()})
        units = {name: info.unit if (info := find(name)) else "" for name in names}
        charts = (curve_figure(records, Curve(name, units[name], ((name, name),)), ranges) for name in names)
        found: list[Figure] = [chart for chart in charts if chart.series]
        return {"figures": found[:MOST_CURVES], "left": max(0, len(found) - MOST_CURVES)}

    def events(self, params: Params) -> object:
        """Return the events of a run, newest first."""
        return list(reversed(self._run(_read(Ask, params).run).facts().events[-500:]))

    def rollouts(self, params: Params) -> object:
        """Return a page of rollouts, and the seconds that it took."""
        query = _read(Query, params)
        start = time.perf_counter()
        found = self.index.browse(query, self._run(query.run).facts().last)
        return {**found, "seconds": time.perf_counter() - start}

    def rollout(self, params: Params) -> object:
        """Return all about one rollout, its tokens too if the tokenizer is on this machine."""
        ask = _read(Ask, params)
        one = self._run(ask.run)
        (row,) = read_rollouts(one.run, ask.step, [ask.row])
        decode = one.tokenizer.decoder()
        tokens: dict[str, object] = {}
        if decode is not None:
            tokens = {"stretches": stretches(row, decode), "seen": decode(row.prompt_ids)}
            tokens["branches"] = shown_branches(row, decode)
        return {**_shown(row, ask.step, ask.row), **tokens, "problem": one.tokenizer.problem}

    def group(self, params: Params) -> object:
        """Return all rollouts of a prompt in a step."""
        ask = _read(Ask, params)
        sql = "SELECT row FROM rollouts WHERE run = ? AND step = ? AND prompt_id = ? ORDER BY row"
        places = [int(found["row"]) for found in self.index.rows(sql, [ask.run, ask.step, ask.prompt])]
        rows = read_rollouts(self._run(ask.run).run, ask.step, places) if places else []
        return [_shown(row, ask.step, place) for place, row in zip(places, rows, strict=True)]

    def funnel(self, params: Params) -> object:
        """Return how many rollouts each stage left."""
        ask = _read(Ask, params)
        newest_step = self._run(ask.run).facts().last
        return funnel(self.index, ask.run, ask.first, ask.last if newest_step is None else min(ask.last, newest_step))

    def settings(self, params: Params) -> object:
        """Return the settings of two runs side by side."""
        ask = _read(Ask, params)
        return differences(self._run(ask.run).run, self._run(ask.other).run)

    def scores(self, params: Params) -> object:
        """Return a run's scores, and its base against its last ones."""
        one = self._run(_read(Ask, params).run)
        facts = one.facts()
        table = {"columns": SCORES, "rows": [score_row(named) for named in facts.scores], "notes": facts.notes}
        if not any(named.score.step == 0 for named in facts.scores) or not facts.last:
            return {"table": table, "comparison": None}
        return {"table": table, "comparison": _compared(lambda: base_and_last(records_of(str(one.run.path))))}

    def compare(self, params: Params) -> object:
        """Return the last scores of two runs, item by item."""
        ask = _read(Ask, params)
        first, second = self._run(ask.run), self._run(ask.other)
        found = _compared(lambda: pair(*(newest(records_of(str(one.run.path))) for one in (first, second))))
        names = {"base": first.label, "trained": second.label}
        return {**found, "columns": [names.get(column, column) for column in COMPARISON]}

    def time(self, params: Params) -> object:
        """Return the seconds of each phase against its floor, rank by rank, and those of every step."""
        ask = _read(Ask, params)
        records = self._run(ask.run).facts().records
        chosen = [one for one in records if ask.first <= one.step <= ask.last]
        return {"times": phase_times(records, ask.first, ask.last), "by_step": times(chosen)}

    def places(self, params: Params) -> object:
        """Return the steps of a run whose weights can be sampled, and what its recipe puts around a prompt."""
        one = self._run(_read(Ask, params).run)
        return {"steps": prompt_places(one), "live": one.live, **sampling_of(one.run)}

    def sample(self, params: Params) -> object:
        """Return replies of a checkpoint to a prompt."""
        ask = _read(PromptRequest, params)
        return self._prompter.sample(self._run(ask.run), ask)

    def stop(self, params: Params) -> object:
        """End the process that samples."""
        self._prompter.stop()
        return {}

    def _run(self, number: int) -> ViewedRun:
        if number >= len(self.runs):
            raise RunDirectoryError(
                f"there is no run {number}", where="view", fix=f"choose one of the {len(self.runs)} runs of this page"
            )
        return self.runs[number]

    def _state(self, number: int, one: ViewedRun) -> dict[str, object]:
        found: dict[str, object] = {
            "label": one.label, "path": str(one.run.path), "planned": one.planned, "live": one.live, "changed": one.signature(),
            **self.index.state(number),
        }  # fmt: skip
        if not one.run.manifest_path.exists():
            gone = f"{one.run.path}: this run directory is gone: deleted, or moved"
            return {**found, "step": 0, "notes": [gone]}
        try:
            return {**found, "step": one.facts().last or 0}
        except LockstepError as error:  # a damaged file is said, and the other runs are still shown
            return {**found, "step": 0, "notes": [str(error)]}

    def _follow(self) -> None:
        while not self._stop.is_set():
            began = time.thread_time()
            try:
                self.index.refresh()
            except Exception:  # the page goes on with what was read
                log.exception("new rollouts could not be read")
            self._stop.wait(_rest(time.thread_time() - began))


def _rest(spent: float) -> float:
    return min(LONGEST_S, max(PAUSE_S, REST * spent))


def _compared(find_pairs: Callable[[], list[Pair]]) -> dict[str, object]:
    """Compare pairs of scores; what may not be compared is said in words."""
    try:
        rows = [row_of(one.before.brief, one.after.brief) for one in find_pairs()]
    except EvaluationError as error:
        return {"columns": COMPARISON, "rows": [], "notes": [f"not compared: {error.what}"]}
    notes = [note for row in rows for note in (power_line(row.comparison), row.comparison.warning) if note]
    return {"columns": COMPARISON, "rows": [comparison_row(row) for row in rows], "notes": list(dict.fromkeys(notes))}


def _shown(row: RolloutRow, step: int, place: int) -> dict[str, object]:
    kept = {name: value for name, value in asdict(row).items() if name not in BY_TOKEN}
    rows: list[RolloutRow | Branch] = [row, *row.branches]
    sampled = [logprob for one in rows for logprob, own in zip(one.logprobs, one.trained, strict=True) if own]
    return {
        **kept, "step": step, "row": place, "is_right": row.right, "branches": [{"text": one.text} for one in row.branches],
        "length": sum(len(one.ids) for one in rows), "sampled": len(sampled), "prompt_length": len(row.prompt_ids),
        "logprob": sum(sampled) / len(sampled) if sampled else None,
    }  # fmt: skip


def _read(kind: type[Asked], params: Params) -> Asked:
    """Read parameters; empty ones count as absent. Raises RunDirectoryError, naming the first that is wrong."""
    try:
        return kind.model_validate({name: value for name, value in params.items() if value != ""})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RunDirectoryError(
            f"the parameter {where} is wrong: {first['msg']}", where="view", fix="reload the page"
        ) from error

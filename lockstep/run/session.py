"""The session of a run: the work around each step of the loop. It proves syncs, measures, records, saves, and decides to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lockstep.build.disk import disk_metrics
from lockstep.build.memory import check_memory
from lockstep.build.parts import Parts
from lockstep.checkpoint.store import list_checkpoints
from lockstep.config.schema import Recipe
from lockstep.device import keep_objects
from lockstep.errors import EvaluationError, HealthStop, Interrupted, LockstepError
from lockstep.evaluation.plan import evaluation_steps
from lockstep.health.spikes import SpikeLog
from lockstep.run.checkpointer import Checkpointer
from lockstep.run.evaluation import evaluate_modes
from lockstep.run.logger import Clock, RunLogger
from lockstep.run.monitor import Monitor
from lockstep.run.signals import StopRequest
from lockstep.run.utilisation import Utilisation, gpu_reader
from lockstep.run.watchdog import Watchdog
from lockstep.sync.record import proof_line, proof_metrics, require_exact
from lockstep.types import Metrics, Proof


@dataclass(frozen=True, slots=True)
class Measure:
    """Metrics that are measured after some steps, beside the evaluation."""

    phase: str
    """Name of its phase: its time is logged as time/<phase>."""
    steps: frozenset[int]
    """Trained steps after which it is due; 0 is the base."""
    run: Callable[[], Metrics]


class Session:
    """One attempt of a run, from `start` trained steps on. A context manager: inside it the first SIGTERM or SIGINT only asks
    to stop.

    Entering proves that the engine has the learner's weights. Step k of the records is the state after k trained steps.
    """

    def __init__(
        self, parts: Parts, recipe: Recipe, logger: RunLogger, start: int, measures: Sequence[Measure] = ()
    ) -> None:
        self._parts, self._recipe, self._logger, self._start = parts, recipe, logger, start
        self._monitor = Monitor(recipe, logger, start, parts.policy.resolved.path)
        watched = recipe.health.spikes.enabled
        self.spikes = SpikeLog(recipe, parts.policy.chat.decode, parts.carried.recent) if watched else None
        """Watches the updates; what it finds is stored with the step."""
        self._checkpointer = Checkpointer(parts, recipe, logger, start)
        self._measures = [
            *measures,
            Measure("evaluate", frozenset(evaluation_steps(recipe)), self._evaluate),
        ]
        self._stop = StopRequest(logger.console.notice)
        self._done = start
        self._utilisation = Utilisation(gpu_reader())
        self._watchdog = Watchdog(recipe.health.stall, logger.run.path, self._tell)
        logger.beat = self._watchdog.beat
        self.clock = Clock(self._phase, self._logger.progress)
        """Times of the present step."""

    def __enter__(self) -> Session:
        with ExitStack() as ends:
            ends.callback(self._utilisation.close)
            ends.enter_context(self._watchdog)
            self._proof = self._prove()
            rollout, probe = self._recipe.rollout, self._proof.probe
            cut = bool(rollout.top_k or rollout.min_p or rollout.top_p < 1)
            self._exact = probe is not None and probe.tolerance == 0 and not cut
            ends.enter_context(self._stop)
            ends.callback(keep_objects())
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._logger.console.phase(name)
        with self._watchdog.phase(name):
            yield

    def _tell(self, text: str) -> None:
        self._logger.event("stalled", text, step=self._done)
        self._logger.note(text)

    def measure_start(self) -> None:
        """Measure the weights that the attempt begins with, if that is due."""
        self._logger.console.start(self._recipe.steps, self._start, evaluation_steps(self._recipe))
        metrics: Metrics = {}
        for measure in self._due(self._start):
            with self.clock(measure.phase):
                metrics |= measure.run()
        if metrics:
            if not self._start:  # a trained step has times of its own
                metrics |= self.clock.seconds
            self._logger.at_start(self._start, metrics, self._proof)
        self._monitor.begin(metrics)
        # The base has no checkpoint to keep. One that was saved before it was evaluated does not know that it is the best.
        if metrics and self._start and self._checkpointer.note(self._start, metrics):
            self._checkpointer.save(self._start, self._proof, self.clock)

    def steps(self) -> Iterator[int]:
        """Yield the steps to train, until the recipe's number is reached, or eval.stop or a health rule ends the run.

        The body ends with `finish`. Raises HealthStop at the end if a rule stopped the run.
        """
        for step in range(self._start, self._recipe.steps):
            if self._monitor.over:  # the checkpoint of that step is saved
                break
            self.clock = Clock(self._phase, self._logger.progress)
            yield step
        self._monitor.require_healthy()

    @contextmanager
    def before_update(self, step: int) -> Iterator[None]:
        """Guard a block in which no weight changes: if the run must stop there, the weights of `step` are saved first."""
        try:
            yield
        except HealthStop:
            if step and step not in {info.step for info in list_checkpoints(self._logger.run.path) if info.complete}:
                self._checkpointer.save(step, self._proof, self.clock)
            raise

    def sync(self) -> Metrics:
        """Bring the learner's weights to the engine and prove it; returns metrics of the proof. Raises SyncError."""
        with self.clock("sync"):
            self._proof = self._parts.sync.push(self._parts.learner, self._parts.engine)
        return proof_metrics(self._proof, self._parts.sync.shift)

    def goes_on(self, step: int) -> bool:
        """Return whether rollouts of the next step follow the update of `step`, with no evaluation and no checkpoint between."""
        return not self._saves(step + 1) and not self._due(step + 1)

    def finish(self, step: int, metrics: Metrics) -> None:
        """Measure everything that is due after a trained step, record it, and save if the recipe or a stop asks for it.

        Raises Interrupted, after saving, on SIGTERM or SIGINT; EvaluationError, after saving, if an evaluation failed.
        """
        self._done = done = step + 1
        due, failure = ([] if self._stop else self._due(done)), None
        save = self._saves(done)
        if (due or save) and not self._in_sync:
            metrics |= self.sync()
        for measure in due:
            failure = failure or self._measure(measure, metrics)
        metrics |= self.clock.metrics(metrics) | self._resources(done)
        self._logger.step(done, metrics, self._proof if self._in_sync else None)
        if self._exact:
            require_exact(metrics, done)
        for spike in self.spikes.take() if self.spikes else ():
            self._logger.spike(spike)
        over = self._monitor.note(done, metrics)
        best = self._checkpointer.note(done, metrics)
        if best or save or over or failure or self._stop:
            if not self._in_sync:  # a checkpoint holds proven weights
                self._logger.add(done, self.sync(), self._proof)
            self._checkpointer.save(done, self._proof, self.clock)
        if self._stop:  # after the last step too: its evaluation and the report are still to come
            raise self._stop.after(done, self._recipe.steps, self._logger.run.path)
        if failure:
            raise failure

    @property
    def _in_sync(self) -> bool:
        return self._proof.version == self._parts.learner.version

    def _saves(self, done: int) -> bool:
        """Return whether the recipe, the end or a stop asks for a checkpoint now."""
        return done % self._recipe.save.every == 0 or done == self._recipe.steps or bool(self._stop)

    def _due(self, done: int) -> list[Measure]:
        return [measure for measure in self._measures if done in measure.steps]

    def _measure(self, measure: Measure, metrics: Metrics) -> LockstepError | None:
        """Add the measured metrics; returns the error that ends the run once its step is saved."""
        try:
            with self.clock(measure.phase):
                metrics |= measure.run()
        except (EvaluationError, Interrupted) as error:
            return error
        return None

    def _evaluate(self) -> Metrics:
        return evaluate_modes(self._parts, self._recipe, self._logger, self._done, self._proof, self._stop)

    def _resources(self, done: int) -> Metrics:
        memory, warning = check_memory(self._parts.memory, self._parts.peak(), done - self._start)
        if warning:
            self._logger.warn(warning, step=done)
        return memory | disk_metrics(self._logger.run.path) | self._utilisation.step()

    def _prove(self) -> Proof:
        """Give the engine the learner's weights, prove it, and show that the proof would notice a false tensor."""
        parts, start = self._parts, self._start
        proof = parts.sync.push(parts.learner, parts.engine)
        falsified = parts.sync.negative_control(parts.learner, parts.engine)
        self._logger.note(f"{proof_line(proof)}; negative control: one bit of {falsified} was flipped and noticed")
        self._logger.say(f"weights {proof.fingerprint}: the engine is proven to hold those of the learner")
        began = {"base": parts.learner.describe().base or proof.fingerprint} if start == 0 else {}
        self._logger.event("sync", proof_line(proof), step=start, negative_control=falsified, **began)
        return proof

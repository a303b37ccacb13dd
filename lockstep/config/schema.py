"""Every setting of a run, defined once. The text under a field is its help, on the command line and in docs/settings.md.

Quantities carry their unit in the name: prompts_per_step, samples_per_prompt, samples_per_update, tokens_per_microbatch.
A section with variants is a union told apart by `kind`. Larger groups of settings have a module of their own beside this one.
"""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from lockstep.config.adapter import Adapter, Lora, NoAdapter, OtherPeft, packed_mistake, vllm_refuses
from lockstep.config.algorithm import Algorithm, Grpo
from lockstep.config.data import Data
from lockstep.config.evaluate import Drops, Eval, EvalMode, EvalSet, LmEvalSet, NoStop, Plateau, decision_mistake
from lockstep.config.health import Health
from lockstep.config.metric import find, hint
from lockstep.config.model import Model
from lockstep.config.numerics import PHASES, Noise, Numerics
from lockstep.config.openenv import OpenEnvTask
from lockstep.config.optimizer import AdamW, Muon, Optimizer, PythonOptimizer, default_rate, offload_mistake
from lockstep.config.placement import Colocated, Local, Placement, Split
from lockstep.config.records import Paths, Save, Track
from lockstep.config.section import TAG, Json, Place, Section
from lockstep.config.sft import Rollouts, Sft
from lockstep.config.spiel import OpenSpielTask, Rival
from lockstep.config.step import Rollout, Sync, Update
from lockstep.config.task import (
    AgentTask,
    Chat,
    Curriculum,
    EnvTask,
    Example,
    FileTask,
    GuessNumberTask,
    GymnasiumTask,
    MixedTask,
    NoTask,
    PythonTask,
    ReasoningGymTask,
    Share,
    Task,
    TextArenaTask,
    ToolTask,
    VerifiersTask,
)
from lockstep.config.tools import McpServer, Tool, Turns
from lockstep.config.verifier import (
    ChoiceVerifier,
    CodeVerifier,
    CompositeVerifier,
    JsonVerifier,
    JudgeVerifier,
    MathVerifier,
    NumericVerifier,
    OwnGrading,
    PythonVerifier,
    RegexVerifier,
    RubricVerifier,
    SetVerifier,
    TextVerifier,
    TrlVerifier,
    Verifier,
    VerlVerifier,
)
from lockstep.config.vllm import Vllm, mistake_of, numerics_mistake, transport_of

AUTO_SLOTS = 64
MOST_AUTO_SLOTS = 1024
"""More sequences hardly make decoding faster: on an H200 its matrix products are bound by arithmetic from about 200 on."""


MOST_STEPS = 1_000_000
"""The longest run: steps that evaluate are listed."""


Allowable: TypeAlias = Literal[
    "slow_warmup", "long_warmup", "short_horizon", "memory", "disk", "best_metric", "extreme", "busy_gpu"
]
"""Refusals that are forecasts: a run may be started in spite of them."""


class Recipe(Section):
    """One run."""

    name: str = Field(
        default="run", pattern=r"^([A-Za-z0-9]|\{[a-z_.]+\})([A-Za-z0-9._-]|\{[a-z_.]+\})*$", max_length=100
    )
    """Name of the run and of its directory. Fields are filled in when it starts: {task}, {model}, {algorithm}, {adapter}, {lr},
    {seed}, {steps}, {date}, {time}, any setting ({update.epochs}), and {n}, the first number that is free."""
    loop: Literal["rl", "sft"] = "rl"
    """rl samples, grades and improves; sft learns from given replies (section sft)."""
    warm_start: Place | None = None
    """A run or checkpoint whose trained weights this run starts from, with a new step count and a new optimizer. To go on with
    a stopped run instead, use lockstep train --resume."""
    runs_dir: Place = "runs"
    """Folder of run directories."""
    paths: Paths = Paths()
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Every random number of the run derives from it, the step, the prompt and the sample."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU if there is one."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of each process; none takes all cores, shared among its workers. Results are bit-equal only at equal numbers.
    """
    placement: Placement = Local()
    """One process, or several workers."""
    steps: int = Field(default=50, ge=1, le=MOST_STEPS)
    """Training steps: each samples, grades, updates and syncs once."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the task's training questions, instead of steps (loop = rl, task file; of SFT it is sft.epochs). With both, a
    run whose epochs end before its steps is refused."""
    allow: list[Allowable] = Field(default_factory=list)
    """Refusals that are let through, as `--allow NAME` does: the run starts, and its manifest says so."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts of one step."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Samples of each prompt: the group size."""
    model: Model = Model()
    adapter: Adapter = NoAdapter()
    task: Task = ReasoningGymTask()
    chat: Chat = Chat()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Grpo()
    optimizer: Optimizer = AdamW()
    update: Update = Update()
    numerics: Numerics = Numerics()
    noise: Noise | None = None
    """Adaptive quantisation noise in rollouts; none adds none."""
    sync: Sync = Sync()
    sft: Sft | None = None
    """Data of supervised fine-tuning (loop = sft)."""
    eval: Eval = Eval()
    save: Save = Save()
    track: Track = Track()
    health: Health = Health()

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        return self.update.samples_per_update or self.samples_per_step

    def slots(self, device: str) -> int:
        """Return the number of sequences decoded together on this type of device ("cuda" or another), if there is room."""
        if self.rollout.slots != "auto":
            return self.rollout.slots
        return max(AUTO_SLOTS, min(MOST_AUTO_SLOTS, self.samples_per_step)) if device == "cuda" else AUTO_SLOTS

    @property
    def longest_reply(self) -> int:
        """Most tokens that a rollout or an evaluation may sample for one reply."""
        return max(self.rollout.max_tokens, self.eval.max_tokens or 0)

    @property
    def vllm_room(self) -> int:
        """Sequences of the greatest length that vLLM's automatic cache has room for; more of them share it."""
        return AUTO_SLOTS if self.rollout.slots == "auto" else self.rollout.slots

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one pass over the samples of a step."""
        return self.samples_per_step // self.samples_per_update

    @property
    def updates_per_step(self) -> int:
        return 1 if self.loop == "sft" else self.update.epochs * self.updates_per_epoch

    @property
    def critic_steps(self) -> int:
        """Steps at the start that train the critic alone."""
        critic = self.algorithm.critic
        return critic.warmup_steps if critic else 0

    @property
    def policy_updates(self) -> int:
        """Optimizer steps of the policy in the whole run; its learning rate follows its schedule over these."""
        return (self.steps - self.critic_steps) * self.updates_per_step

    @property
    def workers(self) -> int:
        """Number of processes with a model."""
        return self.started or 1

    @property
    def started(self) -> int:
        """Number of processes that the run starts for its models."""
        place = self.placement
        return 0 if isinstance(place, Local) else place.trainers + place.samplers

    @property
    def restarts(self) -> int:
        """Number of times that the run may go on by itself after it lost a worker."""
        return 0 if isinstance(self.placement, Local) else self.placement.restarts

    @property
    def engines(self) -> int:
        """Number of engines that share the samples of a step."""
        place = self.placement
        return 1 if isinstance(place, Local) else place.samplers or place.trainers

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return default_rate(self.loop, adapter=self.adapter.kind != "none")

    @property
    def weight_transport(self) -> Literal["shared", "view", "copy", "ipc"]:
        """Transport of weights to the engine: sync.transport, or for vLLM rollout.vllm.transport with auto resolved."""
        if self.rollout.engine == "native":
            return self.sync.transport
        return transport_of(self.rollout.vllm, adapter=self.adapter.kind != "none")

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        samples, per_update = self.samples_per_step, self.samples_per_update
        if samples % per_update:
            raise ValueError(
                f"update.samples_per_update={per_update} does not divide the {samples} samples of a step "
                f"({self.prompts_per_step} prompts x {self.samples_per_prompt} samples)"
            )
        return self

    @model_validator(mode="after")
    def _loop_has_its_settings(self) -> Self:
        if self.task.kind == "none" and (self.loop == "rl" or self.eval.enabled):
            raise ValueError("task.kind=none has no questions: set a task, or set loop=sft, eval.enabled=false")
        if self.loop == "sft":
            if self.sft is None:
                raise ValueError("loop=sft needs section sft; at least sft.data.source, where its rows are")
            if self.epochs is not None:
                raise ValueError("epochs applies to loop=rl only; with loop=sft set sft.epochs")
            if self.sft.epochs is not None and "steps" in self.model_fields_set:
                raise ValueError(f"steps={self.steps} and sft.epochs={self.sft.epochs:g}: set one of the two")
            idle = [f"update.{n}" for n in ("samples_per_update", "epochs") if getattr(self.update, n) not in (None, 1)]
            own, fields = ("prompts_per_step", "samples_per_prompt"), type(self).model_fields
            idle += [name for name in own if getattr(self, name) != fields[name].default]
            if idle:
                raise ValueError(
                    f"{idle[0]} applies to loop=rl only: remove it (with loop=sft, "
                    "sft.sequences_per_step sets the rows per step)"
                )
            if self.algorithm.model_dump(exclude={TAG}) != Grpo().model_dump(exclude={TAG}):
                raise ValueError("algorithm applies to loop=rl only; sft minimises the negative log-likelihood")
        elif self.epochs is not None and self.task.kind != "file":
            raise ValueError(
                f"epochs counts passes over rows, and task.kind={self.task.kind} has no fixed number: set steps"
            )
        elif self.sft is not None:
            raise ValueError("section sft has no effect with loop=rl: remove it, or set loop=sft")
        return self

    @model_validator(mode="after")
    def _group_has_a_baseline(self) -> Self:
        if self.loop == "sft":
            return self
        algorithm = self.algorithm
        if self.samples_per_prompt < 2 and (algorithm.compares_in_group or algorithm.dynamic_sampling.enabled):
            raise ValueError(
                f"samples_per_prompt=1: {algorithm.kind} compares the samples of a prompt and needs at least 2"
            )
        return self

    @model_validator(mode="after")
    def _penalty_begins_within_the_budget(self) -> Self:
        buffer, longest = self.algorithm.overlong.buffer, self.rollout.max_tokens
        if self.loop == "rl" and buffer > longest:
            raise ValueError(
                f"algorithm.overlong.buffer={buffer} is above rollout.max_tokens={longest}: even an empty reply would be "
                "punished; lower the buffer"
            )
        return self

    @model_validator(mode="after")
    def _credit_has_an_effect(self) -> Self:
        mix = self.task.tasks if isinstance(self.task, MixedTask) else {}
        tasks = {"task": self.task} | {f"task.tasks.{name}.task": share.task for name, share in mix.items()}
        reads = self.algorithm.advantage.kind in ("gae", "whitened", "python")
        for where, task in tasks.items():
            turns = getattr(task, "turns", None)
            if isinstance(turns, Turns) and turns.credit == "turn" and not reads:
                raise ValueError(
                    f"{where}.turns.credit=turn would have no effect: {self.algorithm.kind} compares whole episodes; "
                    "take an algorithm whose advantage is of kind gae or whitened (ppo, reinforce_pp)"
                )
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        alone, total = self.critic_steps, self.policy_updates
        if alone and alone >= self.steps:
            raise ValueError(
                f"algorithm.critic.warmup_steps={alone} leaves the policy no step: the run has {self.steps}"
            )
        if self.optimizer.warmup_steps >= total and self.epochs is None:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} never ends: the run has {total} optimizer steps "
                f"({self.steps - alone} steps x {self.updates_per_step} updates)"
            )
        return self

    @model_validator(mode="after")
    def _offload_frees_memory(self) -> Self:
        if mistake := offload_mistake(self.optimizer, self.device, self.adapter):
            raise ValueError(mistake)
        return self

    @model_validator(mode="after")
    def _warns_before_it_stops(self) -> Self:
        if self.health.warn_unscored > self.health.max_unscored:
            raise ValueError("health.warn_unscored is above health.max_unscored: the warning could never come first")
        return self

    @model_validator(mode="after")
    def _best_is_decided_by_what_may_decide(self) -> Self:
        name = self.save.keep_best
        if name and (mistake := decision_mistake(self.eval, name)):
            raise ValueError(f"save.keep_best={name}: {mistake}")
        if name and not name.startswith("eval/") and find(name) is None:
            raise ValueError(f"save.keep_best={name}: no such metric; {hint(name)}")
        return self

    @model_validator(mode="after")
    def _numerics_are_of_the_run(self) -> Self:
        named = self.numerics.plain_named
        if named is not None and self.model.dtype not in ("auto", named):
            raise ValueError(
                f"numerics names {named}, but model.dtype={self.model.dtype}: layers that are not quantised compute in it"
            )
        if mistake := packed_mistake(self.adapter, [self.numerics.of(phase) for phase in PHASES]):
            raise ValueError(mistake)
        if self.numerics.rollout is not None and self.loop != "rl":
            raise ValueError(f"numerics.rollout is set, but loop={self.loop} has no rollouts: it would have no effect")
        return self

    @model_validator(mode="after")
    def _noise_has_its_stages(self) -> Self:
        if self.noise is None:
            return self
        if self.loop != "rl":
            raise ValueError(f"noise applies to rollouts, and loop={self.loop} has none")
        steps = self.steps - self.critic_steps
        if self.noise.stages > steps:
            raise ValueError(
                f"noise.stages={self.noise.stages}, but the policy is trained in {steps} steps: some stages would never begin"
            )
        return self

    @model_validator(mode="after")
    def _workers_can_run(self) -> Self:
        kind = self.placement.kind
        if kind == "colocated" and self.rollout.engine == "vllm":
            raise ValueError("rollout.engine=vllm does not run with placement.kind=colocated; take split or local")
        if kind != "local" and self.sync.transport != "shared":
            raise ValueError(f"sync.transport=copy does not run with placement.kind={kind}; take local")
        return self

    @model_validator(mode="after")
    def _vllm_can_serve(self) -> Self:
        if self.rollout.engine == "native":
            if self.rollout.vllm != Vllm():
                raise ValueError("rollout.vllm is set, but rollout.engine is native: it would have no effect")
            return self
        if self.device == "cpu":
            raise ValueError("rollout.engine=vllm needs a GPU; use native on a CPU")
        if mistake := vllm_refuses(self.adapter):
            raise ValueError(mistake)
        temperatures = (self.rollout.temperature, *(mode.temperature for _, mode in self.eval.pairs))
        adapter = self.adapter.kind != "none"
        mistake = mistake_of(self.rollout.vllm, self.longest_reply, temperatures, adapter=adapter)
        if mistake := mistake or numerics_mistake(self.numerics, adapter=adapter):
            raise ValueError(mistake)
        return self

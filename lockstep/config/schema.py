"""Every setting of a run, defined once. The text under a field is its help, on the command line and in docs/settings.md.

Quantities carry their unit in the name: prompts_per_step, samples_per_prompt, samples_per_update, tokens_per_microbatch.
A section with variants is a union told apart by `kind`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from lockstep.config.algorithm import Algorithm, Grpo
from lockstep.config.section import TAG, Json, Section
from lockstep.config.vllm import Vllm, mistake_of, transport_of

__all__ = ["TAG", "Algorithm", "Grpo", "Json", "Section"]


class Model(Section):
    """The model to train."""

    path: str = Field(default="smollm2-135m-instruct", min_length=1)
    """A built-in name (smollm2-135m-instruct), a hub id (org/name), or a local folder."""
    revision: str | None = None
    """Hub branch, tag or commit; none takes the hub's default."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the weights that are trained and that sample; auto is bf16 on a GPU and fp32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read it."""


class NoAdapter(Section):
    """Train all weights."""

    kind: Literal["none"] = "none"


class Lora(Section):
    """Train low-rank adapters by PEFT; the base is frozen and shared by policy, reference and engine."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the linear layers that get an adapter, or all of them but the head."""


Adapter: TypeAlias = Annotated[NoAdapter | Lora, Field(discriminator="kind")]


class NumericVerifier(Section):
    """Exact match of a number: last boxed answer, else (if allowed) the last number of the reply."""

    kind: Literal["numeric"] = "numeric"
    fallback: Literal["none", "last_number"] = "none"
    """What to read when nothing is boxed. last_number can pay for guesses."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Largest difference that still counts as equal, relative for |answer| > 1. Two integers must be the same."""


class TextVerifier(Section):
    """Exact match of text after trimming and case folding: last boxed answer, else (if allowed) the last line."""

    kind: Literal["text"] = "text"
    fallback: Literal["none", "last_line"] = "none"
    """What to read when nothing is boxed."""


class PythonVerifier(Section):
    """A function from your file: def grade(prompt, reply) returning a number or a Grade."""

    kind: Literal["python"] = "python"
    path: str = Field(pattern=r".+\.py:\w+$")
    """file.py:function"""


Verifier: TypeAlias = Annotated[NumericVerifier | TextVerifier | PythonVerifier, Field(discriminator="kind")]


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
    verifier: Verifier = NumericVerifier()


class FileTask(Section):
    """Questions and answers from a jsonl or parquet file."""

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """Training rows, .jsonl or .parquet."""
    heldout: dict[Literal["id_probe", "ood_probe", "sanity"], str] = Field(default_factory=dict)
    """A file for each held-out role; without id_probe, `heldout_rows` are split off `path` by hash."""
    heldout_rows: int = Field(default=200, ge=0)
    """Rows split off when there is no id_probe file."""
    prompt: str = "prompt"
    """Column with the question, as text or as a list of messages."""
    answer: str = "answer"
    """Column with the reference answer."""
    id: str | None = None
    """Column with a unique id; none numbers the rows."""
    verifier: Verifier = NumericVerifier()


class PythonTask(Section):
    """A class from your file with the methods of lockstep.types.Task."""

    kind: Literal["python"] = "python"
    path: str = Field(pattern=r".+\.py:\w+$")
    """file.py:Class"""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Passed to the class as keyword arguments."""


Task: TypeAlias = Annotated[ReasoningGymTask | FileTask | PythonTask, Field(discriminator="kind")]


class Example(Section):
    """One solved turn shown before the question."""

    user: str
    """The example question."""
    assistant: str
    """The example reply."""


class Chat(Section):
    """How a question becomes a chat."""

    system: str | None = None
    """System text; none leaves it to the model's template."""
    examples: list[Example] = Field(default_factory=list)
    """Solved turns before the question (few-shot)."""
    suffix: str = ""
    """Text appended to the question, to the examples' too. It is part of a score's conditions."""
    template_kwargs: dict[str, Json] = Field(default_factory=dict)
    """Extra variables for the model's chat template."""


class Rollout(Section):
    """How samples are drawn."""

    engine: Literal["native", "vllm"] = "native"
    """native samples from the learner's own weights in one process; vllm needs a GPU and pip install 'lockstep-rl[vllm]'."""
    slots: int = Field(default=64, ge=1, le=4096)
    """Sequences decoded side by side; more wait for a free slot."""
    max_tokens: int = Field(default=64, ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature in training; log-probabilities are of the tempered distribution."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens with this much probability."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens at least this likely relative to the most likely one."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response."""
    ignore_eos: bool = False
    """Force every response to max_tokens (benchmarks only)."""
    vllm: Vllm = Vllm()


class AdamW(Section):
    """AdamW with fp32 master weights."""

    lr: float | None = Field(default=None, ge=0)
    """Peak learning rate; none is 1e-6 for full training and 2e-5 for adapters. The value in force is printed."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The global gradient norm is clipped to this."""
    states: Literal["fp32", "8bit"] = "fp32"
    """Precision of the two moments. 8bit keeps them in blocks with a scale each: 6 bytes a parameter less, no longer exact."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, over optimizer steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The schedule ends at this share of lr."""


class Update(Section):
    """How a batch becomes optimizer steps."""

    samples_per_update: int | None = Field(default=None, ge=1)
    """Samples of one optimizer step; none takes all samples of the step, so that the ratio is 1 by construction."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Tokens of one forward pass, prompts and padding-free responses together; none is 8192 on a CPU and on a GPU what the
    memory plan finds room for. Changes memory, not the result."""
    share_prompts: bool = True
    """Run the prompt of a group once for all its samples. Exact; off for comparison."""
    drop_zero_advantage: bool = True
    """Leave out samples whose gradient is known to be zero. They still count in every denominator."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations computed again in the backward pass: selective is norms and activation products alone (a third less memory for
    a few percent more time), full is whole layers (least memory, a third more time). auto is none on a CPU and on a GPU what the
    memory plan chooses. Changes memory, not the result."""
    max_skipped: int = Field(default=3, ge=1)
    """Stop after this many steps in a row were skipped for a non-finite gradient."""


class Sync(Section):
    """How weights reach the engine, and how that is proven."""

    transport: Literal["shared", "copy"] = "shared"
    """shared: the engine reads the learner's own tensors; copy: it owns a second set, sent after every update. Of the native
    engine; for vLLM's see rollout.vllm.transport."""
    probe_first: int = Field(default=10, ge=0)
    """Probe log-probabilities at each of the first so many syncs."""
    probe_every: int = Field(default=10, ge=1)
    """Then at every so many syncs."""
    probe_sequences: int = Field(default=4, ge=1)
    """Fixed sequences of the probe."""
    probe_tokens: int = Field(default=32, ge=2)
    """Tokens of each."""


class EvalMode(Section):
    """One way to decode in an evaluation; its name is part of the score."""

    name: str = Field(default="greedy", pattern=r"^[a-z0-9_.@-]+$")
    """Label of the scores. Example: greedy, sampled."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    samples: int = Field(default=1, ge=1)
    """Replies per item."""

    @model_validator(mode="after")
    def _greedy_is_one(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature 0 gives the same reply every time; set samples: 1 or a temperature above 0")
        return self


class Eval(Section):
    """When and how to evaluate. The last step is always evaluated."""

    enabled: bool = True
    """Off skips every evaluation, and the log says so."""
    every: int = Field(default=20, ge=1)
    """Steps between evaluations."""
    at_start: bool = True
    """Evaluate the base model before the first step."""
    items: int = Field(default=200, ge=1)
    """Held-out problems."""
    role: Literal["id_probe", "ood_probe"] = "id_probe"
    """Which held-out set."""
    modes: list[EvalMode] = Field(
        default_factory=lambda: [EvalMode(), EvalMode(name="sampled", temperature=1.0)], min_length=1
    )
    """Decoding modes, each a score of its own."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest reply; none takes rollout.max_tokens."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [mode.name for mode in self.modes]
        if len(set(names)) < len(names):
            raise ValueError(f"mode names must differ, got {', '.join(names)}")
        return self


class Save(Section):
    """Which checkpoints are kept. The last step is always saved."""

    every: int = Field(default=20, ge=1)
    """Steps between checkpoints."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    keep_best: str | None = None
    """Also keep the checkpoint with the highest value of this metric. Example: eval/greedy/accuracy"""


class Track(Section):
    """Where numbers go besides metrics.jsonl."""

    sinks: list[Literal["wandb", "trackio", "tensorboard"]] = Field(default_factory=list)
    """W&B writes offline without a key; `wandb sync` sends it later."""
    project: str = "lockstep"
    """Project name in W&B and trackio."""
    tags: list[str] = Field(default_factory=list)
    """Free labels of the run."""
    rollouts_every: int = Field(default=1, ge=1)
    """Steps between rollout files (rollouts/step_000012.parquet)."""


class Health(Section):
    """When a run stops itself."""

    max_unscored: float = Field(default=0.05, ge=0, le=1)
    """Stop when a larger share of a step's replies could not be scored."""
    warn_unscored: float = Field(default=0.01, ge=0, le=1)
    """Warn above this share."""


class Recipe(Section):
    """One run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its directory."""
    runs_dir: str = "runs"
    """Folder of run directories."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Every random number of the run derives from it, the step, the prompt and the sample."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU if there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; none takes all cores. Results are bit-equal only at equal numbers."""
    steps: int = Field(default=50, ge=1)
    """Training steps: each samples, grades, updates and syncs once."""
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
    optimizer: AdamW = AdamW()
    update: Update = Update()
    sync: Sync = Sync()
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

    @property
    def updates_per_step(self) -> int:
        return self.update.epochs * (self.samples_per_step // self.samples_per_update)

    @property
    def policy_updates(self) -> int:
        """Optimizer steps of the policy in the whole run: none in the steps that warm the critic up."""
        critic = self.algorithm.critic
        return (self.steps - (critic.warmup_steps if critic else 0)) * self.updates_per_step

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return 1e-6 if self.adapter.kind == "none" else 2e-5

    @property
    def weight_transport(self) -> Literal["shared", "view", "copy", "ipc"]:
        """How weights reach the engine: sync.transport, or for vLLM rollout.vllm.transport with auto resolved."""
        if self.rollout.engine == "native":
            return self.sync.transport
        return transport_of(self.rollout.vllm, adapter=self.adapter.kind != "none")

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        samples, per_update = self.samples_per_step, self.samples_per_update
        if samples % per_update:
            raise ValueError(
                f"update.samples_per_update = {per_update} does not divide the {samples} samples of a step "
                f"({self.prompts_per_step} prompts x {self.samples_per_prompt} samples)"
            )
        return self

    @model_validator(mode="after")
    def _group_has_a_baseline(self) -> Self:
        algorithm, advantage = self.algorithm, self.algorithm.advantage
        compares = advantage.kind in ("group", "leave_one_out", "max_rl") or (
            advantage.kind == "whitened" and advantage.baseline == "group_mean"
        )
        if self.samples_per_prompt < 2 and (compares or algorithm.dynamic_sampling.enabled):
            raise ValueError(
                f"samples_per_prompt = 1: {algorithm.kind} compares the samples of a prompt and needs at least 2"
            )
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        critic, total = self.algorithm.critic, self.policy_updates
        if critic is not None and critic.warmup_steps >= self.steps:
            raise ValueError(
                f"algorithm.critic.warmup_steps = {critic.warmup_steps} leaves the policy no step: the run has {self.steps}"
            )
        if self.optimizer.warmup_steps >= total:
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} never ends: the run has {total} optimizer steps "
                f"({self.steps - (critic.warmup_steps if critic else 0)} steps x {self.updates_per_step} updates)"
            )
        return self

    @model_validator(mode="after")
    def _warns_before_it_stops(self) -> Self:
        if self.health.warn_unscored > self.health.max_unscored:
            raise ValueError("health.warn_unscored is above health.max_unscored: the warning could never come first")
        return self

    @model_validator(mode="after")
    def _vllm_can_serve(self) -> Self:
        if self.rollout.engine == "native":
            if self.rollout.vllm != Vllm():
                raise ValueError("rollout.vllm is set, but rollout.engine is native: it would have no effect")
            return self
        if self.device == "cpu":
            raise ValueError("rollout.engine = vllm needs a GPU; take native on a CPU")
        longest = max(self.rollout.max_tokens, self.eval.max_tokens or 0)
        temperatures = (self.rollout.temperature, *(mode.temperature for mode in self.eval.modes))
        if mistake := mistake_of(self.rollout.vllm, longest, temperatures, adapter=self.adapter.kind != "none"):
            raise ValueError(mistake)
        return self

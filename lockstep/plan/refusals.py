"""Refusals: reasons why a run of a recipe could not work, each with a name, a sentence and a fix.

`lockstep plan`, `doctor` and `train` all make these checks, before any weights are read. The setting `allow` lets forecasts
(schedule, extreme values, memory, disk) through. The model is built on the meta device, which takes a second and no memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from lockstep.config.adapter import Lora, keeps_mxfp4
from lockstep.config.algorithm import GroupAdvantage
from lockstep.config.numerics import PHASES, Phase
from lockstep.config.schema import Allowable, Recipe
from lockstep.errors import ConfigError, DoesNotFitError, LockstepError, ModelError, RefusedError
from lockstep.learner.schedule import learning_rate
from lockstep.models.folder import check_config
from lockstep.plan.devices import require_devices
from lockstep.plan.disk import require_room
from lockstep.plan.epochs import short_horizon
from lockstep.plan.model_shape import meta_model
from lockstep.plan.preview import Preview, config_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Name: TypeAlias = (
    Allowable | Literal["model", "family", "context", "adapter", "numerics", "noise", "serving", "routing", "gpus"]
)

WARM_BY, WARM_SHARE = 20, 0.3
"""By this step, counted from the policy's first, the rate must have been at this share of its peak."""
LONGEST_WARMUP = 0.5
"""Share of the optimizer steps that a warm-up may take."""
LARGEST_RATE = 1.0
"""Learning rate of AdamW and Muon; a step changes each weight by about this much."""
LARGEST_DECAY = 0.01
"""Share of each matrix that weight decay may take away in one optimizer step."""
USUAL_RATE = "optimizer.lr to 1e-6 for full training, to 2e-5 for adapters, or leave it out"
LEAST_CHANGE = 1e-9
"""Learning rate times optimizer steps, which is the most that a weight can move. A rate of 0 is a control, and is let through."""
LARGEST_STD_EPS = 100.0
"""Added to the standard deviation of rewards, which is below 1 where rewards lie between 0 and 1."""
LARGEST_ENTROPY = 10.0
"""Coefficient of the entropy bonus above which random replies are all that the loss asks for."""
LARGEST_PENALTY = 100.0
"""Penalty of long replies above which no usual reward counts."""
LARGEST_KL = 10.0
"""Coefficient of the KL penalty above which the reference is all that the loss asks for."""
TEMPERATURES = (0.1, 5.0)
"""Below, the replies to a prompt are nearly the same; above, they are noise."""
BETTER = {
    "rl": (
        "reward/mean",
        "reward/shaped_mean",
        "answer/correct",
        "reward/min",
        "reward/p90",
        "answer/[^/]+",
        "task/[^/]+/[^/]+",
    ),
    "sft": ("validation/logprob",),
}
"""Metrics of each loop of which more is better, as patterns."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Example: Refusal("slow_warmup", "optimizer.lr reaches 0.64 % …", "set optimizer.warmup_steps …", False)"""

    name: Name
    what: str
    fix: str
    allowed: bool = False
    """The recipe lets it through."""

    @property
    def line(self) -> str:
        return f"{self.name}: {self.what}"


def refusals(recipe: Recipe, gpu_gib: float | None = None) -> list[Refusal]:
    """Return all reasons against a run, also those that the recipe lets through. `gpu_gib`: memory of a GPU to plan for.

    A model that is not known, runs code of its own, or whose folder is damaged gives no reason here: loading it says why.
    """
    checks: list[tuple[Name, Callable[[], None]]] = [
        ("slow_warmup", lambda: _slow_warmup(recipe)),
        ("long_warmup", lambda: _long_warmup(recipe)),
        ("short_horizon", lambda: short_horizon(recipe)),
        ("best_metric", lambda: _best_metric(recipe)),
        ("extreme", lambda: _extreme(recipe)),
    ]
    folder, trust = config_folder(recipe.model), recipe.model.trust_remote_code
    if folder is not None:
        checks.append(("model", lambda: check_config(folder, recipe.model.path, trust)))
    model = preview = None
    with suppress(ModelError):
        if folder is not None:  # what follows from a config that is wrong is no reason of its own
            check_config(folder, recipe.model.path, trust)
        model = None if folder is None or trust else meta_model(folder)
        preview = None if model is None else Preview.of(recipe, gpu_gib)
    if model is not None:
        asked: dict[Name, Callable[[Recipe, PreTrainedModel], None]] = {
            "family": _family,
            "context": _context,
            "adapter": _adapter,
            "numerics": _numerics,
            "noise": _noise,
            "serving": _serving,
            "routing": _routing,
        }
        checks += [(name, partial(check, recipe, model)) for name, check in asked.items()]
    missing = [] if gpu_gib is not None else list(_raised("gpus", lambda: require_devices(recipe), recipe))
    if missing:  # what does not fit on GPUs that are not here is not known
        preview = None
    if preview is not None:
        checks.append(("memory", preview.require_memory))
    if preview is not None and gpu_gib is None:  # the disk of another machine is not known
        checks.append(("disk", lambda: _disk(recipe, preview)))
    return missing + [refusal for name, check in checks for refusal in _raised(name, check, recipe)]


def require_allowed(recipe: Recipe) -> list[Refusal]:
    """Return the refusals that the recipe lets through. Raises RefusedError, with every reason, if there are others."""
    found = refusals(recipe)
    if stand := [refusal for refusal in found if not refusal.allowed]:
        raise RefusedError(refusal_lines(stand))
    return found


def refusal_lines(found: list[Refusal]) -> list[str]:
    """Return each refusal with its fix on a line of its own."""
    return [text for one in found for text in (one.line, f"  to fix: {one.fix}")]


def _raised(name: Name, check: Callable[[], None], recipe: Recipe) -> Iterator[Refusal]:
    try:
        check()
    except LockstepError as error:
        what = ("\n    " if name == "gpus" else "; ").join(getattr(error, "mistakes", [])) or error.what
        forecast = name in get_args(Allowable)
        fix = f"{error.fix}; or let it through: --allow {name}" if forecast else error.fix
        yield Refusal(name, f"{error.where}: {what}" if error.where else what, fix, name in recipe.allow)


# --- schedule -------------------------------------------------------------------------------------------------------
def _slow_warmup(recipe: Recipe) -> None:
    total = recipe.policy_updates
    warmup = recipe.optimizer.warmup(total)
    seen = min(WARM_BY * recipe.updates_per_step, total)
    if recipe.loop == "sft" or not warmup:
        return
    share = max(learning_rate(recipe.optimizer, 1.0, update, total) for update in range(seen))
    if share < WARM_SHARE:
        raise ConfigError(
            [
                f"at step {seen // recipe.updates_per_step} the learning rate is only {share:.2%} of its peak, after {seen} of "
                f"{warmup} warm-up updates (the run has {total}); below {WARM_SHARE:.0%} the first steps do not show whether "
                "anything is learnt"
            ],
            fix=_shorter(recipe, int(seen / WARM_SHARE)),
        )


def _long_warmup(recipe: Recipe) -> None:
    total = recipe.policy_updates
    warmup = recipe.optimizer.warmup(total)
    if warmup > LONGEST_WARMUP * total:
        raise ConfigError(
            [
                f"the warm-up takes {warmup} of the run's {total} optimizer steps, which is more than {LONGEST_WARMUP:.0%}"
            ],
            fix=f"{_shorter(recipe, int(LONGEST_WARMUP * total))}, or raise steps",
        )


def _shorter(recipe: Recipe, most: int) -> str:
    """Return how to have a warm-up of at most `most` optimizer steps, in the setting that the recipe uses."""
    if not recipe.optimizer.warmup_ratio:
        return f"set optimizer.warmup_steps to {most} or less; it counts optimizer steps"
    share = math.floor(1e4 * most / recipe.policy_updates) / 1e4
    return f"set optimizer.warmup_ratio to {share:g} or less; it is a share of all optimizer steps"


def _extreme(recipe: Recipe) -> None:
    """Raise ConfigError for values under which the run would learn nothing, whatever its task."""
    found: list[tuple[str, str]] = []
    decay, rate = recipe.optimizer.weight_decay, recipe.lr
    step = "in each optimizer step"
    if rate > LARGEST_RATE and recipe.optimizer.kind != "python":
        found.append(
            (f"optimizer.lr={rate:g} moves every weight by as much {step}; weights are far below 1", USUAL_RATE)
        )
    elif isinstance(recipe.adapter, Lora) and recipe.adapter.scaling * rate > LARGEST_RATE:
        lora = recipe.adapter
        what = f"adapter.alpha={lora.alpha:g} multiplies what a learning rate of {rate:g} changes by {lora.scaling:g}"
        found.append((what, f"adapter.alpha to {2 * lora.alpha / lora.scaling:g}, which multiplies by 2"))
    if 0 < rate * recipe.policy_updates < LEAST_CHANGE:
        total = f"{rate * recipe.policy_updates:.2g} in all {recipe.policy_updates} optimizer steps"
        found.append((f"optimizer.lr={rate:g} moves no weight by more than {total}: nothing is learnt", USUAL_RATE))
    if decay * rate > LARGEST_DECAY:
        taken = f"{min(1.0, decay * rate):.0%} of every matrix {step}"
        most = f"{0.95 * LARGEST_DECAY / rate:.2g}"  # rounded, it must still be allowed
        what = f"optimizer.weight_decay={decay:g} times a learning rate of {rate:g} takes {taken}"
        found.append((what, f"optimizer.weight_decay to {most} or less"))
    if recipe.loop == "rl":
        found += _extreme_rl(recipe)
    if found:
        raise ConfigError([what for what, _ in found], fix="set " + "; set ".join(fix for _, fix in found))


def _extreme_rl(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with values of reinforcement learning alone, and what to set."""
    coef, warmth, critic = recipe.algorithm.kl.coef, recipe.rollout.temperature, recipe.algorithm.critic
    entropy, overlong = recipe.algorithm.entropy_coef, recipe.algorithm.overlong
    if coef > LARGEST_KL:
        what = f"algorithm.kl.coef={coef:g} outweighs every reward: the policy stays where it began"
        yield what, f"algorithm.kl.coef to {LARGEST_KL:g} or less; 0.001 to 0.1 is usual"
    if entropy > LARGEST_ENTROPY:
        what = f"algorithm.entropy_coef={entropy:g} outweighs every reward: the policy is trained to answer at random"
        yield what, f"algorithm.entropy_coef to {LARGEST_ENTROPY:g} or less; 0 to 0.01 is usual"
    if overlong.buffer and overlong.penalty > LARGEST_PENALTY:
        what = f"algorithm.overlong.penalty={overlong.penalty:g} outweighs every reward: only the length is trained"
        yield what, f"algorithm.overlong.penalty to {LARGEST_PENALTY:g} or less; 1 is usual"
    if critic is not None and critic.lr > LARGEST_RATE:
        what = f"algorithm.critic.lr={critic.lr:g} moves every weight of the critic by as much in each optimizer step"
        yield what, "algorithm.critic.lr to 1e-5, or leave it out"
    if critic is not None and 0 < critic.lr * recipe.policy_updates < LEAST_CHANGE:
        what = (
            f"algorithm.critic.lr={critic.lr:g} leaves the critic where it began in all {recipe.policy_updates} steps"
        )
        yield what, "algorithm.critic.lr to 1e-5, or leave it out"
    advantage = recipe.algorithm.advantage
    if isinstance(advantage, GroupAdvantage) and advantage.std_eps > LARGEST_STD_EPS:
        what = f"algorithm.advantage.std_eps={advantage.std_eps:g} is added to the divisor of the advantages: little is left"
        yield what, "algorithm.advantage.std_eps to 1e-6, or leave it out"
    low, high = TEMPERATURES
    if not low <= warmth <= high:
        why = "the replies to a prompt are nearly the same" if warmth < low else "replies are noise"
        yield f"rollout.temperature={warmth:g}: {why}", f"rollout.temperature to {low:g} to {high:g}; 1 is usual"


def _best_metric(recipe: Recipe) -> None:
    """Raise ConfigError if save.keep_best, which names a metric, names none of this loop of which more is better."""
    name = recipe.save.keep_best
    if name is None or name.startswith("eval/"):  # those the recipe's own validation knows
        return
    good = BETTER[recipe.loop]
    if not re.fullmatch("|".join(good), name):
        shown = ", ".join(["eval/greedy/accuracy", *(each for each in good if "[" not in each)])
        raise ConfigError(
            [f"save.keep_best={name} cannot be used: a higher value is not better, or the run does not measure it"],
            fix=f"set save.keep_best to one of {shown}",
        )


# --- model ----------------------------------------------------------------------------------------------------------
def _family(recipe: Recipe, model: PreTrainedModel) -> None:
    from lockstep.plan.family import require_family

    require_family(type(model), model.config)


def _context(recipe: Recipe, model: PreTrainedModel) -> None:
    from lockstep.models.decoder import context_of

    context = context_of(model.config)
    if context is None:
        return
    rows = recipe.sft.max_tokens if recipe.sft is not None else 0
    replies = {"rollout": recipe.rollout.max_tokens if recipe.loop == "rl" else 0}
    replies |= {"eval": (recipe.eval.max_tokens or 0) if recipe.eval.enabled else 0}
    mistakes = [f"sft.max_tokens={rows} is more than the model's context of {context} tokens"] if rows > context else []
    mistakes += [
        f"{section}.max_tokens={tokens} leaves no room for a prompt in the model's context of {context} tokens"
        for section, tokens in replies.items()
        if tokens >= context
    ]
    if mistakes:
        raise ConfigError(mistakes, fix=f"set max_tokens below {context}, or use a model with a longer context")


def _adapter(recipe: Recipe, model: PreTrainedModel) -> None:
    from lockstep.learner.adapter_start import refuse_small
    from lockstep.learner.adapter_targets import choose_targets
    from lockstep.learner.lora_experts import adapted_experts

    adapter = recipe.adapter
    if adapter.kind == "none":
        return
    if isinstance(adapter, Lora) and adapter.expert_rank:
        adapted_experts(model, adapter.expert_rank)
    if keeps_mxfp4(adapter):
        _require_mxfp4(recipe)
    chosen = choose_targets(model, adapter.targets)
    if isinstance(adapter, Lora) and adapter.init in ("pissa", "olora") and not adapter.start:
        refuse_small({name: model.get_parameter(f"{name}.weight") for name in chosen.layers}, adapter.rank)


def _require_mxfp4(recipe: Recipe) -> None:
    """Raise ConfigError if a base is to stay in MXFP4 that is not stored so, or that another run has trained."""
    from lockstep.models.mxfp4 import is_mxfp4

    folder, fix = config_folder(recipe.model), "set adapter.base=full"
    if folder is not None and not is_mxfp4(folder):
        raise ConfigError(
            [f"adapter.base=mxfp4 needs weights stored in MXFP4, but those of {recipe.model.path} are not"], fix=fix
        )
    if recipe.warm_start is not None:
        raise ConfigError(
            ["adapter.base=mxfp4 cannot be used with warm_start: it needs the weights of a published checkpoint"],
            fix=fix,
        )


def _numerics(recipe: Recipe, model: PreTrainedModel) -> None:
    """Raise LockstepError for a numeric that the layers cannot compute in, as setting it on the loaded model would."""
    from lockstep.numerics.apply import refuse_experts

    packed = keeps_mxfp4(recipe.adapter)
    for phase in PHASES:
        stacks = _stacks(recipe, model, phase)
        if packed and stacks and (numeric := recipe.numerics.of(phase)):
            raise refuse_experts(numeric, stacks)


def _stacks(recipe: Recipe, model: PreTrainedModel, phase: Phase) -> list[str]:
    """Return the experts' matrices that a phase's numeric quantises."""
    from lockstep.numerics.apply import settle
    from lockstep.numerics.experts import Stack

    targets = settle(model, recipe.numerics, phase).targets
    return [name for name, layer in targets.items() if isinstance(layer, Stack)]


def _noise(recipe: Recipe, model: PreTrainedModel) -> None:
    from lockstep.noise.targets import find_targets

    if recipe.noise is not None:
        find_targets(model, recipe.noise)


def _serving(recipe: Recipe, model: PreTrainedModel) -> None:
    """Raise ConfigError for a model whose weights vLLM holds under names that no checkpoint has, or holds quantised."""
    from lockstep.models.decoder import even_heads
    from lockstep.models.mxfp4 import is_mxfp4
    from lockstep.rollout.vllm.layout import MIXTURES

    if recipe.rollout.engine != "vllm":
        return
    experts = sorted({name.rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".experts." in name})
    folder, reasons = config_folder(recipe.model), list[str]()
    if experts and model.config.get_text_config().model_type not in MIXTURES:
        reasons.append(f"vLLM keeps experts ({', '.join(experts)}) in tensors of its own")
    elif any(recipe.numerics.of(phase) and _stacks(recipe, model, phase) for phase in PHASES if phase != "train"):
        reasons.append("vLLM does not quantise experts (numerics.exclude: [experts] leaves them unquantised)")
    if folder is not None and is_mxfp4(folder):
        reasons.append("vLLM would run the checkpoint's MXFP4 weights, but the trained weights are not quantised")
    if even_heads(model) == (0, 0):
        reasons.append(
            "vLLM fuses matrices of latent attention, of layers with a state or with other heads in its own ways"
        )
    if reasons:
        what = f"rollout.engine=vllm cannot load trained weights of {model.config.model_type}: {'; '.join(reasons)}"
        raise ConfigError([what], fix="set rollout.engine=native, which supports every family of docs/models.md")


def _routing(recipe: Recipe, model: PreTrainedModel) -> None:
    """Raise LockstepError if experts are to be replayed that nothing chooses, or that the engine does not record."""
    from lockstep.models.routing import Routing

    if not recipe.update.replay_routing:
        return
    Routing.of(model)
    if recipe.rollout.engine == "vllm" or recipe.loop != "rl":
        what = "update.replay_routing needs rollouts of the native engine, which records the chosen experts"
        raise ConfigError([what], fix="set rollout.engine=native, or update.replay_routing=false")


# --- room -----------------------------------------------------------------------------------------------------------
def _disk(recipe: Recipe, preview: Preview) -> None:
    if preview.disk is not None:
        try:
            require_room(preview.disk, preview.disks)
        except DoesNotFitError as error:
            raise ConfigError(error.mistakes, fix=error.fix) from None  # runs_dir is not what is wrong

"""Batch arithmetic as text: prompts → samples → updates → optimizer steps, with the names that other systems use.

Does not import torch. Sources of the names: verl's ray_trainer.py and fsdp_workers.py (`ppo_mini_batch_size` is in prompts and
is multiplied by `rollout.n`), OpenRLHF's train_ppo_ray.py (`train_batch_size` is in samples), TRL 1.16's grpo_config.py,
prime-rl's `batch_size` (in rollouts, one update each).
"""

from __future__ import annotations

from lockstep.config.schema import Local, Recipe, Sft, default_rate
from lockstep.learner.schedule import learning_rate

_FAR = 1000
"""A rate that is this many times the default is taken for a slip: such steps ruin a pretrained model."""
_LOW = 5
"""A rate that is a fifth of the default or less trains so slowly that a short run shows no effect."""
_SHOWN = 8
"""Steps written out in a line; of longer lists the middle is left out."""


def batch_lines(recipe: Recipe) -> list[str]:
    """Return the batch arithmetic in words, then its names elsewhere: what a run prints at its start, and `lockstep plan`."""
    if recipe.sft is not None:
        return [*_sft_lines(recipe, recipe.sft), *(f"in {line}" for line in equivalents(recipe))]
    lines = [
        f"a step: {_count(recipe.prompts_per_step, 'prompt')} x {_count(recipe.samples_per_prompt, 'sample')} each = "
        f"{_count(recipe.samples_per_step, 'sample')} of at most {recipe.rollout.max_tokens} tokens",
        *_redrawn(recipe),
        _updates(recipe),
        _update(recipe),
        _off_policy(recipe),
        _optimizer_steps(recipe),
        *_cut(recipe),
    ]
    return [*lines, *(f"in {line}" for line in equivalents(recipe))]


def _cut(recipe: Recipe) -> list[str]:
    rollout = recipe.rollout
    cuts = {"top_k": (rollout.top_k, 0), "top_p": (rollout.top_p, 1), "min_p": (rollout.min_p, 0)}
    used = [f"rollout.{name}={value:g}" for name, (value, off) in cuts.items() if value != off]
    if not used:
        return []
    return [
        f"warning: {', '.join(used)}: what is sampled from is cut and what is learnt is not, so that log-probabilities of tokens "
        "differ by what was cut off (mismatch/*, and the weights of algorithm.correction); without it the two are the same"
    ]


def placement_lines(recipe: Recipe) -> list[str]:
    """Return what each worker does in a step; nothing for a run in one process."""
    placement = recipe.placement
    if isinstance(placement, Local):
        return []
    trainers, samplers = placement.trainers, placement.samplers
    lines = [f"{_count(trainers, 'worker')}, each with the whole weights and a share of the optimizer"]
    if samplers:
        lines.append(
            f"{_count(samplers, 'worker')} more that sample, in turn with training: the weights are sent after each step"
        )
    if recipe.loop == "rl":
        least, more = divmod(recipe.prompts_per_step, recipe.engines)
        prompts = f"{least} or {least + 1}" if more else f"{least}"
        if recipe.rollout.deal == "queue":
            prompts = f"as many as it is ready for, about {prompts},"
        lines.append(
            f"a worker samples {prompts} of {recipe.prompts_per_step} prompts x {recipe.samples_per_prompt} samples a step"
        )
    lines.append(f"micro-batches are those of one process, dealt in rounds of {trainers}")
    return lines


def equivalents(recipe: Recipe) -> list[str]:
    """Return what this batch would be called in verl, OpenRLHF, TRL and prime-rl; where there is no equivalent, the reason.

    Example: "OpenRLHF: rollout_batch_size=16 (prompts), n_samples_per_prompt=8, …".
    """
    if recipe.sft is not None:
        return _sft_equivalents(recipe, recipe.sft)
    found = {"verl": _verl(recipe), "OpenRLHF": _openrlhf(recipe), "TRL": _trl(recipe), "prime-rl": _prime_rl(recipe)}
    return [f"{system}: {settings}" for system, settings in found.items()]


def _sft_lines(recipe: Recipe, sft: Sft) -> list[str]:
    size, tokens = sft.sequences_per_step, recipe.update.tokens_per_microbatch
    budget = "as many tokens as the memory has room for" if tokens is None else f"up to {tokens} tokens"
    mean = (
        "each of its trained tokens counts alike"
        if sft.aggregation == "token_mean"
        else "each of its rows counts alike"
    )
    longer = {"stop": "stops the run", "drop": "is dropped and counted", "truncate": "is truncated and counted"}
    return [
        f"a step: {_count(size, 'row')} of at most {sft.max_tokens} tokens, one optimizer step; a longer row "
        f"{longer[sft.too_long]}",
        f"rows are packed end to end without padding, none sees another, in micro-batches of {budget}; their size changes memory "
        f"and speed, not the result: {mean}",
        "rows are dealt by a permutation that depends on the seed and the epoch alone; the rest of an epoch that fills no step "
        "is another in each",
        f"the run: {_count(recipe.steps, 'step')} x 1 update = {_count(recipe.steps, 'optimizer step')}, "
        f"{recipe.steps * size} rows; epochs are {recipe.steps * size} / the number of rows",
    ]


def _sft_equivalents(recipe: Recipe, sft: Sft) -> list[str]:
    """Sources: verl's fsdp_sft_trainer.py, OpenRLHF's train_sft.py, TRL 1.16's sft_config.py."""
    size = sft.sequences_per_step
    return [
        f"verl: data.train_batch_size={size} (rows), data.max_length={sft.max_tokens}",
        f"OpenRLHF: train_batch_size={size} (rows), max_len={sft.max_tokens}",
        f"TRL: per_device_train_batch_size x processes x gradient_accumulation_steps = {size} (rows; with packing=True of "
        f"max_length tokens each, filled with several rows), max_length={sft.max_tokens}, max_steps={recipe.steps}",
    ]


def _updates(recipe: Recipe) -> str:
    each, updates = recipe.updates_per_epoch, _count(recipe.updates_per_step, "update")
    total = (
        f"{recipe.samples_per_step} samples / {recipe.samples_per_update} an update = {_count(each, 'update')} a pass, "
        f"x {_count(recipe.update.epochs, 'pass', 'es')} = {updates} a step"
    )
    if each == 1:
        return total
    return f"{total}; each pass deals the samples into its updates by a permutation of its own, prompts are not kept together"


def _update(recipe: Recipe) -> str:
    place = recipe.placement
    ranks = 1 if isinstance(place, Local) else place.trainers
    each = "" if ranks == 1 else f" with {recipe.samples_per_update // ranks} each"
    tokens = recipe.update.tokens_per_microbatch
    size = "as many tokens as the memory has room for" if tokens is None else f"up to {tokens} tokens"
    return (
        f"an update: {_count(recipe.samples_per_update, 'sample')} on {_count(ranks, 'process', 'es')}{each}, in "
        f"micro-batches of {size}; their size changes memory and speed, not the result"
    )


def _redrawn(recipe: Recipe) -> list[str]:
    dynamic = recipe.algorithm.dynamic_sampling
    if not dynamic.enabled:
        return []
    return [
        f"dynamic sampling: prompts whose samples are all right or all wrong are replaced, in up to {dynamic.max_rounds} rounds "
        f"of at most {recipe.prompts_per_step} prompts; a step that finds too few mixed ones is smaller"
    ]


def _off_policy(recipe: Recipe) -> str:
    two_policies = recipe.algorithm.old_logprobs == "rollout"
    engine = (
        "; it is taken against the engine's own log-probabilities, so it differs from 1 by rounding even in update 1"
    )
    last = recipe.updates_per_step
    if last == 1:
        if two_policies:
            return f"off-policy: none; each update is the only one of its samples, the ratio is 1{engine}"
        return "off-policy: none; each update is the only one of its samples, so the ratio is 1 by construction"
    which = "update 2" if last == 2 else f"updates 2 to {last}"
    moved = f"off-policy: {which} of each step; the weights have moved since the samples were drawn"
    if recipe.algorithm.loss.kind == "reinforce":
        return f"{moved}, and the loss has no ratio that accounts for it"
    return f"{moved}, so the ratio is not 1{engine if two_policies else ''}"


def _optimizer_steps(recipe: Recipe) -> str:
    alone, updates = recipe.critic_steps, _count(recipe.updates_per_step, "update")
    if not alone:
        return (
            f"the run: {_count(recipe.steps, 'step')} x {updates} = {_count(recipe.policy_updates, 'optimizer step')}"
        )
    return (
        f"the run: {recipe.steps} steps, of which the first {alone} train the critic alone; {recipe.steps - alone} x {updates} = "
        f"{recipe.policy_updates} optimizer steps of the policy"
    )


def _verl(recipe: Recipe) -> str:
    if recipe.samples_per_update % recipe.samples_per_prompt:
        share = recipe.samples_per_update / recipe.samples_per_prompt
        return (
            f"no equivalent: ppo_mini_batch_size counts prompts, and {recipe.samples_per_update} samples are those of "
            f"{share:.4g} prompts"
        )
    mini = recipe.samples_per_update // recipe.samples_per_prompt
    return (
        f"data.train_batch_size={recipe.prompts_per_step} (prompts), "
        f"rollout.n={recipe.samples_per_prompt}, "
        f"actor.ppo_mini_batch_size={mini} (prompts: verl multiplies by n, so {mini} x {recipe.samples_per_prompt} samples), "
        f"actor.ppo_epochs={recipe.update.epochs}"
    )


def _openrlhf(recipe: Recipe) -> str:
    return (
        f"rollout_batch_size={recipe.prompts_per_step} (prompts), "
        f"n_samples_per_prompt={recipe.samples_per_prompt}, "
        f"train_batch_size={recipe.samples_per_update} (samples), "
        f"max_epochs={recipe.update.epochs}"
    )


def _trl(recipe: Recipe) -> str:
    if recipe.samples_per_prompt < 2:
        return "no equivalent: GRPOConfig refuses num_generations=1"
    if recipe.algorithm.dynamic_sampling.enabled:
        return "no equivalent: its GRPOTrainer draws each prompt once, it has no dynamic sampling"
    return (
        f"num_generations={recipe.samples_per_prompt}, "
        f"generation_batch_size={recipe.samples_per_step} (samples), "
        f"per_device_train_batch_size x processes x gradient_accumulation_steps = {recipe.samples_per_update} (samples), "
        f"steps_per_generation = {recipe.updates_per_epoch} x gradient_accumulation_steps (it follows from the others), "
        f"num_iterations={recipe.update.epochs}, "
        f"max_steps={recipe.policy_updates} (optimizer steps)"
    )


def _prime_rl(recipe: Recipe) -> str:
    if recipe.updates_per_step > 1:
        return (
            f"no equivalent: it makes one update of each batch, and here a step of {recipe.samples_per_step} samples makes "
            f"{recipe.updates_per_step}"
        )
    return f"batch_size={recipe.samples_per_step} (rollouts), rollouts_per_example={recipe.samples_per_prompt}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


# --- learning rate and checkpoints -----------------------------------------------------------------------------------
def rate_lines(recipe: Recipe) -> list[str]:
    """Return the peak rate with its reason, the schedule, and its values on the way, by optimizer steps counted from 1."""
    total = recipe.policy_updates
    settings = recipe.optimizer
    warmup = settings.warmup(total)
    warm = f"{warmup} warm-up steps" if warmup else "no warm-up"
    shape: str = settings.schedule
    if shape == "wsd":
        shape = f"wsd, falling in the last {settings.decay_share:.0%},"
    lines = [f"learning rate {recipe.lr:g}: {_reason(recipe)}; {shape} over {total} optimizer steps, {warm}"]
    usual = default_rate(recipe.loop, adapter=recipe.adapter.kind != "none")
    if recipe.lr >= _FAR * usual and settings.kind != "python":
        times = f"{recipe.lr / usual:,.0f}" if recipe.lr < 1e9 * usual else f"{recipe.lr / usual:.0e}"
        lines.append(f"warning: optimizer.lr is {times} times the default ({usual:.0e}); is that what is meant?")
    if recipe.optimizer.lr is not None and recipe.lr <= usual / _LOW and settings.kind != "python":
        kind = "adapters" if recipe.adapter.kind != "none" else "full training"
        lines.append(
            f"warning: optimizer.lr = {recipe.lr:g} is far below the default of {kind} ({usual:.0e}): a run of {total} optimizer "
            f"steps may show no effect; leave optimizer.lr out, or set it to about {usual:.0e} or more"
        )
    if warmup or settings.schedule != "constant":
        quarters = (warmup + (total - warmup) * quarter // 4 for quarter in (1, 2, 3))
        marks = sorted(mark for mark in {1, warmup, total, *quarters} if 1 <= mark <= total)
        rates = (f"{learning_rate(settings, recipe.lr, mark - 1, total):.3g} at {mark}" for mark in marks)
        lines.append(f"on the way: {', '.join(rates)}")
    if recipe.algorithm.critic is not None:
        lines.append(
            f"critic: learning rate {recipe.algorithm.critic.lr:g} (algorithm.critic.lr), on the policy's schedule"
        )
    return lines


def checkpoint_lines(recipe: Recipe) -> list[str]:
    """Return the steps after which the run saves, and what it keeps."""
    every, last = recipe.save.every, recipe.steps
    marks = range(every, last, every)
    shown = [*marks, last] if len(marks) < _SHOWN else [*marks[:3], "…", marks[-1], last]
    steps = map(str, shown)
    best = f", and the best {recipe.save.keep_best}" if recipe.save.keep_best else ""
    return [f"will save at steps {', '.join(steps)} (last); the newest {recipe.save.keep_last} are kept{best}"]


def _reason(recipe: Recipe) -> str:
    if recipe.optimizer.lr is not None:
        return "set by optimizer.lr"
    adapter = recipe.adapter.kind != "none"
    other = default_rate(recipe.loop, adapter=not adapter)
    kind, rest = ("adapters", "full training") if adapter else ("full training", "adapters")
    loop = "SFT" if recipe.loop == "sft" else "RL"
    return f"the default of {kind} in {loop} ({rest}: {other:.0e})"

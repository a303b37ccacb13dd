"""Checks that Lockstep computes a model's family as plain transformers does, on a small random copy of the model.

A family may mix tokens in another way than its layout says, or need positions, masks or heads that are not passed to it. It
would then train and sample wrongly without an error. So each start computes, on the CPU in fp32: one sequence, two sequences
packed into one, two replies to one prompt, and what the engine scores and samples. Each result must be that of transformers
within rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError, ModelError
from lockstep.learner.learner import hidden_states, plain_logprobs
from lockstep.learner.packing import number_tokens, streams
from lockstep.models.attention import NAME as ATTENTION
from lockstep.models.attention import require_packable
from lockstep.models.decoder import context_of
from lockstep.models.heads import head_of, token_logprobs
from lockstep.models.small import CONTEXT, random_model, small_config
from lockstep.models.states import state_layers
from lockstep.rollout.native import NativeEngine
from lockstep.text import reason_of
from lockstep.types import Request, Sampling, TokenIds, TrainSequence

TOLERANCE = 3e-4
"""Nats between two implementations of the same weights in fp32, at most: thirty times the most that rounding does."""
SAMPLED = 4
"""Tokens of a reply that the engine draws."""
ASIDE = ("_name_or_path", "dtype", "architectures")
"""Settings that change nothing here."""
CHOOSE = "choose a model of a family that docs/models.md lists as supported"
_passed: dict[str, float] = {}
"""Structures that this process has found right, each with the largest difference in nats."""


def require_family(kind: type[nn.Module], config: Any) -> float:
    """Raise ModelError, naming the family and the check, unless models of this class and config are computed rightly here.

    Returns the largest difference from plain transformers, in nats a token.
    A structure that passed is not asked again in this process.
    """
    try:
        return _largest_gap(kind, config)
    except ModelError as error:
        if wrong := _wrong_window(config):  # the family is not what is wrong
            raise ModelError(
                f"config.json says sliding_window = {wrong}",
                where="model.path",
                fix="set sliding_window in config.json to the window that the model was trained with; without one, to null, and "
                "every entry of layer_types to full_attention",
            ) from error
        raise


def _wrong_window(config: Any) -> str:
    """Return the window of a config of which no model can be made, with the reason; empty if it is a usual one."""
    text = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None) or ()
    if not window and "sliding_attention" in kinds:
        return f"{'null' if window is None else window}, but layer_types has sliding_attention layers"
    return "0, in which a token would not see even itself" if window == 0 and not kinds else ""


def _largest_gap(kind: type[nn.Module], config: Any) -> float:
    """Return the largest difference from plain transformers. Raises ModelError as `require_family` does."""
    family = f"{config.model_type} ({kind.__name__})"
    try:
        small = small_config(config)
        words = {name: value for name, value in small.to_dict().items() if name not in ASIDE}
        if (key := f"{family} {json.dumps(words, sort_keys=True, default=str)}") in _passed:
            return _passed[key]
        plain: Any = random_model(kind, small, "eager")
        require_packable(plain)
        length = min(context_of(small) or CONTEXT, CONTEXT // 2)
        a, b = _ids(length, 1), _ids(length // 2, 2)
        expected = {ids: _plain(plain, ids) for ids in (a, b, (*b, *a[: length // 3]), (*b, *a[3 : length // 2]))}
    except ModelError:
        raise
    except Exception as error:  # a config may be wrong in any way, and a family may need what a small copy lacks
        what = f"plain transformers cannot build and run a small copy of {family}, so its computation here cannot be checked"
        raise ModelError(f"{what}: {_one_line(error)}", where="model.path", fix=CHOOSE) from error
    try:
        ours = random_model(kind, small, ATTENTION)
        ours.load_state_dict(plain.state_dict())
        largest = 0.0
        for check, found, wanted in _checks(ours, plain, expected):
            gap = float((torch.tensor(found, dtype=torch.float64) - wanted).abs().max())
            if not gap <= TOLERANCE:
                raise ModelError(
                    f"{family} is not computed as transformers does it: {check} is off by {gap:.2g} nats{_missing(plain)}",
                    where="model.path",
                    fix=CHOOSE,
                )
            largest = max(largest, gap)
    except ModelError:
        raise
    except Exception as error:  # whatever a layer makes of streams that it was not written for
        raise ModelError(
            f"{family} cannot be computed on packed sequences: {_one_line(error)}{_missing(plain)}",
            where="model.path",
            fix=CHOOSE,
        ) from error
    _passed[key] = largest
    return largest


@torch.no_grad()
def _checks(
    ours: nn.Module, plain: nn.Module, expected: dict[TokenIds, Tensor]
) -> Iterator[tuple[str, Sequence[float], Tensor]]:
    """Yield each check's name, what was computed here, and by transformers."""
    a, b, *replies = expected
    budget = sum(map(len, expected))
    yield "one sequence", plain_logprobs(ours, [a], budget)[0], expected[a]
    for ids, found in zip((b, a), plain_logprobs(ours, [b, a], budget), strict=True):
        yield "one of two packed sequences", found, expected[ids]
    for ids, found in zip(replies, _sharing(ours, b, replies), strict=True):
        yield "one of two replies that share a prompt", found, expected[ids][len(b) - 1 :]
    engine = NativeEngine(ours, slots=2, stop_ids=frozenset(), decode=str)
    engine.load(iter(()), 0)
    for ids, found in zip((a, b), engine.score([a, b]), strict=True):
        yield "what the engine scores", found, expected[ids]
    sampling = Sampling(SAMPLED, ignore_eos=True)
    prompts = (b, b, a[: len(a) - SAMPLED])
    engine.submit([Request(str(i), ids, str(len(ids)), i, sampling, 0) for i, ids in enumerate(prompts)])
    for done in engine.completed():
        ids = (*done.request.prompt_ids, *done.ids)
        yield "what the engine samples", done.logprobs, _plain(plain, ids)[-SAMPLED:]


def _sharing(model: Any, prompt: TokenIds, whole: Sequence[TokenIds]) -> list[tuple[float, ...]]:
    """Log-probabilities of what follows a prompt that is processed once."""
    replies = [ids[len(prompt) :] for ids in whole]
    none = [(0.0,) * len(reply) for reply in replies]
    sequences = [
        TrainSequence(prompt, reply, (True,) * len(reply), zeros, zeros, 0.0, 0)
        for reply, zeros in zip(replies, none, strict=True)
    ]
    packed = streams(sequences, sum(map(len, whole)), share_prompts=True, device=torch.device("cpu"))
    decoder, head = model.get_decoder(), head_of(model)
    return number_tokens(
        sequences,
        packed,
        lambda one: token_logprobs(head, hidden_states(decoder, one), one.targets_R, entropy=False)[0],
    )


@torch.no_grad()
def _plain(model: Any, ids: TokenIds) -> Tensor:
    """Log-probability of every token but the first, by transformers' own forward pass."""
    ids_1T = torch.tensor([ids])
    logprobs_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    chosen_T: Tensor = logprobs_TV.gather(-1, ids_1T[0, 1:, None])[:, 0]
    return chosen_T


def _ids(count: int, seed: int) -> TokenIds:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 256, (count,), generator=generator).tolist())


def _missing(model: Any) -> str:
    """Return what the structure of a refused model lacks; empty if that cannot be told."""
    config = model.config.get_text_config()
    if getattr(config, "is_decoder", None) is False and hasattr(config, "type_vocab_size"):
        return "; it is an encoder, whose tokens see later ones unless config.is_decoder is set"
    if state_layers(model):
        return f"; its layers with a state ({type(state_layers(model)[0]).__name__}) are not told where sequences begin"
    if not getattr(model, "_supports_attention_backend", False):
        return "; its attention is not one of transformers' registry, which is told where sequences begin"
    return ""


def _one_line(error: Exception) -> str:
    if isinstance(error, LockstepError):
        return error.what
    return reason_of(error)

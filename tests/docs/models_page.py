"""The table of families in docs/models.md, from what is computed for each of them.

`python -m tests.docs.models_page` writes it anew (some minutes on one core).
"""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lockstep.config.adapter import Lora
from lockstep.errors import LockstepError, ModelError
from lockstep.learner.adapter_targets import choose_targets
from lockstep.learner.adapters import attach
from lockstep.learner.merge import merged_weights
from lockstep.models.decoder import even_heads
from lockstep.models.gguf_facts import FAMILIES as GGUF
from lockstep.models.load import quiet
from lockstep.models.routing import Routing
from lockstep.models.small import random_model, small_config
from lockstep.models.states import state_layers
from lockstep.plan.family import require_family
from lockstep.rollout.paged.forms import FAMILIES as FUSED
from lockstep.rollout.vllm.layout import MIXTURES
from tests.plan.test_family import UNSAID

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_TABLE = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end of families -->)", re.DOTALL)
_REFUSED = re.compile(r"(?<=<!-- refused -->\n).*?(?=<!-- end of refused -->)", re.DOTALL)
HEAD = (
    "| family | what it has | learner and engine | decoding fused | adapters, auto | on experts | folder, GGUF "
    "| vLLM | replay |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
IDS = torch.arange(3, 30)[None]


def names() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default(family: str) -> Any:
    """The model of a family on the meta device, as transformers' defaults or published models describe it."""
    config = CONFIG_MAPPING[family](**UNSAID.get(family, {}))
    with quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def row(family: str) -> str:
    """A line of the table. Raises ModelError for a family that is refused."""
    try:
        model = default(family)
    except Exception as error:
        raise ModelError(f"transformers makes no model of its defaults ({type(error).__name__})") from error
    gap = require_family(type(model), model.config)
    small = random_model(type(model), small_config(model.config), "eager")
    experts = any(".experts." in name for name, _ in small.named_parameters())
    cells = (
        family,
        ", ".join(_has(model, small, experts)) or "–",
        f"within {next((f'1e-{n}' for n in (5, 4) if gap <= 10.0**-n), '3e-4')}",
        "yes" if model.config.get_text_config().model_type in FUSED else "no",
        _targets(small),
        _adapted(small) if experts else "–",
        f"{_saved(small)}{', yes' if model.config.model_type in GGUF else ', no'}",
        "refused" if (experts and family not in MIXTURES) or even_heads(small) == (0, 0) else "by name",
        _replayed(small) if experts else "–",
    )
    return "| " + " | ".join(cells) + " |\n"


def _targets(small: Any) -> str:
    """The layers that adapters get of their own accord; there are none in families written with Conv1D, which train in full."""
    try:
        layers = choose_targets(small, "auto").layers
    except ModelError:
        return "none"
    return ", ".join(sorted({name.rsplit(".", 1)[-1] for name in layers}))


def _has(model: Any, small: Any, experts: bool) -> list[str]:
    """What of a family's structure a plain decoder has not."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) and (not kinds or "sliding_attention" in kinds)
    found = {
        "experts": experts,
        "windows": window,
        "caps": getattr(config, "attn_logit_softcapping", None),
        "sinks": any(name.endswith(("sinks", "sink")) for name, _ in small.named_parameters()),
        "latent attention": getattr(config, "kv_lora_rank", None),
        "heads that differ": getattr(config, "is_heterogeneous", False),
        "states": state_layers(small),
    }
    return [name for name, there in found.items() if there]


@torch.no_grad()
def _saved(small: Any) -> str:
    """Whether a copy that was saved and loaded again says the same."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            small.save_pretrained(folder)
            again = type(small).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        except Exception:
            return "no"
        one, other = small(IDS, use_cache=False).logits, again(IDS, use_cache=False).logits
        same = torch.allclose(
            one, other, rtol=0, atol=1e-5
        )  # how a product adds may depend on where its numbers are in memory
    return "yes" if same else "no"


@torch.no_grad()
def _adapted(small: Any) -> str:
    """Whether experts may have adapters, and the model with these merged into its weights says the same."""
    merged, draw = copy.deepcopy(small), torch.Generator().manual_seed(1)
    try:
        model = attach(copy.deepcopy(small), Lora(rank=2, expert_rank=2), 0)
    except ModelError:
        return "no"
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1, generator=draw)
    merged.load_state_dict(dict(merged_weights(model)), strict=False)
    said = [one(IDS, use_cache=False).logits for one in (model, merged, small)]
    assert float((said[0] - said[2]).abs().mean()) > 1e-2, "the adapters changed nothing"
    return "yes" if float((said[0] - said[1]).abs().mean()) < 1e-4 else "no"  # on average: rounding moves a few more


@torch.no_grad()
def _replayed(small: Any) -> str:
    """Whether its routers can be recorded, and give the same when they are told what they chose."""
    try:
        routing = Routing.of(small)
        routing.begin(None, recording=True)
        logits = small(IDS, use_cache=False).logits
        taken = torch.from_numpy(routing.taken(IDS.shape[1]).astype("int64"))
        routing.begin(taken, recording=False)
        same = torch.equal(small(IDS, use_cache=False).logits, logits)
    except (LockstepError, KeyError):
        return "no"
    return "yes" if same else "no"


def tables(families: list[str]) -> tuple[str, str]:
    """The table of those that are served, and the list of those that are refused with the reason."""
    served, refused = HEAD, "| family | why it is refused |\n| --- | --- |\n"
    for family in families:
        try:
            served += row(family)
        except ModelError as error:
            refused += f"| {family} | {reason(error)} |\n"
    return served, refused


def reason(error: ModelError) -> str:
    """The reason without numbers that differ from machine to machine."""
    text = re.sub(r"is off by [\d.e-]+ nats", "is off", error.what).replace("|", "/")
    text = re.sub(r"^.*? \(\w+\) (?=is not computed|cannot be)", "", text)
    return text if len(text) <= 160 else f"{text[:157]}…"


def write() -> None:
    served, refused = tables(names())
    text = _TABLE.sub(lambda _: served, PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(_REFUSED.sub(lambda _: refused, text), encoding="utf-8")


def shown() -> tuple[str, str]:
    """What the page has."""
    text = PAGE.read_text(encoding="utf-8")
    found = _TABLE.search(text), _REFUSED.search(text)
    assert found[0] is not None
    assert found[1] is not None
    return found[0].group(), found[1].group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()

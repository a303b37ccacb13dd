"""Reads checkpoints with MXFP4 weights (gpt-oss): dequantised to one dtype, expert by expert, or in their stored form.

Such a checkpoint stores a parameter X of shape [experts, inputs, outputs] as X_blocks, uint8 [experts, outputs, inputs / 32, 16],
and X_scales, uint8 [experts, outputs, inputs / 32]. A byte holds two E2M1 codes, the earlier number in its low four bits; a scale
s stands for 2^(s - 127) and belongs to 32 numbers along the inputs (OCP Microscaling Formats v1.0; the layout is that of
transformers.integrations.mxfp4). E2M1 times a power of two is exact in bf16 and fp32: nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ModelError
from lockstep.models.folder import INDEX, MXFP4, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lockstep.types import WeightStream

BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS = 32
"""Numbers in one block."""
NAN_SCALE = 255
LARGEST_SCALE = 128
"""Largest scale of weights that are kept in MXFP4: 2^1. Models have scales of about 2^-8."""
_SHARD = re.compile(r"[^/\\]+\.safetensors")


def is_mxfp4(folder: Path) -> bool:
    """Return whether the model's config says that its weights are stored in MXFP4."""
    quantization = read_json(folder / "config.json").get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == MXFP4


@dataclass(frozen=True, slots=True)
class Packed:
    """One parameter [experts, inputs, outputs] in MXFP4, as tensor cores take it: 4.5 bits a number.

    Inputs come in steps of 64, or of 32 where 64 does not divide them. A thread of a matrix instruction needs the codes of bytes
    t, t + 4, t + 8, and t + 12 of a block: they are one word. Its low half has the numbers in the low bits of these bytes, its
    high half those in the high bits. Shifted by 0, 3, or 6 to the left, a half has the sign of the first, second, or third
    number where bf16 has it, and its other bits as the lowest of the exponent and the highest of the mantissa: 2^-126 times the
    number. The fourth number's bits are in the four places that are left.
    """

    words: Tensor
    """int32 [experts, steps, outputs, 4 a block]."""
    powers: Tensor
    """int16 [experts, steps, outputs, blocks]: the bits of 2^126 times the scales in bf16."""

    @staticmethod
    def of(blocks: Tensor, scales: Tensor) -> Packed:
        """Rearrange a stored parameter: uint8 [experts, outputs, inputs / 32, 16] and [experts, outputs, inputs / 32]."""
        import torch

        experts, outputs, count, _ = blocks.shape
        each = 2 - count % 2
        words = torch.empty(experts, count // each, outputs, 4 * each, dtype=torch.int32, device=blocks.device)
        for expert in range(experts):
            words[expert] = _words(blocks[expert]).view(outputs, count // each, 4 * each).transpose(0, 1)
        powers = (scales.int() + 126 << 7).to(torch.int16).view(experts, outputs, count // each, each)
        return Packed(words, powers.transpose(1, 2).contiguous())

    @property
    def experts(self) -> int:
        return len(self.words)

    @property
    def steps(self) -> int:
        return self.words.shape[1]

    @property
    def outputs(self) -> int:
        return self.words.shape[2]

    @property
    def depth(self) -> int:
        """Inputs of a step."""
        return 8 * self.words.shape[3]

    @property
    def inputs(self) -> int:
        return self.steps * self.depth

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's matrix [inputs, outputs]."""
        import torch

        word = self.words[expert]
        first, second, third = (word << shift & FIRST for shift in (0, 3, 6))
        fourth = (word << 1 & SIGN) | (word >> 3 & EXPONENT) | (word >> 7 & MANTISSA)
        numbers = torch.stack([first, second, third, fourth], -1).view(torch.bfloat16).float()
        blocks = numbers.view(self.steps, self.outputs, -1, 4, 4, 2)  # of a block: word, number of a half, half
        blocks *= self.powers[expert].view(torch.bfloat16).float()[..., None, None, None]
        return blocks.permute(0, 2, 4, 3, 5, 1).reshape(self.inputs, self.outputs).to(dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the parameter, made one expert at a time."""
        import torch

        result = torch.empty(self.experts, self.inputs, self.outputs, dtype=dtype, device=self.words.device)
        for expert in range(self.experts):
            result[expert] = self.matrix(expert, dtype)
        return result


FIRST, SIGN, EXPONENT, MANTISSA = 0x81C081C0 - (1 << 32), 0x80008000 - (1 << 32), 0x01800180, 0x00400040
"""Bits of the first number of both halves of a word of type int32: all, its sign, its exponent, its mantissa."""


def _words(blocks_ORG: Tensor) -> Tensor:
    """Return the words of blocks [..., 16], int32 [..., 4]."""
    fours = blocks_ORG.int().view(*blocks_ORG.shape[:-1], 4, 4).unbind(-2)
    low, high = (
        (c[0] & 8) << 12 | (c[0] & 7) << 6 | (c[1] & 8) << 9 | (c[1] & 7) << 3 | (c[2] & 8) << 6 | (c[2] & 7)
        | (c[3] & 8) << 11 | (c[3] & 6) << 9 | (c[3] & 1) << 13
        for c in ([one & 15 for one in fours], [one >> 4 for one in fours])
    )  # fmt: skip
    words: Tensor = low | high << 16
    return words


def read_weights(folder: Path, dtype: torch.dtype) -> WeightStream:
    """Yield every parameter of a checkpoint once, on the CPU, in `dtype`; for each MXFP4 weight a zero that takes no memory.

    Raises ModelError for blocks without scales, or another layout.
    """
    import torch

    with ExitStack() as stack:
        places = _places(folder, stack)
        for name in sorted(places):
            base = name.removesuffix(BLOCKS)
            if name.endswith(BLOCKS) and base + SCALES in places:
                _check_layout(base, places)
                experts, outputs, blocks, _ = places[name].get_slice(name).get_shape()
                yield base, torch.zeros((), dtype=dtype).expand(experts, blocks * NUMBERS, outputs)
            elif name.endswith(BLOCKS) or (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS not in places):
                raise ModelError(
                    "an MXFP4 weight is incomplete: its blocks or its scales are missing",
                    where=name,
                    fix="fetch the model again",
                )
            elif not name.endswith(SCALES):
                yield name, places[name].get_tensor(name).to(dtype)


def read_dense(folder: Path, dtype: torch.dtype, device: torch.device | str) -> WeightStream:
    """Yield each parameter that is stored in MXFP4, dequantised on `device`, in `dtype`.

    Only one expert is in memory besides what was yielded. Raises ModelError for a scale that is NaN or too large for `dtype`.
    """
    with ExitStack() as stack:
        places = _places(folder, stack)
        for name in sorted(places):
            if name.endswith(BLOCKS):
                base = name.removesuffix(BLOCKS)
                yield base, _read(base, places, dtype, device)


def read_packed(folder: Path, device: torch.device | str) -> dict[str, Packed]:
    """Return the parameters that are stored in MXFP4. Raises ModelError for a scale that is NaN or too large."""
    with ExitStack() as stack:
        places, found = _places(folder, stack), {}
        for name in sorted(places):
            base = name.removesuffix(BLOCKS)
            if name.endswith(BLOCKS):
                scales = _scales(base, places)
                if (scales > LARGEST_SCALE).any():
                    raise ModelError(
                        f"one scale is {int(scales.max())}, but weights can stay in MXFP4 only up to {LARGEST_SCALE}",
                        where=base + SCALES,
                        fix="set adapter.base=full",
                    )
                found[base] = Packed.of(places[name].get_tensor(name).to(device), scales.to(device))
        return found


def dense_weights(model: nn.Module) -> WeightStream:
    """Yield a model's weights; parameters that are kept in MXFP4 have the names and values of their dense form."""

    from lockstep.models.weights import named_weights

    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    waiting: dict[str, Tensor] = {}
    for name, tensor in named_weights(model):
        base = name.removesuffix(BLOCKS).removesuffix(SCALES)
        if base == name or tensor.is_floating_point():
            yield name, tensor
        elif base not in waiting:
            waiting[base] = tensor
        else:
            powers, words = sorted((waiting.pop(base), tensor), key=lambda one: one.itemsize)
            yield base, Packed(words, powers).dense(dtype)


def dequantise(blocks_ORG: Tensor, scales_OR: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one matrix [inputs, outputs] from uint8 blocks [outputs, R, 16] and scales [outputs, R], R = inputs / 32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    matrix: Tensor = convert_moe_packed_tensors(blocks_ORG[None], scales_OR[None], dtype=dtype)[0]
    return matrix


def _places(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Open a checkpoint's files; returns the file of each tensor."""
    from safetensors import SafetensorError, safe_open

    places: dict[str, Any] = {}
    for path in _files(folder):
        try:
            file: Any = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"the weight file cannot be read: {error}", where=str(path), fix="fetch the model again"
            ) from error
        places |= dict.fromkeys(file.keys(), file)
    return places


def _check_layout(name: str, places: dict[str, Any]) -> None:
    stored, scales = (places[name + part].get_slice(name + part) for part in (BLOCKS, SCALES))
    shape, kinds = list(stored.get_shape()), {stored.get_dtype(), scales.get_dtype()}
    if kinds != {"U8"} or len(shape) != 4 or shape[3] * 2 != NUMBERS or list(scales.get_shape()) != shape[:3]:
        raise ModelError(
            f"the blocks are {stored.get_dtype()} {shape} and the scales {scales.get_dtype()} {list(scales.get_shape())}, but "
            "U8 [experts, outputs, inputs / 32, 16] and [experts, outputs, inputs / 32] were expected",
            where=name,
            fix="dequantise the model into a folder with the tool that wrote it",
        )


def _scales(name: str, places: dict[str, Any]) -> Tensor:
    scales: Tensor = places[name + SCALES].get_tensor(name + SCALES)
    if (scales == NAN_SCALE).any():
        raise ModelError("an MXFP4 scale is NaN", where=name + SCALES, fix="fetch the model again")
    return scales


def _read(name: str, places: dict[str, Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Read the parameter [experts, inputs, outputs], one expert at a time."""
    import torch

    stored, scales = places[name + BLOCKS].get_slice(name + BLOCKS), _scales(name, places)
    experts, outputs, blocks, _ = stored.get_shape()
    result = torch.empty(experts, blocks * NUMBERS, outputs, dtype=dtype, device=device)
    for expert in range(experts):
        result[expert] = dequantise(stored[expert : expert + 1][0].to(device), scales[expert].to(device), dtype)
        if not result[expert].isfinite().all():  # expert by expert: the check makes copies
            raise ModelError(f"a dequantised weight is too large for {dtype}", where=name, fix="fetch the model again")
    return result


def _files(folder: Path) -> Iterator[Path]:
    if not (folder / INDEX).is_file():
        yield folder / "model.safetensors"
        return
    for shard in sorted(set(read_json(folder / INDEX)["weight_map"].values())):
        if not _SHARD.fullmatch(shard):
            raise ModelError(
                f"{shard!r} is not a valid name of a weight file",
                where=str(folder / INDEX),
                fix="fetch the model again",
            )
        yield folder / shard

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import SyncError
from lockstep.sync.fingerprint import (
    BLOCK,
    KEY_A,
    KEY_B,
    Fingerprinter,
    dtype_name,
    fingerprint,
    identify,
    splitmix64,
)

MASK = (1 << 64) - 1
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]


def brute_force(tensor: Tensor) -> int:
    """The definition, one element at a time, in Python's integers."""
    size = tensor.element_size()
    bits = tensor.contiguous().view(INTEGERS[size]).flatten().tolist()
    a = [splitmix64(KEY_A, j) | 1 for j in range(min(BLOCK, len(bits)))]
    total = 0
    for i, value in enumerate(bits):
        b = splitmix64(KEY_B, i // BLOCK) | 1
        value ^= (value % 2**64 >> 32) if size == 8 and i else 0
        total += (value % (1 << 8 * size) + 1) * a[i % BLOCK] * b
    return total & MASK


def print_of(tensor: Tensor, name: str = "w") -> int:
    return fingerprint(iter([(name, tensor)])).tensors[name].value


def defined(tensor: Tensor, name: str = "w") -> int:
    return identify(name, dtype_name(tensor), tuple(tensor.shape), brute_force(tensor))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every bit random: NaNs, infinities and denormals included."""
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def test_splitmix64_is_the_published_generator():
    # the first outputs for seed 1234567 in Vigna's reference implementation
    assert [splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 5), (33, 17), (3, 5, 7), (4096,), (3, 4096), (2, 5000), (9001,)])
def test_it_is_the_sum_of_its_definition(shape: tuple[int, ...], dtype: torch.dtype):
    tensor = random_tensor(shape, dtype)
    assert print_of(tensor) == defined(tensor)


def test_numbers_among_other_tensors_have_the_fingerprints_that_they_have_alone():
    shapes: list[tuple[int, ...]] = [(), (3,), (1,), (1, 1), (17,)]
    named = {f"{shape} {dtype}": random_tensor(shape, dtype, 3) for shape in shapes for dtype in DTYPES}
    named["trained"] = torch.nn.Parameter(torch.tensor([0.5]))
    found = fingerprint(iter(named.items())).tensors
    assert {name: one.value for name, one in found.items()} == {name: defined(t, name) for name, t in named.items()}


def test_many_blocks_go_through_the_buffer_in_chunks():
    tensor = random_tensor((70 * BLOCK + 123,), torch.bfloat16)
    assert print_of(tensor) == defined(tensor)


def test_the_identity_is_pinned():
    """Checkpoints and scores of other runs carry these numbers: the definition must never change."""
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert f"{brute_force(tensor):016x}" == "7c65c0a293e4cc10"
    assert f"{print_of(tensor):016x}" == f"{defined(tensor):016x}" == "62800415c075a758"
    assert fingerprint(iter([("w", tensor)])).combined == "0f5325c57e0dc297"


@given(st.data())
def test_any_number_of_elements_is_summed(data: st.DataObject):
    count = data.draw(st.integers(0, 3 * BLOCK + 5))
    tensor = random_tensor((count,), data.draw(st.sampled_from(DTYPES)), seed=count)
    assert print_of(tensor) == defined(tensor)


@given(st.data())
def test_any_single_flipped_bit_changes_it(data: st.DataObject):
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.uint8]))
    tensor = random_tensor((3, 3000), dtype, seed=1)
    before = print_of(tensor)
    element = data.draw(st.integers(0, tensor.numel() - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    bits = tensor.view(torch.uint8).view(-1)
    bits[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    assert print_of(tensor) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_flipped_signs_do_not_cancel(dtype: torch.dtype):
    """Of 8-byte elements, the highest bit times an odd number is 2^63 wherever it is: pairs of them would be nothing."""
    size = dtype.itemsize
    tensor = random_tensor((3, 2000), dtype)
    prints = {print_of(tensor)}
    for count in (2, 4, 6000):
        for high in range(2):
            flipped = tensor.clone()
            bits = flipped.view(INTEGERS[size]).view(-1)[:count]
            bits ^= -(1 << 8 * size - 1) if high == 0 else 1 << 8 * size - 2
            prints.add(print_of(flipped))
    assert len(prints) == 7


def test_a_single_number_in_fp64_keeps_its_fingerprint():
    """The scalings of adapters, in the proofs of other versions."""
    assert f"{print_of(torch.tensor([2.0], dtype=torch.float64), 'x.lora_scaling'):016x}" == "a540a88857d24e8b"


def test_position_is_part_of_it():
    square = random_tensor((64, 64), torch.bfloat16)
    wide = random_tensor((5, BLOCK), torch.bfloat16)  # rows as long as a block: a row swap exchanges whole blocks
    assert print_of(square.T) != print_of(square)
    for tensor in (square, wide):
        for one, other in ((0, 1), (1, 4), (3, 2)):
            swapped = tensor.clone()
            swapped[[one, other]] = tensor[[other, one]]
            assert print_of(swapped) != print_of(tensor)
    assert print_of(square.roll(1)) != print_of(square)


def test_a_permutation_of_equal_looking_blocks_is_seen():
    ones = torch.ones(4, BLOCK)
    ones[2] = 2.0
    moved = torch.ones(4, BLOCK)
    moved[1] = 2.0
    assert print_of(ones) != print_of(moved)


def test_name_dtype_and_shape_are_part_of_it():
    tensor = torch.zeros(4, 6)
    values = {
        print_of(tensor, "a"),
        print_of(tensor, "b"),
        print_of(tensor.view(6, 4), "a"),
        print_of(tensor.view(24), "a"),
        print_of(tensor.view(torch.int32), "a"),
        print_of(torch.zeros(4, 6, dtype=torch.bfloat16), "a"),
    }
    assert len(values) == 6
    assert print_of(tensor, "a") == defined(tensor, "a")


def test_views_are_read_in_row_major_order():
    tensor = random_tensor((50, 70), torch.bfloat16)
    for view in (tensor.T, tensor[::3], tensor[:, 5:20], tensor[10:, ::7]):
        assert print_of(view) == print_of(view.contiguous())


def test_tables_made_in_inference_mode_serve_outside_it():
    tensor = random_tensor((5000,), torch.float32)
    with torch.inference_mode():
        inside = print_of(tensor.clone())
    assert print_of(tensor) == inside
    assert print_of(torch.nn.Parameter(torch.zeros(5000))) == defined(torch.zeros(5000))


def test_all_tensors_together_do_not_depend_on_their_order():
    pairs = [(f"layer.{i}", random_tensor((i, 9), torch.bfloat16, i)) for i in range(1, 20)]
    first = fingerprint(iter(pairs))
    random.Random(0).shuffle(pairs)
    second = fingerprint(iter(pairs))
    assert first == second
    assert first.bytes == sum(tensor.nbytes for _, tensor in pairs)
    pairs[0][1].view(torch.int16)[0, 0] ^= 1
    third = fingerprint(iter(pairs))
    assert third.combined != first.combined
    assert third.changed_since(first) == 1
    assert fingerprint(iter(pairs[1:])).changed_since(third) == 1


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.complex64), torch.eye(3).to_sparse()],
    ids=["meta", "complex", "sparse"],
)
def test_what_has_no_plain_bits_is_refused(tensor: Tensor):
    with pytest.raises(SyncError, match="cannot fingerprint"):
        print_of(tensor)


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(SyncError, match="a twice"):
        fingerprint(iter([("a", torch.zeros(1)), ("a", torch.ones(1))]))


def test_a_frozen_name_that_comes_twice_is_refused_though_it_is_known():
    base, reader = torch.ones(4), Fingerprinter(frozenset({"base"}))
    reader.read(iter([("base", base)]))
    for other in (base, base + 1):
        with pytest.raises(SyncError, match="base twice"):
            reader.read(iter([("base", base), ("base", other)]))


def test_frozen_tensors_are_read_only_when_told():
    base, adapter = torch.ones(4), torch.zeros(4)
    reader = Fingerprinter(frozenset({"base"}))
    first = reader.read(iter([("base", base), ("adapter", adapter)]))
    base.data[0] = 5.0  # past torch's counter of changes
    adapter[0] = 1.0
    second = reader.read(iter([("base", base), ("adapter", adapter)]))
    assert second.tensors["base"] == first.tensors["base"]
    assert second.changed_since(first) == 1
    assert reader.thawed == ()
    reader.refresh_frozen()
    third = reader.read(iter([("base", base), ("adapter", adapter)]))
    assert third.changed_since(second) == 1
    assert reader.thawed == ("base",)


def test_a_frozen_tensor_changed_in_place_or_replaced_is_seen_at_once():
    for change in ("in place", "replaced"):
        base = torch.ones(4)
        reader = Fingerprinter(frozenset({"base"}))
        first = reader.read(iter([("base", base)]))
        other = base.add_(1) if change == "in place" else torch.zeros(4)
        assert reader.read(iter([("base", other)])).changed_since(first) == 1
        assert reader.thawed == ("base",)


def test_a_frozen_name_that_does_not_exist_is_refused():
    with pytest.raises(SyncError, match="the first is basee"):
        Fingerprinter(frozenset({"basee"})).read(iter([("base", torch.ones(4))]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_same_numbers(dtype: torch.dtype):
    tensor = random_tensor((4101, 4097), dtype)
    assert print_of(tensor.cuda()) == print_of(tensor)
    assert print_of(tensor.cuda()[:, 1000:2000]) == print_of(tensor[:, 1000:2000])

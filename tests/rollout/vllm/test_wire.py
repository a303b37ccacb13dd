"""Messages and buckets between two processes."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import EngineError
from lockstep.rollout.vllm import bucket, wire
from lockstep.types import Forward, ForwardReport, NormNoise, Sampling

MESSAGES: tuple[wire.Message, ...] = (
    wire.Submit(
        (wire.Row(3, "a\u00e9", "g", 0, 0, 2**62, 7, 1),), (Sampling(5, 0.3, 4, 0.9, 0.1, ("\n\n", "x"), True),), (9,)
    ),
    wire.Score((3, 0)),
    wire.Load(4),
    wire.Open("", 10, ("bytes:00ff", "int:3", "flag:1")),
    wire.Take((wire.Part("w", "bfloat16", (2, 3), 256), wire.Part("s", "float64", (), 0))),
    wire.Loaded(),
    wire.Fingerprint(),
    wire.Send(("a", "b")),
    wire.Sleep(),
    wire.Wake(),
    wire.Compute(Forward("mxfp4-w4a4", NormNoise(0.01, 2**62 + 1, ("a.weight", "b.weight"), (1.0, 0.5)))),
    wire.Computing(ForwardReport(14, 2, 0.01, 0.25)),
    wire.Close(),
    wire.Ready(1.5),
    wire.Done(),
    wire.Completions((wire.Finished(3, 2, "stop", 4),)),
    wire.Scores((2, 0)),
    wire.Prints((wire.Print("w", "ffffffffffffffff", "bfloat16", (2, 3), 12),)),
    wire.Tensor(wire.Part("w", "float32", (1,), 0)),
    wire.Failed("EngineError", "what", "where", "fix"),
)


def pair() -> tuple[wire.Channel, wire.Channel]:
    one, other = socket.socketpair()
    return wire.Channel(one), wire.Channel(other)


def test_every_message_arrives_as_it_was_sent():
    ours, theirs = pair()
    assert {type(message) for message in MESSAGES} == set(wire.KINDS.values())
    for message in MESSAGES:
        ours.send(message, b"\x00\x01")
        assert theirs.waiting()
        received, payload = theirs.receive()
        assert (received, bytes(payload)) == (message, b"\x00\x01")
    assert not theirs.waiting()


def test_a_payload_larger_than_the_sockets_buffer():
    ours, theirs = pair()
    data = bytes(range(256)) * 40_000
    sender = threading.Thread(target=ours.send, args=(wire.Done(), data))
    sender.start()
    assert bytes(theirs.receive()[1]) == data
    sender.join()


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9).map(tuple), max_size=5))
def test_ids_of_several_sequences(rows: list[tuple[int, ...]]):
    assert wire.unpacked(memoryview(wire.packed(rows)), tuple(map(len, rows))) == rows


def test_numbers_that_do_not_add_up_are_refused():
    with pytest.raises(EngineError, match="3 numbers, but 4 were announced"):
        wire.unpacked(memoryview(wire.packed([(1, 2, 3)])), (4,))


def test_the_end_of_the_other_side_is_an_error():
    ours, theirs = pair()
    ours.close()
    assert theirs.waiting()
    with pytest.raises(EngineError, match="the other process is gone"):
        theirs.receive()
    with pytest.raises(EngineError, match="the other process is gone"):
        theirs.send(wire.Done(), b"x" * 1_000_000)


@pytest.mark.parametrize(
    "frame",
    [
        b"no json",
        b'{"kind": "Popen", "body": {}}',
        b'{"kind": "Load", "body": {"version": "1"}}',
        b'{"kind": "Load", "body": {}}',
        b'{"kind": "Load", "body": {"version": 1, "more": 2}}',
        b"[]",
    ],
)
def test_anything_else_is_refused(frame: bytes):
    one, other = socket.socketpair()
    one.sendall(struct.pack("<IQ", len(frame), 0) + frame)
    with pytest.raises(EngineError, match="a message cannot be read"):
        wire.Channel(other).receive()


# --- buckets --------------------------------------------------------------------------------------------------------
def some() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(7, 5, generator=generator),
        "half": torch.randn(300, generator=generator).bfloat16(),
        "scaling": torch.tensor([2.0], dtype=torch.float64),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("size", [256, 512, 1024, 10_000])
def test_tensors_pass_through_shared_memory(size: int):
    sent, received = some(), {}
    for load in bucket.loads(iter(sent.items()), size):
        shared = bucket.Bucket(max(size, bucket.needed(load)), torch.device("cpu"))
        description = shared.description()
        memory = bucket.mapped(description)
        shared.opened()
        assert not Path(description.path).exists()
        for part, tensor in load:
            shared.put(part, tensor)
        received |= {part.name: bucket.view(memory, part).clone() for part, _ in load}
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor), name


def test_loads_keep_the_order_and_the_limit():
    loads = list(bucket.loads(iter(some().items()), 1024))
    assert [part.name for load in loads for part, _ in load] == list(some())
    assert all(bucket.needed(load) <= 1024 for load in loads)
    assert len(loads) > 1


@pytest.mark.parametrize(
    "part",
    [
        wire.Part("w", "float32", (100,), 0),
        wire.Part("w", "float32", (1,), 256),
        wire.Part("w", "float32", (1,), -256),
        wire.Part("w", "float32", (1,), 4),
        wire.Part("w", "load", (1,), 0),
        wire.Part("w", "nothing", (1,), 0),
    ],
)
def test_parts_outside_the_bucket_are_refused(part: wire.Part):
    with pytest.raises(EngineError):
        bucket.view(torch.zeros(256, dtype=torch.uint8), part)


def test_a_bucket_that_is_not_there():
    with pytest.raises(EngineError, match="cannot map the memory") as caught:
        bucket.mapped(wire.Open("/dev/shm/lockstep-nothing/there", 256))
    assert "transport=copy" in caught.value.fix


def test_handles_of_the_driver_travel_as_text():
    values = (b"\x00\xff", 123456789012, False, None, b"", True, 0)
    assert tuple(bucket._value(bucket._text(value)) for value in values) == values
    assert [type(bucket._value(bucket._text(value))) for value in values] == [type(value) for value in values]

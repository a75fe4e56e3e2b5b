"""Copies follow a stream of changes bit for bit, and refuse what is not for them without changing."""

import subprocess
import sys
import zlib

import numpy as np
import pytest

from fp8_common import Fp8Error, WeightCopy, WeightStream
from fp8_common._changed_bytes import apply_changes, encode_changes


def weights(seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (300, 70), np.uint8)
    return {"a": codes, "a.scale": rng.random((300, 1), np.float32), "b": rng.integers(0, 256, 0, np.uint8)}


def stepped(before, share, seed):
    rng = np.random.default_rng(seed)
    after = {name: array.copy() for name, array in before.items()}
    flat = after["a"].reshape(-1)
    places = rng.choice(flat.size, int(share * flat.size), replace=False)
    flat[places] ^= rng.integers(1, 256, places.size, np.uint8)
    return after


def same(copy, expected):
    return copy.weights.keys() == expected.keys() and all(
        copy.weights[name].tobytes() == array.tobytes() and copy.weights[name].shape == array.shape
        for name, array in expected.items()
    )


@pytest.mark.parametrize("places", [[], [0], [255], [0, 256], [999], [254, 510, 766], range(1000), range(0, 1000, 3)])
def test_changes_come_back_in_the_shortest_of_the_ways(places):
    old = np.arange(1000, dtype=np.int64).astype(np.uint8)
    new = old.copy()
    new[list(places)] ^= 77
    way, count, data = encode_changes(old, new)
    assert (apply_changes(old, way, count, data) == new).all()
    assert count == len(places)
    assert len(data) <= min(1000, 125 + count)


def test_each_way_is_used():
    old = np.zeros(8000, np.uint8)
    ways = []
    for step in (4000, 100, 5, 1):
        new = old.copy()
        new[::step] = 1
        ways.append(encode_changes(old, new)[0])
    assert ways == ["gaps", "gaps", "bitmap", "all"]


def test_a_copy_follows_bit_for_bit_and_resumes_after_loss():
    stream, copy, late, now = WeightStream(keep=4), WeightCopy(), WeightCopy(), weights()
    first = stream.message(now)
    copy.apply(first)
    late.apply(first)
    sizes = []
    for step, share in enumerate([0.001, 0.01, 0.0, 0.2, 0.9]):
        now = stepped(now, share, step)
        message = stream.message(now)
        sizes.append(len(message))
        copy.apply(message)
        assert same(copy, now)
        if step == 2:
            for missed in stream.since(late.sequence):
                late.apply(missed)
            assert same(late, now)
    assert sizes[2] < sizes[0] < sizes[1] < sizes[3] < len(first)
    assert stream.since(copy.sequence) == []
    (only,) = stream.since(1)
    assert b'"kind":"full"' in only, "more was missed than is kept"
    late.apply(only)
    assert same(late, now)
    assert late.sequence == copy.sequence == 6


def test_what_is_not_for_a_copy_is_refused_and_changes_nothing():
    stream, now = WeightStream(), weights()
    first = stream.message(now)
    second = stream.message(stepped(now, 0.01, 1))
    third = stream.message(stepped(now, 0.02, 2))
    copy, other = WeightCopy(), WeightCopy()
    copy.apply(first)
    other.apply(WeightStream().message(weights(5)))
    for target, message, told in (
        (copy, third, r"^Message 3 follows message 2, and this copy is at 1"),
        (other, second, r"^The message changes other weights than these: a is not"),
        (copy, second[:-1], "cut off or damaged"),
        (copy, second[:40] + bytes([second[40] ^ 1]) + second[41:], "cut off or damaged"),
        (copy, b"hello", "no message of a WeightStream"),
    ):
        before, sequence = dict(target.weights), target.sequence
        with pytest.raises(Fp8Error, match=told):
            target.apply(message)
        assert target.sequence == sequence
        assert all(target.weights[name] is array for name, array in before.items())
    with pytest.raises(Fp8Error, match="other names, shapes or dtypes"):
        stream.message({"a": now["a"]})
    with pytest.raises(Fp8Error, match="has sent nothing yet"):
        WeightStream().full()


RECEIVER = """
import sys, zlib
from fp8_common import WeightCopy
copy = WeightCopy()
while size := int.from_bytes(sys.stdin.buffer.read(4), "little"):
    copy.apply(sys.stdin.buffer.read(size))
print(copy.sequence, {name: zlib.crc32(array.tobytes()) for name, array in copy.weights.items()})
"""


def test_a_copy_in_another_process_has_the_same_bytes():
    stream, now, sent = WeightStream(), weights(), b""
    for step in range(4):
        message = stream.message(now)
        sent += len(message).to_bytes(4, "little") + message
        last, now = now, stepped(now, 0.05, step)
    done = subprocess.run([sys.executable, "-c", RECEIVER], input=sent, capture_output=True, timeout=300, check=True)
    expected = {name: zlib.crc32(array.tobytes()) for name, array in last.items()}
    assert done.stdout.decode().strip() == f"4 {expected}"

"""Launches of an optimized XLA program, the bytes that each moves, and what is multiplied in which dtypes."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "s16": 2, "f16": 2, "s32": 4, "u32": 4}
BYTES["f32"] = 4
NO_LAUNCH = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "conditional", "after-all", "call"}
NO_LAUNCH |= {"fusion-done", "async-done", "copy-done", "custom-call-done"}
SMALL_RESULT, SMALL_TRAFFIC = 1 << 18, 1 << 22


class Instruction(NamedTuple):
    """One line of a computation; `settings` is the text after its operands."""

    name: str
    shape: str
    operation: str
    operands: list[str]
    settings: str
    is_root: bool


class Launch(NamedTuple):
    """One launch of a step; `times` is how often loops repeat it, `product` the dtypes of a matmul or empty."""

    body: str
    times: int
    name: str
    shape: str
    operands: tuple[str, ...]
    target: str
    read: int
    written: int
    product: tuple[str, ...]

    @property
    def is_small(self) -> bool:
        """Whether it costs microseconds whatever it computes."""
        return self.written < SMALL_RESULT and self.read + self.written < SMALL_TRAFFIC


def arrays(shape: str) -> list[tuple[str, int]]:
    """Return dtype and number of elements of each array of a type."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", re.sub(r"/\*.*?\*/", "", shape))
    return [(dtype, int(np.prod([int(n) for n in dims.split(",") if n]))) for dtype, dims in found if dtype in BYTES]


def size(shape: str) -> int:
    """Return the bytes of a type."""
    return sum(BYTES[dtype] * elements for dtype, elements in arrays(shape))


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return the instructions of each computation, and the name of the entry."""
    found, entry = {}, ""
    line = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)(?= [\w\-]+\()|\S+) ([\w\-]+)\((.*?)\)(.*)")
    for block in re.findall(r"^(?:ENTRY )?%?[\w.\-]+ \(.*?^}", text, re.MULTILINE | re.DOTALL):
        head, *lines = block.splitlines()
        name = head.removeprefix("ENTRY ").split()[0].lstrip("%")
        entry = name if head.startswith("ENTRY") else entry
        found[name] = [
            Instruction(m[2], m[3], m[4], re.findall(r"%([\w.\-]+)", m[5]) or [m[5]], m[6], bool(m[1]))
            for m in filter(None, map(line.match, lines))
        ]
    return found, entry


def launches(text: str) -> Iterator[Launch]:
    """Yield the launches of a program, those of loops with how often they run."""
    blocks, entry = computations(text)

    def walk(name: str, times: int) -> Iterator[Launch]:
        shapes = {one.name: one.shape for one in blocks[name]}
        for one in blocks[name]:
            if one.operation == "while":
                repeated = re.search(r'known_trip_count":\{"n":"(\d+)"', one.settings)
                yield from walk(_named(one, "body"), times * int(repeated[1] if repeated else 1))
            elif one.operation not in NO_LAUNCH:
                yield _launch(one, blocks, shapes, name, times)

    yield from walk(entry, 1)


def _named(one: Instruction, what: str) -> str:
    return re.search(rf"{what}=%?([\w.\-]+)", one.settings)[1]


def _launch(one: Instruction, blocks: dict, shapes: dict[str, str], body: str, times: int) -> Launch:
    inside = blocks[_named(one, "calls")] if one.operation in ("fusion", "fusion-start") else [one]
    known = shapes if inside == [one] else {inner.name: inner.shape for inner in inside}
    calls = [inner for inner in inside if inner.operation == "custom-call"]
    target = next((re.search(r'custom_call_target="([^"]+)"', inner.settings)[1] for inner in calls), "")
    products = [inner for inner in inside if inner.operation == "dot" or (inner in calls and "matmul" in target)]
    product = tuple(
        arrays(shape)[0][0] for inner in products for shape in (*(known[x] for x in inner.operands[:2]), inner.shape)
    )
    operands = one.operands[:2] if product and inside == [one] else one.operands
    read = [size(shapes.get(operand, "")) for operand in operands]
    written = size(one.shape)
    if inside != [one]:
        read, written = _traffic(inside, read)
    elif one.operation in ("dynamic-slice", "slice"):
        read = [written]
    elif one.operation == "dynamic-update-slice":
        read, written = [read[1]], read[1]
    # the last result of a matmul of cuBLASLt is its workspace
    written -= sum(size("s8[" + inner.shape.rpartition(", s8[")[2]) for inner in products if ", s8[" in inner.shape)
    return Launch(body, times, one.name, one.shape, tuple(one.operands), target, sum(read), written, product)


def _traffic(inside: list[Instruction], read: list[int]) -> tuple[list[int], int]:
    """Return what a fusion reads of each operand and what it writes: of stacks the slices alone."""
    by_name, users = {one.name: one for one in inside}, defaultdict(list)
    for one in inside:
        for operand in one.operands:
            users[operand].append(one)

    def uses(name: str) -> Iterator[tuple[Instruction, str]]:
        for user in users[name]:
            yield from uses(user.name) if user.operation == "bitcast" else [(user, name)]

    def needed(name: str, whole: int) -> int:
        total = 0
        for user, through in uses(name):
            if user.operation == "dynamic-update-slice" and user.operands[0] == through:
                continue
            if user.operation not in ("dynamic-slice", "slice", "gather"):
                return whole
            total += size(user.shape)
        return min(total, whole)

    def stored(one: Instruction) -> int:
        if one.operation == "tuple":
            return sum(stored(by_name[name]) for name in one.operands)
        if one.operation == "bitcast":
            return stored(by_name[one.operands[0]])
        return size(by_name[one.operands[1]].shape if one.operation == "dynamic-update-slice" else one.shape)

    places = {int(one.operands[0]): one.name for one in inside if one.operation == "parameter"}
    reads = [needed(places[i], whole) if i in places else whole for i, whole in enumerate(read)]
    return reads, stored(next(one for one in inside if one.is_root))

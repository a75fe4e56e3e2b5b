"""What the code that Inductor writes moves, read from its text alone: buffers times dtypes, for each kernel's call."""

import math
import re

SIZES = {
    **dict.fromkeys(("i1", "i8", "u8", "fp8e4nv", "fp8e5"), 1),
    **dict.fromkeys(("bf16", "fp16", "i16"), 2),
    **dict.fromkeys(("fp32", "i32"), 4),
    **dict.fromkeys(("fp64", "i64"), 8),
}

MADE = (
    re.compile(r"assert_(?:size_stride|tensor_metadata)\((\w+), \(([^)]*)\)"),
    re.compile(r"(\w+) = empty_strided\w*\(\(([^)]*)\)"),
    re.compile(r"(\w+) = reinterpret_tensor\(\w+, \(([^)]*)\)"),
    re.compile(r"(\w+) = workspace.*\.view\(\[([^\]]*)\]\)"),  # sums of parts
)
"""Lines that name a tensor and its size."""
GROUPED = re.compile(r"assert_size_stride_grouped\(\(([^)]*)\), \((.*?\)),?\), ")
"""A line that names several and their sizes, as torch 2.15 writes it."""


def written_bytes(code: str) -> int:
    """Return the bytes that the Triton kernels of a program move, if each tensor in a call travels once.

    A pointer "in_out" is loaded and stored. What opaque operators, matmuls and attention move is not counted.
    """
    kernels = dict(re.findall(r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, re.DOTALL))
    elements: dict[str, int] = {}
    total = 0
    for line in map(str.strip, code[code.index("def call(") :].splitlines()):
        if found := next(filter(None, (pattern.match(line) for pattern in MADE)), None):
            elements[found[1]] = product(found[2])
        elif found := GROUPED.match(line):
            sizes = map(product, re.findall(r"\(([^()]*)\)", found[2]))
            elements |= zip(re.findall(r"\w+", found[1]), sizes, strict=True)
        elif found := re.match(r"(\w+) = (\w+)(; del|$|\s+#)", line):
            elements[found[1]] = elements.get(found[2], 0)
        elif (found := re.match(r"(\w+)\.run\((.*), stream=", line)) and found[1] in kernels:
            total += moved(kernels[found[1]], found[2], elements)
    return total


def moved(source: str, call: str, elements: dict[str, int]) -> int:
    """Return the bytes of one call."""
    signature = re.findall(r"'(\w+)': '([^']*)'", re.search(r"'signature': \{(.*?)\}", source)[1])
    arguments = re.findall(r"(reinterpret_tensor\(.*?\), \(.*?\), \d+\)|[^,\s]+)", call)
    total = 0
    for (name, kind), argument in zip(signature, arguments, strict=False):
        if kind.startswith("*"):
            view = re.match(r"reinterpret_tensor\(\w+, \(([^)]*)\)", argument)
            count = product(view[1]) if view else elements[argument]
            total += count * SIZES[kind[1:]] * (2 if name.startswith("in_out") else 1)
    return total


def product(sizes: str) -> int:
    """Return the number of elements of a size as it is written."""
    return math.prod(map(int, re.findall(r"\d+", sizes)))

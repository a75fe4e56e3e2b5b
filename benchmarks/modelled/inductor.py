"""What a compiled step launches: Inductor lowers, fuses, schedules and writes its code, and nothing runs.

Bytes are Inductor's own account of what each fused kernel reads and writes, plus two things that it leaves out: buffers
of one kernel alone, which are stored all the same where a reduction loops, and are then in its call; and what a kernel
reads a second time in loops down columns, which no cache can serve. Opaque operators run on fake tensors, and what they
launch is recorded.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.modelled.record import Kernel, Step, Traffic, recording
from fp8_common.torch._operators import NAMESPACE

KERNEL = re.compile(r"async_compile\.triton\('(?P<name>triton_\w+)', '''(?P<source>.*?)'''", re.DOTALL)
"""A Triton kernel that Inductor wrote, in its code; those of this project have other names."""


@contextlib.contextmanager
def recording_compiled(step: Step, *, priced: bool = True) -> Iterator[None]:
    """Record what `torch.compile` would launch; compiled functions return fake outputs.

    Args:
        step: Where to.
        priced: Whether to record launches and bytes, and not the code alone, which needs no values of fake tensors.
    """

    def compile_to_module(graph: Any) -> SimpleNamespace:
        made = graph.codegen()[0]
        code = getattr(made, "value", made)
        step.programs.append(code)
        step.sources += [found["source"] for found in KERNEL.finditer(code)]
        if priced:
            _collect(graph, code, step)

        def call(arguments: list) -> tuple:
            arguments.clear()
            return tuple(_made(out) if out.get_device() else None for out in graph.graph_outputs)

        return SimpleNamespace(call=call, __file__="none", key="none")

    with mock.patch("torch._inductor.graph.GraphLowering.compile_to_module", compile_to_module):
        yield


def _made(out: Any) -> torch.Tensor:
    size, stride = (tuple(map(int, lengths)) for lengths in (out.get_size(), out.get_stride()))
    return torch.empty_strided(size, stride, dtype=out.get_dtype(), device="cuda")


def _collect(graph: Any, code: str, step: Step) -> None:
    """Add what a lowered graph launches."""
    accounted: set[str] = set()
    for node in graph.scheduler.nodes:
        if type(node.node).__name__ == "MultiOutput" or "Nop" in type(node).__name__:
            continue
        moved = _accesses(graph, node, accounted)
        if node.is_extern():
            _add_extern(node.node, moved, step)
        else:
            step.kernels.append(Kernel(f"inductor {node.get_name()}", moved))
    stored, read_again = _left_out(graph, code, accounted)
    step.stored += stored
    step.read_again += read_again


def _accesses(graph: Any, node: Any, accounted: set[str]) -> Traffic:
    """Return what Inductor says that a node moves, and add the names of its buffers to `accounted`."""
    moved: Counter[tuple[str, int]] = Counter()
    for way in ("read", "write"):
        accesses = node.get_read_write_buffer_accesses(include_reads=way == "read", include_writes=way == "write")
        accounted.update(accesses)
        for buffer, size in accesses.items():
            known = buffer in graph.name_to_buffer or buffer in graph.graph_inputs
            moved[way, int(graph.get_numel(buffer)) if known else 0] += size
    return dict(moved)


def _add_extern(node: Any, moved: Traffic, step: Step) -> None:
    """Add what Inductor calls: one of our kernels, what an opaque operator launches, or the one launch of another."""
    from torch._inductor.ir import UserDefinedTritonKernel
    from torch._inductor.virtualized import V
    from torch._library.custom_ops import OPDEFS

    if isinstance(node, UserDefinedTritonKernel):
        step.kernels.append(_launched(node))
        return
    overload = getattr(node, "op_overload", None)
    origin = node.get_origin_node() or next(n for n in node.get_origins() if n.target is overload)
    args, kwargs = torch.fx.node.map_arg((origin.args, origin.kwargs), lambda n: n.meta["val"])
    opaque = OPDEFS.get(origin.target._schema.name)
    # those of others are one launch here as in eager mode: what they launch is not known without a GPU
    if opaque is None or origin.target.namespace != NAMESPACE:
        step.add(origin.target, args, kwargs, origin.meta["val"], moved)
        return
    # as when it is called: the compiler is at work now, and will not be then
    with mock.patch("torch.compiler.is_compiling", return_value=False), V.fake_mode, recording(step):
        opaque._init_fn(*args, **kwargs)


def _launched(node: Any) -> Kernel:
    """Return the launch of a kernel that Inductor sees: every argument travels once."""
    name = node.get_kernel_and_metadata()[0].__name__.removesuffix("_kernel")
    written, moved = {argument.get_name() for argument in node.mutable_args}, Counter()
    for argument in node.inputs:
        way, elements = "write" if argument.get_name() in written else "read", int(argument.get_numel())
        if name != "fill_rows_with_zeros" or way == "read":  # writes rows of no group alone, as in `Recorder.launch`
            moved[way, elements] += elements * argument.get_dtype().itemsize
    return Kernel(f"fp8_common {name}", dict(moved))


def _left_out(graph: Any, code: str, accounted: set[str]) -> tuple[int, int]:
    """Return the bytes that the kernels of a graph store unaccounted, and those that they read again.

    Buffers that one kernel alone uses stay in registers, but not where a reduction loops: they are in its call then,
    stored, and loaded again where the pointer says so. And what loops down columns load twice, no cache serves: the
    columns of all programs at once exceed the L2 cache.
    """
    sources = dict(KERNEL.findall(code))
    stored = read_again = 0
    for name, call in re.findall(r"\b(triton_\w+)\.run\((.*?), stream", code):
        signature = re.search(r"'signature': \{(.*?)\}", sources[name])
        pointers = re.findall(r"'(\w+)': '\*", signature[1] if signature else "")
        loops = sources[name].split("for r0_offset")[1:]
        columns = [set(re.findall(r"tl\.load\((\w+) \+ \(.*?\d\*r0_", loop)) for loop in loops]
        loads = Counter(pointer for found in columns for pointer in found)
        # an argument may be a view of a buffer: reinterpret_tensor(NAME, (sizes), (strides), offset)
        arguments = re.findall(r"(?:reinterpret_tensor\((\w+)(?:, \([^)]*\)){2}, \d+\)|(\w+))", call)
        for pointer, names in zip(pointers, arguments, strict=False):
            buffer = "".join(names)
            if (node := graph.try_get_buffer(buffer)) is None:
                continue
            size = int(node.get_numel()) * node.get_dtype().itemsize
            read_again += max(0, loads[pointer] - 1) * size
            if buffer not in accounted:
                stored += size * (2 if pointer.startswith("in_out") else 1)
    return stored, read_again

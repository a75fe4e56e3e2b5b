"""What a step launches: operators on fake CUDA tensors, launch plans of `fp8_common`, their bytes and FLOPs.

An ATen operator that is neither a view nor an allocation is one launch; every tensor that goes in or comes out travels
once. A launch of this project's kernels is its plan and the tensors handed to it; nothing runs.
"""

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fp8_common._kernels import Launch

NO_KERNEL = re.compile(r"aten\.(_unsafe_view|empty|new_empty|detach|alias|lift_fresh|_reshape_alias|set_)")
"""Operators that launch nothing, beside views."""
WAITS = re.compile(r"aten\.(_local_scalar_dense|item|is_nonzero|nonzero|equal)\b")
"""Operators for which the host waits."""
GROUPED = re.compile(r"aten\._(scaled_)?grouped_mm(_v2)?\b")
"""Products of rows in groups: each row is multiplied once, whatever the groups."""
SMALL = 1 << 20
"""Bytes below which a launch counts as small: its latency, not its bytes, is what it costs."""

Traffic = dict[tuple[str, int], int]
"""("read" or "write", elements of the tensor) -> bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One launch.

    Attributes:
        name: Of the operator, plan or fused kernel.
        traffic: The bytes that it moves.
        flops: Of a product or of attention; 0 for what only moves bytes.
        kind: "bf16", "fp8", "attention", or "other" for what only moves bytes.
    """

    name: str
    traffic: Traffic
    flops: float = 0.0
    kind: str = "other"

    @property
    def bytes(self) -> int:
        """All bytes read and written."""
        return sum(self.traffic.values())


@dataclasses.dataclass(slots=True)
class Step:
    """What a forward and a backward do.

    Attributes:
        kernels: Every launch, in order.
        stored: Bytes of compiled kernels that the compiler's account, which `kernels` has, leaves out.
        read_again: Bytes that compiled kernels read a second time, which no cache can serve.
        host_operators: Operators and launches that Python issues.
        waits: Operators for which the host waits for the device.
        products: FP8 FLOPs by granularity of the scales and accumulation.
        sources: The Triton kernels that a compiler wrote.
        programs: All that it wrote, a program for each graph.
    """

    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    stored: int = 0
    read_again: int = 0
    host_operators: int = 0
    waits: int = 0
    products: Counter[str] = dataclasses.field(default_factory=Counter)
    sources: list[str] = dataclasses.field(default_factory=list)
    programs: list[str] = dataclasses.field(default_factory=list)

    def add(self, operator: Any, args: tuple, kwargs: dict, out: Any, moved: Traffic) -> None:
        """Add the launch of an ATen operator."""
        name, count = str(operator), flop_registry.get(operator.overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count else 0
        if GROUPED.match(name) or "_scaled_mm" in name:  # torch counts the older of them alone
            flops = _flops_of_rows(*args[:2])
        kind = "other" if not flops else "fp8" if "_scaled_" in name and "mm" in name else "bf16"
        if "attention" in name:
            kind, flops = "attention", flops / 2  # causal: half of the products are masked
        if kind == "fp8":
            self.products[_kind_of_product(args, kwargs)] += flops
        self.kernels.append(Kernel(name, moved, flops, kind))

    @property
    def small(self) -> int:
        """The number of small launches."""
        return sum(kernel.bytes < SMALL for kernel in self.kernels)

    @property
    def bytes_outside(self) -> int:
        """The bytes that everything but products and attention moves."""
        return sum(kernel.bytes for kernel in self.kernels if kernel.kind == "other") + self.stored + self.read_again

    def flops(self, kind: str) -> float:
        """The FLOPs of products of one kind."""
        return sum(kernel.flops for kernel in self.kernels if kernel.kind == kind)


def _flops_of_rows(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the FLOPs of [M, K] by [K, N], of groups of rows by [groups, K, N], or of [N, rows] by [rows, K]."""
    return 2.0 * a.shape[0] * a.shape[1] * b.shape[-1]


def _kind_of_product(args: tuple, kwargs: dict) -> str:
    """Name the scales and the accumulation of a scaled matmul of torch, whose newer forms take lists of scales."""
    scale = args[2] if len(args) > 2 else kwargs["scale_a"]
    scale = scale[0] if isinstance(scale, list) else scale
    if scale.ndim == 1 and scale.numel() > 1:  # of rows in groups
        granularity = "grouped"
    else:
        granularity = "tensorwise" if scale.numel() == 1 else "rowwise" if scale.shape[1] == 1 else "blockwise"
    fast = kwargs.get("use_fast_accum", args[-1] if isinstance(args[-1], bool) else False)
    return f"{granularity}, {'fast' if fast else 'full'} accumulation"


def traffic(reads: Iterable[Any], writes: Iterable[Any]) -> Traffic:
    """Return what a launch moves if every tensor travels once; of expanded tensors only what is stored."""
    found: Counter[tuple[str, int]] = Counter()
    for way, things in (("read", reads), ("write", writes)):
        for x in things:
            if isinstance(x, torch.Tensor):
                stored = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
                found[way, stored // x.element_size()] += stored
    return dict(found)


class Recorder(TorchDispatchMode):
    """Records what eager mode does."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(kind, (FakeTensor, nn.Parameter)) for kind in kinds):
            return NotImplemented  # a wrapper, which calls this again with what it holds
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # asks for properties of tensors
            return out
        self.step.host_operators += 1
        self.step.waits += bool(WAITS.match(str(func)))
        if not (func.is_view or NO_KERNEL.match(str(func))):
            self.step.add(func, args, kwargs, out, traffic(tree_leaves((args, kwargs)), tree_leaves(out)))
        return out

    def launch(self, plan: Launch, device: torch.device, **tensors: torch.Tensor) -> None:
        """Stand in for `fp8_common.torch._triton.run`."""
        self.step.host_operators += 1
        reads = [x for name, x in tensors.items() if name not in plan.outputs or name in plan.updated]
        writes = [x for name, x in tensors.items() if name in plan.outputs]
        if (
            plan.name == "fill_rows_with_zeros"
        ):  # writes rows of no group alone, which there are none of in these models
            reads, writes = [tensors["keep_ptr"]], []
        self.step.kernels.append(Kernel(f"fp8_common {plan.name}", traffic(reads, writes)))


class _NoTensor:
    """A class that no tensor is of: in the place of `FakeTensor`, fake tensors go where those of a GPU would."""


@contextlib.contextmanager
def recording(step: Step) -> Iterator[None]:
    """Record operators, and launches of `fp8_common` as if fake tensors were on a GPU."""
    recorder, package = Recorder(step), "fp8_common.torch."
    replaced = {
        "_triton.FakeTensor": _NoTensor,
        "rounding.FakeTensor": _NoTensor,
        "rounding.values_table": lambda fmt, dtype, device: torch.empty(256, dtype=dtype, device=device),
        "_triton.run": recorder.launch,
        # there is nothing to launch
        "_triton._obstacle": lambda device: None,
    }
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch(package + name, function))
        stack.enter_context(recorder)
        yield

"""The private names of torch that are used outside of FSDP, and its scaled matmuls under their older names.

`FakeTensor` is the class of tensors that have a shape and a device but no data: nothing can be launched on them.
`disable_compiler` does what `torch.compiler.disable` does, but imports the compiler with the first call, not as a
decorator: that would add half a second to every import of these packages.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch._compile import _disable_dynamo as disable_compiler
from torch._subclasses.fake_tensor import FakeTensor
from torch.torch_version import TorchVersion

__all__ = [
    "FakeTensor",
    "assume_constant_result",
    "constant_of_record",
    "disable_compiler",
    "in_function_transform",
    "scaled_grouped_mm",
    "scaled_mm",
]

Function = TypeVar("Function", bound=Callable[..., Any])
Scaling = Literal["TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128"]
"""A name of `torch.nn.functional.ScalingType`."""
SCALING_BY_NAME = TorchVersion(torch.__version__) >= "2.15"
"""Whether compilers and CPUs know `torch.nn.functional.scaled_mm` and `scaled_grouped_mm`.

Before, the operators that they supersede take the same layouts.
"""


def assume_constant_result(function: Function) -> Function:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler.

    That decorator imports Dynamo, which would add half a second to every import of these packages.

    Args:
        function: Its result depends on nothing but its arguments.
    """
    # The attribute by which Dynamo knows such functions.
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


def constant_of_record(function: Function) -> Function:
    """Do the same for a function of a frozen dataclass, where this torch can; a compiler traces it elsewhere.

    torch 2.11 gives no dataclass to such a function. Traced, numbers of the dataclass may be symbols.
    """
    return assume_constant_result(function) if TorchVersion(torch.__version__) >= "2.13" else function


def in_function_transform() -> bool:
    """Return whether `torch.func` (vmap, grad, jvp, ...) transforms what runs now; False under a compiler."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inv: torch.Tensor,
    b_inv: torch.Tensor,
    scaling: tuple[Scaling, Scaling],
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return float8 codes a [M, K] @ b [K, N], b column-major, with float32 scales back from FP8, in `out_dtype`."""
    if not SCALING_BY_NAME:
        return torch._scaled_mm(a, b, a_inv, b_inv, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    of_a, of_b = (getattr(F.ScalingType, name) for name in scaling)
    return F.scaled_mm(a, b, a_inv, of_a, b_inv, of_b, output_dtype=out_dtype, use_fast_accum=use_fast_accum)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inv: torch.Tensor,
    b_inv: torch.Tensor,
    *,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Return the matmuls of groups of rows, or over groups of rows, with scales of rows; `offsets` int32 [groups]."""
    options: Any = {"offs": offsets, "use_fast_accum": use_fast_accum}
    if not SCALING_BY_NAME:
        return torch._scaled_grouped_mm(a, b, a_inv, b_inv, out_dtype=out_dtype, **options)
    rows = F.ScalingType.RowWise
    return F.scaled_grouped_mm(a, b, a_inv, rows, b_inv, rows, output_dtype=out_dtype, **options)

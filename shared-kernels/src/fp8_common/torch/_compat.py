"""The private names of torch that are used outside of FSDP: compiler constants, fake tensors, `torch.func`.

`FakeTensor` is the class of tensors that have a shape and a device but no data: nothing can be launched on them.
`disable_compiler` does what `torch.compiler.disable` does, but imports the compiler with the first call, not as a
decorator: that would add half a second to every import of these packages.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo as disable_compiler
from torch._subclasses.fake_tensor import FakeTensor
from torch.torch_version import TorchVersion

__all__ = ["FakeTensor", "assume_constant_result", "constant_of_record", "disable_compiler", "in_function_transform"]

Function = TypeVar("Function", bound=Callable[..., Any])


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

"""The one place outside FSDP that knows private names of torch: constants for the compiler, fake tensors."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler.

    That decorator imports Dynamo, half a second that everybody would pay who imports a package of this family.

    Args:
        function: Its result depends on nothing but its arguments.
    """
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


def is_fake(x: torch.Tensor) -> bool:
    """Return whether `x` has a shape and a device but no data: nothing can be launched on it."""
    return isinstance(x, FakeTensor)

"""The one place outside FSDP that knows a private name of torch: what tells the compiler that a result is constant."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler.

    That decorator imports Dynamo, half a second that everybody would pay who imports a package of this family.

    Args:
        function: Its result depends on nothing but its arguments.
    """
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function

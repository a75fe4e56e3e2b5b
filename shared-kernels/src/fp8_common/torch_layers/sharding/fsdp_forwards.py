"""Begin and end of forwards and backwards under FSDP2.

Like `fsdp`, written for the private names of torch 2.11 to 2.15, which a test lists.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fp8_common.torch.compat import disable_compiler
from fp8_common.torch_layers.sharding.fsdp import state_of


def in_backward() -> bool:
    """Return whether this thread runs a backward now."""
    return torch._C._current_graph_task_id() != -1


def graph_task() -> int:
    """Return the number of the running backward, -1 outside of one.

    Of this thread.
    """
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Return whether the backward that runs now was called with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` after the running backward ends without an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def next_node() -> int:
    """Return autograd's number of this thread's next node."""
    return torch._C._autograd._get_sequence_nr()


def running_node() -> int:
    """Return the number of the running backward node, else -1."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def on_forwards(
    root: nn.Module,
    before: Callable[[tuple[nn.Module, ...], bool], None],
    after: Callable[[tuple[nn.Module, ...], Any, bool], None],
) -> None:
    """Call functions around forwards of FSDP modules under a root.

    FSDP2 has initialized the root.

    FSDP2 calls these two methods of its states for modules and for methods of `register_fsdp_forward_method`, whereas
    hooks of modules do not run for methods.

    Args:
        root: The FSDP root.
        before: Called before the gathers with the modules of the state, and whether the forward of no FSDP module
            around them runs.
        after: Called with these modules, the output, and whether that forward ends here.
    """
    top: Any = state_of(root)
    for state in top._state_ctx.all_states:
        state._root_pre_forward = functools.partial(_before, state, state._root_pre_forward, before)
        state._register_pre_backward_hook = functools.partial(_after, state, state._register_pre_backward_hook, after)
        if len(state._modules) == 1:
            state._pre_forward = functools.partial(_method, state, state._pre_forward)
            hook = disable_compiler(functools.partial(_end_what_raised, state))
            state._modules[0].register_forward_pre_hook(hook, prepend=True)

    # A backward that raised leaves the root in its backward: FSDP2 calls neither method in the next forward.
    def left_in_backward() -> bool:
        return not in_backward() and top._training_state.name == "PRE_BACKWARD"

    @disable_compiler
    def before_root(module: nn.Module, args: object) -> None:
        if left_in_backward():
            before(top._modules, True)

    @disable_compiler
    def after_root(module: nn.Module, args: object, output: Any) -> None:
        if left_in_backward():
            after(top._modules, output, True)

    root.register_forward_pre_hook(before_root, prepend=True)
    root.register_forward_hook(after_root)


def _end_what_raised(state: Any, *inputs: object) -> None:
    # A forward that raised leaves its modules in it: FSDP2 takes the next one for a part of it.
    if not in_backward() and state._training_state.name == "FORWARD":
        state._training_state = type(state._training_state).IDLE


def _method(state: Any, original: Any, *inputs: Any) -> Any:
    _end_what_raised(state)
    return original(*inputs)


def _before(state: Any, original: Any, before: Any, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    outer = state._state_ctx.iter_forward_root
    if outer is not None and _contains(state, outer):  # left by an exception
        state._state_ctx.iter_forward_root = outer = None
    before(state._modules, outer is None)
    return original(module, args, kwargs)


def _after(state: Any, original: Any, after: Any, output: Any) -> Any:
    after(state._modules, output, state._state_ctx.iter_forward_root is state)
    return original(output)


def _contains(state: Any, other: Any) -> bool:
    return any(below is other._modules[0] for module in state._modules for below in module.modules())


def on_backward(output: Any, begin: Callable[[torch.Tensor], None], end: Callable[[Any, Any], None]) -> None:
    """Call `begin` before, `end` after the backward passes `output`'s tensors."""
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(begin)
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_hook(end)

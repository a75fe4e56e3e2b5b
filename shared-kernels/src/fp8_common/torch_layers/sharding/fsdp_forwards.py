"""Hooks at the begin and end of forwards and backwards under FSDP2.

Like `fsdp`, this module uses private names of torch 2.11 to 2.15, which a test lists.
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
    """Return whether this thread is running a backward."""
    return torch._C._current_graph_task_id() != -1


def graph_task() -> int:
    """Return the number of the backward that this thread runs, else -1."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph (`retain_graph=True`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` after the running backward ends without an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def next_node() -> int:
    """Return the number that autograd will give this thread's next node."""
    return torch._C._autograd._get_sequence_nr()


def running_node() -> int:
    """Return the number of the autograd node that is running, else -1."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def on_forwards(
    root: nn.Module,
    before: Callable[[tuple[nn.Module, ...], bool], None],
    after: Callable[[tuple[nn.Module, ...], Any, bool], None],
) -> None:
    """Call functions around forwards of FSDP modules under a root.

    This wraps methods of FSDP2's states. FSDP2 calls them for modules and for methods that were passed to
    `register_fsdp_forward_method`, whereas hooks of modules do not run for such methods.

    Args:
        root: FSDP root that FSDP2 has initialized.
        before: Called before the gathers of a forward with the modules of the state, and with True if this is the
            outermost forward.
        after: Called after a forward with these modules, its output, and True if this is the outermost forward.
    """
    top: Any = state_of(root)
    for state in top._state_ctx.all_states:
        state._root_pre_forward = functools.partial(_before, state, state._root_pre_forward, before)
        state._register_pre_backward_hook = functools.partial(_after, state, state._register_pre_backward_hook, after)
        if len(state._modules) == 1:
            state._pre_forward = functools.partial(_pre_forward, state, state._pre_forward)
            hook = disable_compiler(functools.partial(_reset_after_exception, state))
            state._modules[0].register_forward_pre_hook(hook, prepend=True)

    # After a backward that raised, the root's state still is PRE_BACKWARD, and FSDP2 calls neither `_root_pre_forward`
    # nor `_register_pre_backward_hook` in the next forward.
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


def _reset_after_exception(state: Any, *inputs: object) -> None:
    # After a forward that raised, the state still is FORWARD, and FSDP2 treats the next forward as a part of it.
    if not in_backward() and state._training_state.name == "FORWARD":
        state._training_state = type(state._training_state).IDLE


def _pre_forward(state: Any, original: Any, *inputs: Any) -> Any:
    _reset_after_exception(state)
    return original(*inputs)


def _before(state: Any, original: Any, before: Any, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    outer = state._state_ctx.iter_forward_root
    # The outermost forward cannot be of this module, or of one inside it: an exception has ended it.
    if outer is not None and _contains(state, outer):
        state._state_ctx.iter_forward_root = outer = None
    before(state._modules, outer is None)
    return original(module, args, kwargs)


def _after(state: Any, original: Any, after: Any, output: Any) -> Any:
    after(state._modules, output, state._state_ctx.iter_forward_root is state)
    return original(output)


def _contains(state: Any, other: Any) -> bool:
    return any(below is other._modules[0] for module in state._modules for below in module.modules())


def on_backward(output: Any, begin: Callable[[torch.Tensor], None], end: Callable[[Any, Any], None]) -> None:
    """Register hooks for the backward of `output`.

    Args:
        output: Any nesting of tensors; those without `requires_grad` are ignored.
        begin: Called with the gradient of each tensor, before the node that created the tensor runs.
        end: Called with the gradients of that node's inputs and outputs, after the node has run.
    """
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(begin)
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_hook(end)

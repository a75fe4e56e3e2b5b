"""`PrimaryWeightHolder`: what modules with an FP8 primary weight "weight" have in common: moves, and what is loaded."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common.torch.plugin import GatheredFloat8Weight
from fp8_te_init._compat import dtensor_like, local_of, set_model_state_dict_around
from fp8_te_init._config import PrimaryConfig
from fp8_te_init._init_replay import InitReplay
from fp8_te_init._kept_in_module import reconcile
from fp8_te_init._kept_values import keeper
from fp8_te_init._rows import Rows
from fp8_te_init._state_dict import before_whole_load, receivers
from fp8_te_init._weight import PrimaryFloat8Weight, primary_of

aten = torch.ops.aten


class PrimaryWeightHolder(nn.Module):
    """A module whose parameter "weight" holds FP8 codes.

    Attributes:
        config: How to cast and multiply.
        weight: The parameter.
    """

    config: PrimaryConfig
    weight: torch.Tensor

    @property
    def weight_quant_scale(self) -> torch.Tensor | None:
        """float32 scales of the whole weight, into FP8; None where the weight is a plain one."""
        # FSDP2 has the whole weight in place of the shard during forward and backward.
        gathered = local_of(self.weight)
        if isinstance(gathered, GatheredFloat8Weight):
            return gathered.scale
        primary = primary_of(self.weight)
        return None if primary is None else primary.scale

    @property
    def weight_amax_history(self) -> torch.Tensor | None:
        """float32 [window] of delayed scaling, newest first; None without it."""
        primary = primary_of(self.weight)
        return None if primary is None else primary.state.history

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers; of this layer alone (`recurse=False`) also what the state dict holds beside the codes.

        `set_model_state_dict` asks each layer for what it may receive from other ranks, and knows parameters and
        buffers alone.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if recurse:
            return
        loading = set_model_state_dict_around(sys._getframe(1))
        if loading is not None:
            first = next(module for module in loading.model.modules() if isinstance(module, PrimaryWeightHolder))
            before_whole_load(self, loading, check_others=first is self)
        for name, tensor in receivers(self).items():
            yield f"{prefix}.{name}".lstrip("."), tensor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PrimaryWeightHolder":
        """Move as asked; a change of dtype changes what the weight stands for, not its codes."""
        # `nn.Module._apply` swaps the content of wrapper subclasses with that of a new tensor, attributes included.
        attributes = dict(self.weight.__dict__)
        super()._apply(lambda tensor: _moved(tensor, fn), recurse)
        for name, value in attributes.items():  # what Megatron and others keep there: main_grad, main_param, marks
            self.weight.__dict__.setdefault(name, value)
        # an autograd graph that is still alive keeps the old tensor from dying, which would say the same
        reconcile(self, "weight")
        return self


def draw_uniform(primary: PrimaryFloat8Weight, bound: float) -> None:
    """Draw the whole weight evenly within `bound`, on every rank, and take over the part that is held here."""
    state = primary.state
    device = state.codes.device
    rows = Rows(0, state.whole_shape[0])
    # Before the draw: the replay takes the state of the generator as it is now.
    record = InitReplay.record if len(state.whole_shape) == 2 else _no_replay
    replay = record(None, aten.uniform_.default, (-bound, bound), {}, device=device, rows=rows)
    whole = torch.empty(state.whole_shape, dtype=primary.dtype, device=device).uniform_(-bound, bound)
    state.write_drawn(whole, keeper(state.kept, primary.quantized_rows, replay))


def _no_replay(*args: Any, **options: Any) -> None:
    """Record nothing: an initialisation is repeated for two dimensions alone."""


def _moved(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply what `nn.Module._apply` applies, without letting a cast turn codes into plain values."""
    primary = primary_of(tensor)
    if primary is None:
        return fn(tensor)
    # What `fn` does is found out on an empty tensor: applied to the weight, a cast would return dequantized values.
    wanted = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    # `to_empty`: there are no codes to move.
    if tensor.is_meta and not wanted.is_meta:
        moved = torch.empty_like(tensor, device=wanted.device)
    elif wanted.device != tensor.device:
        moved = tensor.to(wanted.device)
    else:
        moved = tensor
    if wanted.dtype == tensor.dtype:
        return moved
    return _standing_for(moved, wanted.dtype)


def _standing_for(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    primary = primary_of(tensor)
    if primary is None:
        return tensor.to(dtype)
    local = primary.standing_for(dtype)
    if not isinstance(tensor, DTensor):
        return local
    return dtensor_like(tensor, local)

"""`PrimaryFloat8Linear`: a linear layer whose weight parameter holds FP8 codes and nothing else."""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fp8_common import CastRecipe, Fp8Error, Fp8UnsupportedError
from fp8_common.torch import INPUT_DTYPES, casts
from fp8_common.torch.compat import DISTRIBUTED, disable_compiler, distributed_like, local_of, state_dict_hooks
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.function import LinearSpec, fp8_linear
from fp8_common.torch_layers.sharding.fsdp import region_of
from fp8_common.torch_layers.sharding.gathered import GatheredWeight, quantized
from fp8_common.torch_layers.sharding.replaced import mark_replaced
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid
from fp8_te_init.weight.checkpoint import show_scales
from fp8_te_init.weight.replicas import watch
from fp8_te_init.weight.state import WeightState
from fp8_te_init.weight.tensor import PrimaryFloat8Weight, primary_of

logger = logging.getLogger(__name__)

REGISTERED = "_fp8_registered_plain"
"""The attribute of plain parameters that modules registered inside `fp8_model_init`."""


class PrimaryFloat8Linear(nn.Linear):
    """A linear layer whose weight parameter holds FP8 codes and nothing else.

    Made by `convert_linear`, or inside `fp8_model_init`. The bias stays in high precision. `state_dict()` holds the
    codes as uint8 [rows, 1, columns] under "weight", and float32 scales into FP8 under "weight_scale_e4m3" (or the
    format's name).

    Attributes:
        config: How to cast and multiply.
        spec: What the layer brings to its matmuls.
        weight_options: What `WeightState.empty` is given for a weight that is assigned as values.
    """

    config: LinearConfig
    weight_options: dict[str, Any]
    spec: LinearSpec

    @classmethod
    def adopt(cls, module: nn.Linear, config: LinearConfig, options: dict[str, Any]) -> "PrimaryFloat8Linear":
        """Make `module` itself a PrimaryFloat8Linear; the caller gives it its weight (`hold`).

        Args:
            module: The layer.
            config: How it computes.
            options: `keeps` of weights that are made of values later.
        """
        # not a new module: hooks, names and other modules' references to this one stay as they are
        adopted: Any = module
        adopted.__class__ = cls
        adopted.config, adopted.weight_options = config, options
        adopted.spec = LinearSpec(config, partial(_operand, config.weight), cls.__name__)
        return adopted

    def _leave(self) -> None:
        """Become the `nn.Linear` again that it was, without a weight."""
        for name in [name for name in self._buffers if name.startswith("weight_")]:
            del self._buffers[name]
        for registered in state_dict_hooks(self):
            for key, hook in list(registered.items()):
                if "weight" in getattr(getattr(hook, "hook", hook), "args", ()):
                    del registered[key]
        del self._parameters["weight"], self.config, self.spec, self.weight_options
        plain: Any = self
        plain.__class__ = nn.Linear

    def hold(self, weight: nn.Parameter) -> None:
        """Take an FP8 weight, and show its scales as buffers."""
        self._parameters["weight"] = weight
        show_scales(self)
        watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a copy or a pickle holds, in a process that may have built no such layer."""
        super().__setstate__(state)
        watch()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; plain values for "weight" are quantized, and become its new start.

        The FP8 weight stays the object that it is, so that optimizers go on training it. A parameter that another
        module registered in the same `fp8_model_init` block ties the layer to it, which is a plain `nn.Linear` again.

        Raises:
            Fp8Error: Values of another shape, dtype or device, or plain ones for a distributed weight.
        """
        held = self._parameters.get("weight")
        # before it is adopted, nn.Linear is being built and its weight is a plain one
        if name == "weight" and param is not None and "config" in self.__dict__ and _is_plain(param):
            if held is None or not hasattr(param, REGISTERED):
                self._take_values(held, param)
                return
            logger.info("A linear layer shares the weight of another module, so it stays in high precision.")
            self._leave()
            self._parameters[name] = param
            return
        super().register_parameter(name, param)
        if name == "weight" and primary_of(param) is not None:
            show_scales(self)

    @torch.no_grad()
    def _take_values(self, held: nn.Parameter | None, plain: nn.Parameter) -> None:
        if isinstance(held, DTensor) or isinstance(plain, DTensor):
            raise Fp8Error(
                "A parameter was assigned to a distributed FP8 weight, or a distributed one to an FP8 layer. Copy "
                "values (layer.weight.copy_(...) under torch.no_grad), or use load_state_dict."
            )
        if plain.dtype not in INPUT_DTYPES:
            raise Fp8Error(
                f"A parameter of {plain.dtype} was assigned to an FP8 weight: codes are made of float32, bfloat16 or "
                "float16."
            )
        marks = dict(vars(plain))  # what loaders note on a parameter holds of what stands in its place
        mark_replaced(plain, "the FP8 layer that it was assigned to")
        if held is None or (held.shape, held.dtype, held.device) != (plain.shape, plain.dtype, plain.device):
            options = self.weight_options
            if isinstance(held, PrimaryFloat8Weight):
                options = {"keeps": held.state.keeps}
            self.hold(new_weight(plain, self.config, options))
            held = self._parameters["weight"]
            assert held is not None  # noqa: S101  just made
        if not plain.is_meta:
            held.copy_(plain)
        held.requires_grad_(plain.requires_grad)
        vars(held).update(marks)

    # FP8 primary weights change their scales outside of compiled code.
    @disable_compiler
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias. `torch.compile` leaves it as it is, and compiles what is around it.

        Args:
            input: [..., in_features], float32, bfloat16 or float16.

        Returns:
            [..., out_features] in the dtype of `input` (the autocast dtype under autocast).

        Raises:
            Fp8Error: The last dimension is not `in_features`, or the weight is distributed and not gathered.
        """
        weight = self.weight
        if isinstance(weight, DTensor):
            raise Fp8Error(
                "A layer with an FP8 primary weight cannot compute with a distributed weight: call the model through "
                "the module that fully_shard was applied to."
            )
        # nn.Parameter of a tensor subclass returns an object of that subclass; only plain tensors get this very type
        if type(self._parameters.get("weight")) is nn.Parameter:
            raise Fp8Error(
                "The weight of this FP8 layer was replaced by a plain parameter behind its back (module._parameters). "
                "Assign it as layer.weight = ..., use load_state_dict, or build a plain nn.Linear."
            )
        # no features on one side: there is nothing to cast
        output = fp8_linear(input, weight, self.spec) if weight.numel() else F.linear(input, weight.to(input.dtype))
        state = _state_behind(weight)
        if state is not None:
            state.after_forward()
        return output if self.bias is None else output + self.bias.to(output.dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as `nn.Linear` does. A sharded layer draws the whole weight and takes its rows.

        So the same state of the global generator on all ranks gives the same weight for every number of ranks, and
        the one that an unsharded layer would have got.
        """
        primary = primary_of(self.weight)
        if primary is None:
            super().reset_parameters()
            return
        if primary.is_meta:
            return
        # kaiming_uniform_(a=sqrt(5)) of nn.Linear is uniform within 1 / sqrt(in_features), weight and bias alike
        bound, state = 1 / math.sqrt(self.in_features) if self.in_features else 0.0, primary.state
        whole = torch.empty(state.full_shape, dtype=primary.dtype, device=primary.device).uniform_(-bound, bound)
        state.write(whole[state.first_row : state.first_row + state.rows], fresh=True)
        increment_version(self.weight)
        if self.bias is not None:
            # drawn whole as well, so that all ranks leave the generator in the same state
            local, first = local_of(self.bias), region_of(self.bias).offset[0]
            whole = torch.empty(self.bias.shape, dtype=local.dtype, device=local.device).uniform_(-bound, bound)
            local.copy_(whole[first : first + len(local)])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PrimaryFloat8Linear":
        """Move as asked; a change of dtype changes what the weight stands for, not codes and scales."""
        # `nn.Module._apply` swaps the content of wrapper subclasses with that of a new tensor, attributes included
        attributes = dict(self.weight.__dict__)
        super()._apply(partial(_moved, fn), recurse)
        for name, value in attributes.items():  # what Megatron and others put there: main_grad, main_param
            self.weight.__dict__.setdefault(name, value)
        primary = primary_of(self.weight)
        if primary is not None:
            primary.state.uploaded_from = None
            show_scales(self)  # those of the weight, which moved with it: a cast must not round them
        return self

    def extra_repr(self) -> str:
        """Show what differs from `nn.Linear`."""
        cast = self.config.weight
        return f"{super().extra_repr()}, primary={cast.scaling} {cast.granularity} {cast.format}"


def new_weight(plain: torch.Tensor, config: LinearConfig, options: dict[str, Any]) -> nn.Parameter:
    """Return an FP8 parameter of zeros with the shape, dtype and device of a plain one."""
    state = WeightState.empty(plain, config.weight, **options)
    return nn.Parameter(PrimaryFloat8Weight(state.codes, state), requires_grad=plain.requires_grad)


def _operand(cast: CastRecipe, weight: torch.Tensor, record: bool, both: bool) -> Quantized:
    """Return a weight [out_features, in_features] as an operand: its codes as they are, or plain values cast now.

    Plain values are what a caller put in the place of the weight, `torch.func.functional_call` for example.
    """
    if isinstance(weight, GatheredWeight):
        return quantized(weight)
    grid = ScaleGrid(cast)
    if not isinstance(weight, PrimaryFloat8Weight):
        return grid.quantize_whole(weight)
    weight.state.check()
    return Quantized(weight.codes, casts.reciprocal(weight.scale), cast.fp8_format, grid.tile)


def _refuse_distribution(layer: PrimaryFloat8Linear) -> bool:
    raise Fp8UnsupportedError(
        "torch's tensor parallelism cannot cut FP8 primary weights. Use fp8-torch-fsdp, which has tensor-parallel "
        "layers, the parallel layers of TransformerEngine, or fully_shard alone."
    )


# `distribute_module` asks every module for this name on all ranks before it communicates; without a refusal there the
# first rank would raise and the others wait.
setattr(PrimaryFloat8Linear, DISTRIBUTED, property(_refuse_distribution))


def _state_behind(weight: torch.Tensor) -> WeightState | None:
    """Return the state of a weight, also of a gathered one."""
    if isinstance(weight, PrimaryFloat8Weight):
        return weight.state
    gathered_from = getattr(weight, "gathered_from", None)
    return None if gathered_from is None else gathered_from()


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is one of torch, and no FP8 weight, gathered or not."""
    return type(local_of(parameter)) in (torch.Tensor, nn.Parameter)


def _moved(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Apply what `nn.Module._apply` applies, without letting a cast turn codes into plain values."""
    primary = primary_of(tensor)
    if primary is None:
        return fn(tensor)
    # what `fn` does is found out on an empty tensor: applied to the weight, a cast would return dequantized values
    wanted = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    if wanted.is_shared() and wanted.device.type == "cpu":
        primary.share_memory_()
    if tensor.is_meta and not wanted.is_meta:  # `to_empty`: there is nothing to move
        moved = torch.empty_like(tensor, device=wanted.device)
    else:
        moved = tensor if wanted.device == tensor.device else tensor.to(wanted.device)
    local = primary_of(moved)
    if local is None or wanted.dtype == tensor.dtype:
        return moved
    twin = PrimaryFloat8Weight(local._codes, local.state.around(local.state.codes, dtype=wanted.dtype))
    return distributed_like(moved, twin)

"""`PrimaryFloat8Linear`: a linear layer with an FP8 primary weight, the module that it was under another class."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error
from fp8_common.torch import INPUT_DTYPES
from fp8_common.torch.plugin import GatheredFloat8Weight, LinearOperands, Operand, ScaleLayout, dispatch, hooks
from fp8_te_init._compat import disable_compiler
from fp8_te_init._config import PrimaryConfig
from fp8_te_init._holder import PrimaryWeightHolder, draw_uniform
from fp8_te_init._kept_in_module import kept_for, reconcile
from fp8_te_init._kept_values import keeper
from fp8_te_init._shards import place_of
from fp8_te_init._state_dict import keep_scales_in_state_dicts
from fp8_te_init._tensor_parallel import cut, is_tensor_parallel, parallel_linear
from fp8_te_init._weight import PrimaryFloat8Weight, primary_of

aten = torch.ops.aten


class PrimaryFloat8Linear(PrimaryWeightHolder, nn.Linear, LinearOperands):
    """A linear layer whose weight parameter holds FP8 codes and nothing else.

    Made by `convert_linear`, or inside `primary_weights`. The bias stays in high precision. `state_dict()` holds the
    codes as a plain float8 tensor under "weight" and the scales into FP8 under "weight_quant_scale".

    Attributes:
        config: How to cast and multiply.
    """

    config: PrimaryConfig

    @classmethod
    def adopt(cls, module: nn.Linear, config: PrimaryConfig) -> "PrimaryFloat8Linear":
        """Make `module` itself a PrimaryFloat8Linear; its weight is replaced by the caller."""
        # not a new module: hooks, names and other modules' references to this one stay as they are
        module.__class__ = cls
        adopted: Any = module
        adopted.config = config
        keep_scales_in_state_dicts(adopted)
        return adopted

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; plain values for "weight" are quantized, and kept as its new start.

        An FP8 weight of the same shape stays the object that it is, so that optimizers go on training it.

        Raises:
            Fp8Error: Values that cannot be quantized, or plain ones for a distributed weight.
        """
        # "config" is there once `adopt` has run: before that, nn.Linear is being built and its weight is a plain one.
        if name == "weight" and param is not None and "config" in self.__dict__ and _is_plain(param):
            marks, param = dict(vars(param)), self._quantized(param)
            # what loaders note on a parameter (that it is initialized) holds of what stands in its place
            vars(param).update(marks)
        super().register_parameter(name, param)
        if name == "weight" and primary_of(param) is not None:
            reconcile(self, name)

    @torch.no_grad()
    def _quantized(self, plain: nn.Parameter) -> Any:
        held = self._parameters.get("weight")
        if isinstance(plain, DTensor) and isinstance(held, PrimaryFloat8Weight):
            hooks.mark_replaced(held, "parallelize_module")
            distributed = cut(held, plain, kept_for(self, "weight"))
            return nn.Parameter(distributed, requires_grad=plain.requires_grad)
        if isinstance(held, DTensor) or isinstance(plain, DTensor):
            raise Fp8Error(
                "A plain parameter was assigned to a distributed FP8 weight. Copy values into it "
                "(layer.weight.copy_(...) under torch.no_grad), or use load_state_dict."
            )
        if plain.dtype not in INPUT_DTYPES:
            raise Fp8Error(
                f"A parameter of {plain.dtype} was assigned to an FP8 weight: codes are made of float32, bfloat16 or "
                "float16."
            )
        hooks.mark_replaced(plain, "the FP8 layer that it was assigned to")
        if isinstance(held, PrimaryFloat8Weight) and _is_like(held, plain):
            held.copy_(plain)
            held.requires_grad_(plain.requires_grad)
            return held
        weight = PrimaryFloat8Weight.empty(
            plain.shape, self.config.weight, dtype=plain.dtype, device=plain.device, gather=self.config.gather
        )
        fresh = nn.Parameter(weight, requires_grad=plain.requires_grad)
        kept = kept_for(self, "weight")
        if not plain.is_meta:
            weight.state.write(plain.data, keeper(kept, weight.quantized_rows))
        return fresh

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
        if is_tensor_parallel(self.weight):
            distributed: Any = self.weight
            return parallel_linear(self._local_product, input, distributed, self.bias)
        if isinstance(self.weight, DTensor):
            raise Fp8Error(
                "A layer with an FP8 primary weight cannot compute with this distributed weight: call the model "
                "through the module that fully_shard was applied to, and make layers tensor-parallel with "
                "ColwiseParallel and RowwiseParallel."
            )
        # nn.Parameter of a tensor subclass returns an object of that subclass; only plain tensors get this very type.
        if type(self._parameters.get("weight")) is nn.Parameter:
            raise Fp8Error(
                "The weight of this FP8 layer was replaced by a plain parameter behind its back (module._parameters). "
                "Assign it as layer.weight = ..., use load_state_dict, or build a plain nn.Linear."
            )
        output = self._local_product(input, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _local_product(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not weight.numel():  # no features on one side: there is nothing to cast
            return F.linear(input, weight.to(input.dtype))
        return self.product(input, weight)

    def weight_operand(self, weight: torch.Tensor, *, record: bool) -> Operand:
        """Return the weight [out_features, in_features] as an operand: its codes as they are, or plain values cast now.

        Plain values are what a caller put in the place of the weight, `torch.func.functional_call` for example.
        """
        if isinstance(weight, GatheredFloat8Weight):
            return Operand.of(weight)
        layout = ScaleLayout.of(self.config.weight)
        if not isinstance(weight, PrimaryFloat8Weight):
            return Operand.of_cast(layout.cast_whole(weight), self.config.weight.fp8_format, layout.block)
        weight.state.check_loaded()
        scale_inv = dispatch.reciprocal(weight.state.scale_of_all_rows(weight.scale).contiguous())
        return Operand(weight.codes, scale_inv, self.config.weight.fp8_format, layout.block)

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
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        # kaiming_uniform_(a=sqrt(5)) of nn.Linear is uniform within 1 / sqrt(in_features), weight and bias alike. Its
        # function is not called, because on a shard it would draw numbers for the rows of this rank alone.
        draw_uniform(primary, bound)
        increment_version(self.weight)  # a MasterOptimizer that is there already sees that it was written to
        if self.bias is not None:
            _draw_rows(self.bias, bound)

    def extra_repr(self) -> str:
        """Show what differs from `nn.Linear`."""
        cast = self.config.weight
        return f"{super().extra_repr()}, primary={cast.scaling} {cast.granularity} {cast.format}"


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return whether a parameter holds plain values, not codes, gathered or not."""
    local = getattr(parameter, "_local_tensor", parameter)
    return type(local) in (torch.Tensor, nn.Parameter) and (local.is_floating_point() or local.is_complex())


def _is_like(weight: torch.Tensor, other: torch.Tensor) -> bool:
    return (weight.shape, weight.dtype, weight.device) == (other.shape, other.dtype, other.device)


def _draw_rows(bias: nn.Parameter, bound: float) -> None:
    local = getattr(bias, "_local_tensor", bias)
    whole = torch.empty(bias.shape, dtype=bias.dtype, device=local.device).uniform_(-bound, bound)
    if local is bias:
        local.copy_(whole)
        return
    # Drawn whole as well, so that all ranks leave the generator in the same state.
    local.copy_(whole[place_of(bias).inside()])

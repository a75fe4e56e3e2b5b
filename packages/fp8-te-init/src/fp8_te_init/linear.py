"""`PrimaryFloat8Linear`: a linear layer whose weight is stored in FP8."""

import dataclasses
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
from fp8_common.torch import INPUT_DTYPES
from fp8_common.torch.compat import DISTRIBUTED, disable_compiler, distributed_like, local_of, state_dict_hooks
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.function import LinearSpec, fp8_linear
from fp8_common.torch_layers.sharding.fsdp import region_of
from fp8_common.torch_layers.sharding.gathered import GatheredWeight, quantized
from fp8_common.torch_layers.sharding.replaced import mark_replaced
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid
from fp8_te_init.weight.all_gather import GATHERED
from fp8_te_init.weight.checkpoint import show_scales
from fp8_te_init.weight.replicas import watch
from fp8_te_init.weight.state import WeightState
from fp8_te_init.weight.tensor import PrimaryFloat8Weight, primary_of

logger = logging.getLogger(__name__)

REGISTERED = "_fp8_registered_plain"
"""Attribute of plain parameters that were registered inside of `fp8_model_init`."""


class PrimaryFloat8Linear(nn.Linear):
    """Linear layer whose weight parameter holds FP8 codes and no high-precision copy.

    `convert_linear` and `fp8_model_init` create it; the bias stays in high precision. `state_dict()` contains the codes
    as uint8 [rows, 1, columns] under "weight", the float32 scales into FP8 under "weight_scale_e4m3" (the name ends in
    the format), and for delayed scaling the float32 history under "weight_amax_history".

    Attributes:
        config: Casts and matmuls of the layer.
        spec: Static inputs of the layer's matmuls.
        weight_options: Options of `WeightState.empty` for a weight that is assigned as values.

    Examples:
        >>> import torch
        >>> from fp8_te_init import PrimaryFloat8Linear, fp8_model_init
        >>> with fp8_model_init():
        ...     layer = torch.nn.Linear(64, 32)
        >>> isinstance(layer, PrimaryFloat8Linear)
        True
        >>> {name: (tensor.dtype, list(tensor.shape)) for name, tensor in layer.state_dict().items()}
        {'weight': (torch.uint8, [32, 1, 64]), 'bias': (torch.float32, [32]), 'weight_scale_e4m3': (torch.float32, [])}
    """

    config: LinearConfig
    weight_options: dict[str, Any]
    spec: LinearSpec

    @classmethod
    def adopt(cls, module: nn.Linear, config: LinearConfig, options: dict[str, Any]) -> "PrimaryFloat8Linear":
        """Change a layer into a `PrimaryFloat8Linear`; call `hold` next.

        Args:
            module: The layer, which is changed in place.
            config: Casts and matmuls of the layer.
            options: `preserve_until` of weights that are assigned as values later.
        """
        # the same object, so that hooks, names and references from other modules stay valid
        adopted: Any = module
        adopted.__class__ = cls
        adopted.config, adopted.weight_options = config, options
        adopted.spec = LinearSpec(config, partial(_operand, config.weight), cls.__name__)
        return adopted

    def _revert_to_linear(self) -> None:
        """Change back into an `nn.Linear`, without a weight."""
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
        """Set an FP8 weight, and register its scales as buffers."""
        self._parameters["weight"] = weight
        show_scales(self)
        watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled layer.

        The hook on DDP is installed here too, because this process may not have built an FP8 layer before.
        """
        super().__setstate__(state)
        watch()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; quantize plain values that are assigned to "weight".

        The values are written into the FP8 weight, which stays the same object, so that optimizers still train it. If
        they have another shape, dtype or device, they become a new FP8 weight. If another
        module registered the parameter inside of `fp8_model_init`, the assignment ties the two weights, and the layer
        becomes a plain `nn.Linear` again.

        Raises:
            Fp8Error: If the values have a dtype that cannot be quantized, or one of weight and values is distributed.
        """
        held = self._parameters.get("weight")
        # without `config`, the constructor of nn.Linear runs and registers a plain weight
        if name == "weight" and param is not None and "config" in self.__dict__ and _is_plain(param):
            if held is None or not hasattr(param, REGISTERED):
                self._set_values(held, param)
                return
            logger.info("A linear layer shares the weight of another module, so it stays in high precision.")
            self._revert_to_linear()
            self._parameters[name] = param
            return
        super().register_parameter(name, param)
        if name == "weight" and primary_of(param) is not None:
            show_scales(self)

    @torch.no_grad()
    def _set_values(self, held: nn.Parameter | None, plain: nn.Parameter) -> None:
        """Write values and attributes of a plain parameter to the FP8 weight."""
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
        attributes = dict(vars(plain))  # loaders set attributes of a parameter, which the FP8 weight must keep
        mark_replaced(plain, "the FP8 layer that it was assigned to")
        if held is None or (held.shape, held.dtype, held.device) != (plain.shape, plain.dtype, plain.device):
            options = self.weight_options
            if isinstance(held, PrimaryFloat8Weight):
                options = {"preserve_until": held.state.preserve_until}
            self.hold(new_weight(plain, self.config, options))
            held = self._parameters["weight"]
            assert held is not None  # noqa: S101  `hold` has set it
        if not plain.is_meta:
            held.copy_(plain)
        held.requires_grad_(plain.requires_grad)
        vars(held).update(attributes)

    # the state of the weight changes in ways that compiled code would not see
    @disable_compiler
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias.

        `torch.compile` does not trace this method; it compiles the code around it.

        Args:
            input: [..., in_features], float32, bfloat16 or float16.

        Returns:
            [..., out_features] in the dtype of `input` (the autocast dtype under autocast).

        Raises:
            Fp8Error: If the last dimension is not `in_features`, the weight is distributed and not gathered, codes and
                scales of the weight do not match, or other code has replaced the weight in `module._parameters`.
        """
        weight = self.weight
        if isinstance(weight, DTensor):
            raise Fp8Error(
                "A layer with an FP8 primary weight cannot compute with a distributed weight: call the model through "
                "the module that fully_shard was applied to."
            )
        # nn.Parameter of a tensor subclass returns an object of the subclass: exactly this type is a plain parameter
        if type(self._parameters.get("weight")) is nn.Parameter:
            raise Fp8Error(
                "The weight of this FP8 layer was replaced by a plain parameter through module._parameters. Assign to "
                "layer.weight, use load_state_dict, or build a plain nn.Linear."
            )
        # without input or output features there is nothing to cast
        output = fp8_linear(input, weight, self.spec) if weight.numel() else F.linear(input, weight.to(input.dtype))
        shard = self.__dict__.pop(GATHERED, None)
        state = weight.state if isinstance(weight, PrimaryFloat8Weight) else shard and shard()
        if state is not None:
            state.after_forward()
        return output if self.bias is None else output + self.bias.to(output.dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize weight and bias like `nn.Linear`.

        A sharded layer draws the whole weight and keeps its rows. If the global generator has the same state on all
        ranks, the weight is therefore the same for any number of ranks, and equals that of an unsharded layer.
        """
        primary = primary_of(self.weight)
        if primary is None:
            super().reset_parameters()
            return
        if primary.is_meta:
            return
        # kaiming_uniform_(a=sqrt(5)) of nn.Linear is uniform within 1 / sqrt(in_features), as is its bias
        bound, state = 1 / math.sqrt(self.in_features) if self.in_features else 0.0, primary.state
        whole = torch.empty(state.full_shape, dtype=primary.dtype, device=primary.device).uniform_(-bound, bound)
        state.write(whole[state.first_row : state.first_row + state.rows], fresh=True)
        increment_version(self.weight)
        if self.bias is not None:
            # drawn whole as well, so that the generator ends in the same state on all ranks
            local, first = local_of(self.bias), region_of(self.bias).offset[0]
            whole = torch.empty(self.bias.shape, dtype=local.dtype, device=local.device).uniform_(-bound, bound)
            local.copy_(whole[first : first + len(local)])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PrimaryFloat8Linear":
        """Move or cast the module; a cast keeps codes and scales."""
        # `nn.Module._apply` swaps the content of wrapper subclasses with that of a new tensor, attributes included
        attributes = dict(self.weight.__dict__)
        super()._apply(partial(_moved, fn), recurse)
        for name, value in attributes.items():  # attributes of Megatron and others: main_grad, main_param
            self.weight.__dict__.setdefault(name, value)
        primary = primary_of(self.weight)
        if primary is not None:
            show_scales(self)  # the scales of the moved weight replace the buffers, which a cast has rounded
        return self

    def extra_repr(self) -> str:
        """Return the arguments of `nn.Linear` and the cast of the weight."""
        cast = self.config.weight
        return f"{super().extra_repr()}, primary={cast.scaling} {cast.granularity} {cast.format}"


def new_weight(plain: torch.Tensor, config: LinearConfig, options: dict[str, Any]) -> nn.Parameter:
    """Return an FP8 weight of zeros, like a plain parameter."""
    state = WeightState.empty(plain, config.weight, **options)
    return nn.Parameter(PrimaryFloat8Weight(state.codes, state), requires_grad=plain.requires_grad)


def _operand(cast: CastRecipe, weight: torch.Tensor, record: bool, both: bool) -> Quantized:
    """Return a weight [out_features, in_features] as an FP8 operand.

    FP8 weights provide their codes. Plain values, for example from `torch.func.functional_call`, are quantized with
    current scaling.
    """
    if isinstance(weight, GatheredWeight):
        return quantized(weight)
    grid = ScaleGrid(cast)
    if not isinstance(weight, PrimaryFloat8Weight):
        return grid.quantize_whole(weight)
    weight.state.check()
    return Quantized(weight.codes, weight.state.scale_inv, cast.fp8_format, grid.tile)


def _reject_distribution(layer: PrimaryFloat8Linear) -> bool:
    raise Fp8UnsupportedError(
        "torch's tensor parallelism cannot cut FP8 primary weights. Use fp8-torch-fsdp, which has tensor-parallel "
        "layers, the parallel layers of TransformerEngine, or fully_shard alone."
    )


# `distribute_module` reads this attribute of every module before it communicates, on all ranks. Without an error here
# the first rank would raise later, and the others would wait for it.
setattr(PrimaryFloat8Linear, DISTRIBUTED, property(_reject_distribution))


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is plain, distributed or not."""
    return type(local_of(parameter)) in (torch.Tensor, nn.Parameter)


def _moved(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Apply the function of `nn.Module._apply`; FP8 weights stay FP8."""
    primary = primary_of(tensor)
    if primary is None:
        return fn(tensor)
    # an empty tensor shows what `fn` does; a cast of the weight itself would return dequantized values
    wanted = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    if wanted.is_shared() and wanted.device.type == "cpu":
        primary.share_memory_()
    if tensor.is_meta and not wanted.is_meta:  # `to_empty`
        moved = torch.empty_like(tensor, device=wanted.device)
    else:
        moved = tensor if wanted.device == tensor.device else tensor.to(wanted.device)
    local = primary_of(moved)
    if local is None or wanted.dtype == tensor.dtype:
        return moved
    part = dataclasses.replace(local.state.part, dtype=wanted.dtype)
    return distributed_like(
        moved, PrimaryFloat8Weight(local._codes, local.state.with_codes(local.state.codes, part=part))
    )

"""Layers with published weights: `PublishedLinear`, and stacked experts."""

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.recipe import get_recipe
from fp8_common.torch.compat import disable_compiler, distributed_like, local_of
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.function import LinearSpec, fp8_linear
from fp8_te_init.published.weight import CODES, PublishedWeight, operand_of, published_of

Multiply = Literal["decoded", "fp8"]
"""Operands of matmuls: values decoded each time, or codes and quantized activations."""

RECIPES = {None: "tensorwise", (1, 0): "rowwise", (128, 128): "blockwise"}
"""The recipe for activations and gradients next to weights of each block."""
STACKS = ("gate_up_proj", "down_proj")


class _Published(nn.Module):
    """Base of layers with published weights: keeps codes in moves and checkpoints."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Move the module; a new dtype leaves the codes unchanged."""
        super()._apply(partial(_moved, fn), recurse)
        for name in self._parameters:
            _show_scales(self, name)  # buffers of the weight: a cast must not round them
        return self


class PublishedLinear(_Published, nn.Linear):
    """Linear layer on the codes and scales of a file.

    Made by `convert_published`.

    Attributes:
        spec: Static settings of FP8 matmuls; None if values are decoded.
    """

    spec: LinearSpec | None

    # traced, the guards on codes and scales would fail
    @disable_compiler
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias, like `nn.Linear` on the decoded weight.

        Args:
            input: [..., in_features] in the weight's dtype, or any that autocast turns into it.

        Returns:
            [..., out_features].
        """
        weight = self.weight
        if not isinstance(weight, PublishedWeight):
            return super().forward(input)  # a high-precision copy, where it was given one
        if self.spec is not None:
            output = fp8_linear(input, weight, self.spec)
            return output if self.bias is None else output + self.bias.to(output.dtype)
        kind = input.device.type
        autocast = kind != "meta" and torch.is_autocast_enabled(kind) and not weight.requires_grad
        if autocast and weight.dtype != torch.get_autocast_dtype(kind):
            # autocast would make a copy of the values, which autograd would keep
            weight = weight.standing_for(torch.get_autocast_dtype(kind))
        return nn.functional.linear(input, weight, self.bias)

    def reset_parameters(self) -> None:
        """Do nothing: codes come from the file."""

    def extra_repr(self) -> str:
        """Describe the differences from `nn.Linear`."""
        weight = published_of(self._parameters.get("weight"))
        block = "high precision" if weight is None else f"published={RECIPES[cast('Any', weight.stored.block)]}"
        return f"{super().extra_repr()}, {block}, multiply={'decoded' if self.spec is None else 'fp8'}"


class _Fp8Experts(TorchFunctionMode):
    """Multiplies published expert stacks in FP8, inside their original loop."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self.spec = spec

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Replace `F.linear` where a published weight multiplies."""
        if func is nn.functional.linear and not kwargs and len(args) == 2 and isinstance(args[1], PublishedWeight):
            return fp8_linear(*args, self.spec)
        return func(*args, **(kwargs or {}))


class PublishedExperts(_Published):
    """Experts of Transformers as stacks, multiplied one expert at a time.

    Stacks are [experts, rows, columns].

    Attributes:
        published_name: The name of the module in the model.
        spec: Static settings of FP8 matmuls; None if values are decoded.
    """

    published_name: str
    spec: LinearSpec | None

    @disable_compiler
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Loop over the selected experts.

        The model's `experts_implementation` has no effect.

        Raises:
            Fp8UnsupportedError: An adapter was put on a whole stack.
        """
        for name in STACKS:
            if not isinstance(getattr(self, name), PublishedWeight):
                raise Fp8UnsupportedError(
                    f"{self.published_name}.{name} was replaced: adapters on stacks of experts (PEFT's "
                    "target_parameters, or gate_proj, up_proj and down_proj of a mixture of experts) decode the whole "
                    "stack in every forward. Leave the experts out of target_modules."
                )
        with nullcontext() if self.spec is None else _Fp8Experts(self.spec):
            return _own_forward(type(self))(self, *args, **kwargs)


@functools.cache
def experts_class(cls: type) -> type:
    """Return the replacement class of a module of experts."""
    return type(f"Published{cls.__name__}", (PublishedExperts, cls), {})


@functools.cache
def _own_forward(cls: type) -> Callable[..., Any]:
    """Return the original expert loop under generated classes."""
    classes = cls.__mro__
    original = classes[classes.index(PublishedExperts) + 2]  # behind _Published
    return inspect.unwrap(original.forward)


def hold_linear(layer: nn.Linear, weight: PublishedWeight, multiply: Multiply) -> None:
    """Make a layer a `PublishedLinear` with this weight."""
    adopted: Any = layer
    adopted.__class__ = PublishedLinear
    adopted.spec = _spec(weight, multiply)
    _hold(layer, "weight", weight)


def hold_stack(experts: nn.Module, name: str, weight: PublishedWeight, full_name: str, multiply: Multiply) -> None:
    """Replace a parameter of experts by a published stack.

    Errors use the name `full_name`.
    """
    changed: Any = experts
    changed.published_name = full_name.rpartition(".")[0]
    changed.spec = _spec(weight, multiply)
    if not isinstance(experts, PublishedExperts):
        changed.__class__ = experts_class(type(experts))
    _hold(experts, name, weight)


def _spec(weight: PublishedWeight, multiply: Multiply) -> LinearSpec | None:
    if multiply == "decoded":
        return None
    config = LinearConfig(recipe=get_recipe(RECIPES[cast("Any", weight.stored.block)]))
    return LinearSpec(config, _operand, "A published layer")


def _hold(module: nn.Module, name: str, weight: PublishedWeight) -> None:
    module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    _show_scales(module, name)
    # partials of functions of this module and no closures, so that modules that have them can be copied
    module.register_state_dict_post_hook(partial(_codes_out, name))
    module.register_load_state_dict_pre_hook(partial(_codes_in, name))


def _show_scales(module: nn.Module, name: str) -> None:
    """Register published scales as a buffer, named as in Transformers."""
    weight = published_of(module._parameters.get(name))
    if weight is not None:
        module.register_buffer(f"{name}_scale_inv", weight.scale_inv)


def _operand(weight: torch.Tensor, record: bool, both: bool) -> Quantized:
    if not isinstance(weight, PublishedWeight):
        raise Fp8Error("The weight of a published layer that multiplies in FP8 was replaced by values.")
    return operand_of(weight)


def _moved(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Apply `nn.Module._apply`, keeping codes under casts."""
    weight = published_of(tensor)
    if weight is None:
        return fn(tensor)
    # `fn` is tried on an empty tensor
    wanted = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    if wanted.is_shared() and wanted.device.type == "cpu":
        raise Fp8UnsupportedError("Published FP8 weights cannot be shared between processes. Load them in each.")
    return distributed_like(tensor, weight.standing_for(wanted.dtype, wanted.device))


def _codes_out(name: str, module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Replace the weight by its codes in a state dict.

    Codes are uint8 [n, 1, ...]; scales are a buffer.

    Its scales are a buffer.

    Gloo and older NCCL do not support float8. The dimension of 1 is for other models: none of their loaders accepts
        codes for
    values, since no weight of theirs has it.
    """
    value: Any = state_dict.get(f"{prefix}{name}")
    weight = published_of(value)
    if weight is None:  # values were assigned in its place
        state_dict.pop(f"{prefix}{name}_scale_inv", None)
        return
    codes = weight.codes.view(torch.uint8).unsqueeze(1)
    if isinstance(value, DTensor):
        shape = torch.Size((value.shape[0], 1, *value.shape[1:]))
        stride, options = (value.stride(0), *value.stride()), {"run_check": False, "shape": shape}
        codes = DTensor.from_local(codes, value.device_mesh, value.placements, stride=stride, **options)
    state_dict[f"{prefix}{name}"] = codes


def _codes_in(name: str, module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, *rest: Any) -> None:
    """Load codes in the weight's shape.

    Raise if their scales are missing, or if a load would replace both.
    """
    key, parameter = f"{prefix}{name}", cast("torch.Tensor", module._parameters.get(name))
    weight = published_of(parameter)
    given, scale_inv = state_dict.get(key), state_dict.get(f"{prefix}{name}_scale_inv")
    if weight is None or not isinstance(given, torch.Tensor) or local_of(given).dtype not in (CODES, torch.uint8):
        return
    local = local_of(given).view(torch.uint8)
    local = local.squeeze(1) if local.ndim == weight.ndim + 1 and local.shape[1] == 1 else local
    state_dict[key] = distributed_like(parameter, local) if isinstance(given, DTensor) else local
    if scale_inv is None or scale_inv.dtype != weight.scale_inv.dtype or scale_inv.shape != weight.scale_inv.shape:
        found = "missing" if scale_inv is None else f"{scale_inv.dtype} {list(scale_inv.shape)}"
        raise Fp8Error(
            f"{key} holds FP8 codes, and {key}_scale_inv is {found}: {weight.scale_inv.dtype} "
            f"{list(weight.scale_inv.shape)} belongs to them."
        )
    if local_metadata.get("assign_to_params_buffers"):
        raise Fp8UnsupportedError("load_state_dict(assign=True) would replace published weights: leave assign out.")

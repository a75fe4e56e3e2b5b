"""Layers with published weights: `PublishedLinear` and `PublishedExperts`."""

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
"""Operands of matmuls: "decoded" values of the weight, or its "fp8" codes with quantized activations."""

RECIPES = {None: "tensorwise", (1, 0): "rowwise", (128, 128): "blockwise"}
"""Recipe for activations and gradients, by the block of the weight's scales."""
STACKS = ("gate_up_proj", "down_proj")


class _Published(nn.Module):
    """Base class that keeps codes of published weights under casts."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Move or cast the module; a cast keeps codes and scales."""
        super()._apply(partial(_moved, fn), recurse)
        for name in self._parameters:
            _show_scales(self, name)  # the scales of the moved weight replace the buffers, which a cast has rounded
        return self


class PublishedLinear(_Published, nn.Linear):
    """Linear layer on the codes and scales of a file.

    `convert_published` creates it.

    Attributes:
        spec: Static inputs of FP8 matmuls; None if values are decoded.
    """

    spec: LinearSpec | None

    # not traced, because guards on codes and scales would fail
    @disable_compiler
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias, like `nn.Linear` on the decoded weight.

        Args:
            input: [..., in_features] in the dtype of the weight, or any floating-point dtype under autocast.

        Returns:
            [..., out_features].
        """
        weight = self.weight
        if not isinstance(weight, PublishedWeight):
            return super().forward(input)  # a high-precision weight was assigned
        if self.spec is not None:
            output = fp8_linear(input, weight, self.spec)
            return output if self.bias is None else output + self.bias.to(output.dtype)
        kind = input.device.type
        autocast = kind != "meta" and torch.is_autocast_enabled(kind) and not weight.requires_grad
        if autocast and weight.dtype != torch.get_autocast_dtype(kind):
            # autocast would copy the decoded values, and autograd would save the copy
            weight = weight.standing_for(torch.get_autocast_dtype(kind))
        return nn.functional.linear(input, weight, self.bias)

    def reset_parameters(self) -> None:
        """Do nothing, because the codes come from the file."""

    def extra_repr(self) -> str:
        """Return the arguments of `nn.Linear`, the recipe of the weight and `multiply`."""
        weight = published_of(self._parameters.get("weight"))
        block = "high precision" if weight is None else f"published={RECIPES[cast('Any', weight.stored.block)]}"
        return f"{super().extra_repr()}, {block}, multiply={'decoded' if self.spec is None else 'fp8'}"


class _Fp8Experts(TorchFunctionMode):
    """Mode that multiplies published expert stacks in FP8 in their original loop."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self.spec = spec

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Replace `F.linear` with `fp8_linear` for published weights."""
        if func is nn.functional.linear and not kwargs and len(args) == 2 and isinstance(args[1], PublishedWeight):
            return fp8_linear(*args, self.spec)
        return func(*args, **(kwargs or {}))


class PublishedExperts(_Published):
    """Base class of Transformers' experts with published stacks [experts, rows, columns].

    Attributes:
        published_name: Name of the module in the model, for errors.
        spec: Static inputs of FP8 matmuls; None if values are decoded.
    """

    published_name: str
    spec: LinearSpec | None

    @disable_compiler
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the original forward, which loops over the selected experts.

        The model's `experts_implementation` has no effect.

        Raises:
            Fp8UnsupportedError: If a stack was replaced, for example by an adapter on the whole stack.
        """
        for name in STACKS:
            if not isinstance(getattr(self, name), PublishedWeight):
                raise Fp8UnsupportedError(
                    f"{self.published_name}.{name} was replaced: adapters on stacks of experts (PEFT's "
                    "target_parameters, or gate_proj, up_proj and down_proj of a mixture of experts) decode the whole "
                    "stack in every forward. Leave the experts out of target_modules."
                )
        with nullcontext() if self.spec is None else _Fp8Experts(self.spec):
            return _original_forward(type(self))(self, *args, **kwargs)


@functools.cache
def experts_class(cls: type) -> type:
    """Return the subclass of `PublishedExperts` for a class of experts."""
    return type(f"Published{cls.__name__}", (PublishedExperts, cls), {})


@functools.cache
def _original_forward(cls: type) -> Callable[..., Any]:
    """Return the undecorated forward of the class that a generated class extends."""
    classes = cls.__mro__
    original = classes[classes.index(PublishedExperts) + 2]  # after PublishedExperts and _Published
    return inspect.unwrap(original.forward)


def hold_linear(layer: nn.Linear, weight: PublishedWeight, multiply: Multiply) -> None:
    """Change a layer into a `PublishedLinear` with a published weight, in place."""
    adopted: Any = layer
    adopted.__class__ = PublishedLinear
    adopted.spec = _spec(weight, multiply)
    _hold(layer, "weight", weight)


def hold_stack(experts: nn.Module, name: str, weight: PublishedWeight, full_name: str, multiply: Multiply) -> None:
    """Replace a parameter of experts with a published stack, in place.

    Args:
        experts: Module of experts, whose class becomes a `PublishedExperts`.
        name: Name of the parameter in the module.
        weight: Published stack [experts, rows, columns].
        full_name: Name of the parameter in the model, for errors.
        multiply: Operands of matmuls.
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
    """Set a frozen published weight, its buffer and its state-dict hooks."""
    module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    _show_scales(module, name)
    # partials of module-level functions instead of closures, so that the module can be copied
    module.register_state_dict_post_hook(partial(_codes_out, name))
    module.register_load_state_dict_pre_hook(partial(_codes_in, name))


def _show_scales(module: nn.Module, name: str) -> None:
    """Register published scales as the buffer that Transformers names `..._scale_inv`."""
    weight = published_of(module._parameters.get(name))
    if weight is not None:
        module.register_buffer(f"{name}_scale_inv", weight.scale_inv)


def _operand(weight: torch.Tensor, record: bool, both: bool) -> Quantized:
    """Return a published weight as an FP8 operand; see `LinearSpec`."""
    if not isinstance(weight, PublishedWeight):
        raise Fp8Error("The weight of a published layer that multiplies in FP8 was replaced by values.")
    return operand_of(weight)


def _moved(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Apply the function of `nn.Module._apply`; casts keep codes."""
    weight = published_of(tensor)
    if weight is None:
        return fn(tensor)
    # an empty tensor shows what `fn` does
    wanted = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    if wanted.is_shared() and wanted.device.type == "cpu":
        raise Fp8UnsupportedError("Published FP8 weights cannot be shared between processes. Load them in each.")
    return distributed_like(tensor, weight.standing_for(wanted.dtype, wanted.device))


def _codes_out(name: str, module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Replace the weight in a state dict with its codes.

    Codes are uint8 [n, 1, ...], because Gloo and older NCCL do not support float8. No weight of another model has the
    dimension of size 1, so its loader raises instead of loading codes as values. Scales are a buffer of the module.
    """
    value: Any = state_dict.get(f"{prefix}{name}")
    weight = published_of(value)
    if weight is None:  # values were assigned to the parameter
        state_dict.pop(f"{prefix}{name}_scale_inv", None)
        return
    codes = weight.codes.view(torch.uint8).unsqueeze(1)
    if isinstance(value, DTensor):
        shape = torch.Size((value.shape[0], 1, *value.shape[1:]))
        stride, options = (value.stride(0), *value.stride()), {"run_check": False, "shape": shape}
        codes = DTensor.from_local(codes, value.device_mesh, value.placements, stride=stride, **options)
    state_dict[f"{prefix}{name}"] = codes


def _codes_in(name: str, module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, *rest: Any) -> None:
    """Prepare codes in a state dict for loading.

    Raises:
        Fp8Error: If the state dict has codes without scales of the right dtype and shape.
        Fp8UnsupportedError: If a load with `assign=True` would replace the published weight.
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
        given_scales = "missing" if scale_inv is None else f"{scale_inv.dtype} {list(scale_inv.shape)}"
        raise Fp8Error(
            f"{key} holds FP8 codes, and {key}_scale_inv is {given_scales}: {weight.scale_inv.dtype} "
            f"{list(weight.scale_inv.shape)} belongs to them."
        )
    if local_metadata.get("assign_to_params_buffers"):
        raise Fp8UnsupportedError("load_state_dict(assign=True) would replace published weights: leave assign out.")

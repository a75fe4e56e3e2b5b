"""A double of what this package touches of TransformerEngine: its names, shapes and order of events.

Per-tensor scaled tensors alone, without kernels: what is quantized here is quantized with plain torch.
"""

import contextlib
import sys
import types
from types import MethodType

import torch
from torch import nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class Float8Quantizer:
    """Delayed scaling: a scale that is there before the values."""

    def __init__(self, scale, amax, fp8_dtype):
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def __call__(self, tensor):
        codes = (tensor.float() * self.scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return Float8Tensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            data=codes,
            fp8_scale_inv=torch.reciprocal(self.scale).reshape(1),
            fp8_dtype=self.dtype,
            quantizer=self,
            device=tensor.device,
        )


class Float8Tensor(torch.Tensor):
    """uint8 data, a scale back, and a quantizer."""

    @staticmethod
    def __new__(cls, *, shape, dtype, data, fp8_scale_inv, fp8_dtype, quantizer=None, device=None):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, strides=data.stride(), dtype=dtype, device=data.device)
        self._data, self._scale_inv, self._fp8_dtype, self._quantizer = data, fp8_scale_inv, fp8_dtype, quantizer
        self._transpose, self._transpose_invalid = None, True
        return self

    def like(self, data):
        return Float8Tensor(
            shape=data.shape,
            dtype=self.dtype,
            data=data,
            fp8_scale_inv=self._scale_inv,
            fp8_dtype=self._fp8_dtype,
            quantizer=self._quantizer,
        )

    def dequantize(self, dtype=None):
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(dtype or self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.view.default, aten.slice.Tensor, aten.as_strided.default):
            return args[0].like(func(args[0]._data, *args[1:], **kwargs))
        if func is aten.split.Tensor:
            return [args[0].like(part) for part in func(args[0]._data, *args[1:], **kwargs)]
        if func is aten.new_zeros.default:
            fresh = args[0].like(args[0]._data.new_zeros(args[1]))
            fresh._scale_inv = args[0]._scale_inv.clone()
            return fresh
        if func is aten.copy_.default and isinstance(args[0], cls):
            target, source = args[:2]
            if isinstance(source, cls):
                target._data.copy_(source._data)
                target._scale_inv.copy_(source._scale_inv)
            else:
                target._data.copy_(target._quantizer(source)._data)
            return target
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.dequantize(), (args, kwargs))
        return func(*args, **kwargs)


class State:
    enabled = preserve = False


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.dequantize(), grad.t() @ x


class Linear(nn.Module):
    """Quantizes its weight as the last act of its constructor, and attaches the copy as the real one does."""

    def __init__(self, inputs, outputs, dtype=torch.float32):
        super().__init__()
        self.primary, self.preserve = State.enabled, State.preserve
        self.register_parameter("weight", nn.Parameter(torch.empty(outputs, inputs, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self):
        param = torch.empty(self.weight.shape, dtype=self.weight.dtype)
        nn.init.normal_(param, 0.0, 0.023)
        if not self.primary:
            self.weight = nn.Parameter(param)
            return
        kept = param.detach().cpu() if self.preserve else None
        quantizer = Float8Quantizer(torch.ones(1), torch.zeros(1), "DType.kFloat8E4M3")
        param = nn.Parameter(quantizer(param))
        if kept is not None:
            param._high_precision_init_val = kept
            param.get_high_precision_init_val = MethodType(lambda self: self._high_precision_init_val, param)
            param.clear_high_precision_init_val = MethodType(
                lambda self: delattr(self, "_high_precision_init_val"), param
            )
        self.weight = param

    def forward(self, x):
        return _Product.apply(x, self.weight)


class FusedAdam(torch.optim.Optimizer):
    """Holds masters in its state; `set_scaled_state` is the way to them."""

    def __init__(self, params, lr=1e-3, master_weights=True):
        super().__init__(params, {"lr": lr})
        self.master_weights = master_weights

    def initialize_state(self, param, store_param_remainders):
        assert store_param_remainders is False
        local = getattr(param, "_local_tensor", param)
        self.state[param]["exp_avg"] = torch.zeros(local.shape)
        self.state[param]["master_param"] = local.dequantize(torch.float32)

    def set_scaled_state(self, param, state_name, unscaled_state):
        assert unscaled_state.dtype == torch.float32
        self.state[param][state_name].copy_(unscaled_state)


@contextlib.contextmanager
def quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    before = State.enabled, State.preserve
    State.enabled, State.preserve = enabled, preserve_high_precision_init_val
    try:
        yield
    finally:
        State.enabled, State.preserve = before


def install():
    """Put the double where `import transformer_engine.pytorch` looks."""
    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    common, recipe = types.ModuleType("transformer_engine.common"), types.ModuleType("transformer_engine.common.recipe")
    pytorch.quantized_model_init, pytorch.Linear = quantized_model_init, Linear
    recipe.Float8CurrentScaling = recipe.DelayedScaling = type("Recipe", (), {})
    package.pytorch, package.common, common.recipe = pytorch, common, recipe
    for name, module in {
        "transformer_engine": package,
        "transformer_engine.pytorch": pytorch,
        "transformer_engine.common": common,
        "transformer_engine.common.recipe": recipe,
    }.items():
        sys.modules[name] = module

"""A double of what this package touches of TransformerEngine: its names, shapes and order of events.

Per-tensor, block-wise and MX tensors, a layer and the optimizer, without kernels. `te_sources` runs the same tests on
TransformerEngine's own files where they are at hand.
"""

import contextlib
import sys
import types
from types import MethodType

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.helpers.te_kernels import adam, by_blocks, decoded, encoded, product, scale_of

aten = torch.ops.aten
E4M3 = "DType.kFloat8E4M3"


class Quantizer:
    rowwise_usage = columnwise_usage = True

    def __call__(self, tensor):
        return self.quantize(tensor)

    def copy(self):
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)  # scale and amax are shared
        return twin


class Float8Quantizer(Quantizer):
    """Delayed scaling: a scale that is there before the values."""

    def __init__(self, scale, amax, fp8_dtype):
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def _scale(self, tensor):
        return self.scale.reshape(())

    def quantize(self, tensor):
        scale = self._scale(tensor)
        return Float8Tensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            data=encoded(tensor, scale),
            fp8_scale_inv=torch.reciprocal(scale).reshape(1),
            fp8_dtype=self.dtype,
            quantizer=self,
            device=tensor.device,
        )

    def update_quantized(self, source, target):
        scale = self._scale(source)
        target._data.copy_(encoded(source, scale))
        target._scale_inv.copy_(scale.reciprocal().reshape(1))


class Float8CurrentScalingQuantizer(Float8Quantizer):
    """Current scaling: newer releases keep no scale."""

    def __init__(self, fp8_dtype, device, *, force_pow_2_scales=False):
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = fp8_dtype, force_pow_2_scales, 0.0

    def _scale(self, tensor):
        return scale_of(tensor.float().abs().max(), self.force_pow_2_scales)


class QuantizedTensor(torch.Tensor):
    """What any operator sees is dequantized, unless a class says otherwise."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def untyped_storage(self):
        return torch.UntypedStorage(0, device=self.device)

    def quantize_(self, tensor):
        self._quantizer.update_quantized(tensor, self)
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        same = func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)
        if func is aten.detach.default or same:
            return args[0].like()
        if func is aten.copy_.default and isinstance(args[0], cls):
            args[0].quantize_(args[1])
            return args[0]
        args, kwargs = pytree.tree_map_only(QuantizedTensor, lambda t: t.dequantize(), (args, kwargs))
        return func(*args, **kwargs)


class Float8Tensor(QuantizedTensor):
    """uint8 data, a scale back, and a quantizer."""

    @staticmethod
    def __new__(cls, *, shape, dtype, data, fp8_scale_inv, fp8_dtype, quantizer=None, device=None):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, strides=data.stride(), dtype=dtype, device=data.device)
        self._data, self._scale_inv, self._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        self._quantizer = quantizer.copy() if quantizer is not None else None
        self._transpose, self._transpose_invalid = None, True
        return self

    def like(self, data=None):
        data = self._data if data is None else data
        return Float8Tensor(
            shape=data.shape,
            dtype=self.dtype,
            data=data,
            fp8_scale_inv=self._scale_inv,
            fp8_dtype=self._fp8_dtype,
            quantizer=self._quantizer,
        )

    def dequantize(self, *, dtype=None):
        return decoded(self._data, self._scale_inv, dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.view.default, aten.slice.Tensor, aten.as_strided.default):
            return args[0].like(func(args[0]._data, *args[1:], **kwargs))
        if func is aten.split.Tensor:
            return [args[0].like(part) for part in func(args[0]._data, *args[1:], **kwargs)]
        if func is aten.new_zeros.default:
            fresh = args[0].like(args[0]._data.new_zeros(args[1]))
            fresh._scale_inv = args[0]._scale_inv.clone()
            return fresh
        if func is aten.copy_.default and isinstance(args[0], cls) and isinstance(args[1], cls):
            target, source = args[:2]
            target._data.copy_(source._data)
            target._scale_inv.copy_(source._scale_inv)
            return target
        return super().__torch_dispatch__(func, types_, args, kwargs)


class Float8BlockQuantizer(Quantizer):
    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=2):
        self.dtype, self.force_pow_2_scales = fp8_dtype, force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    def _parts(self, tensor):
        return by_blocks(tensor, f"{self.block_scaling_dim}d", self.force_pow_2_scales)

    def quantize(self, tensor):
        codes, scale_inv = self._parts(tensor)
        return Float8BlockwiseQTensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            rowwise_data=codes,
            rowwise_scale_inv=scale_inv,
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=self.dtype,
            quantizer=self,
            is_2D_scaled=self.block_scaling_dim == 2,
        )

    def update_quantized(self, source, target):
        codes, scale_inv = self._parts(source)
        target._rowwise_data.copy_(codes)
        target._rowwise_scale_inv.copy_(scale_inv)


class MXFP8Quantizer(Float8BlockQuantizer):
    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True):
        self.dtype = fp8_dtype

    def _parts(self, tensor):
        return by_blocks(tensor, "mx")

    def quantize(self, tensor):
        codes, scale_inv = self._parts(tensor)
        return MXFP8Tensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            rowwise_data=codes,
            rowwise_scale_inv=scale_inv,
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=self.dtype,
            quantizer=self,
            with_gemm_swizzled_scales=False,
        )


class _Blocks(QuantizedTensor):
    """Codes and scales of blocks. Neither kind can be split over ranks here: the pieces are dequantized ones."""

    @staticmethod
    def __new__(
        cls,
        *,
        shape,
        dtype,
        rowwise_data,
        rowwise_scale_inv,
        columnwise_data,
        columnwise_scale_inv,
        fp8_dtype,
        quantizer,
        device=None,
        **layout,
    ):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._fp8_dtype, self._quantizer, self._layout = fp8_dtype, quantizer.copy(), layout
        for name, value in layout.items():
            setattr(self, f"_{name}", value)
        return self

    def like(self):
        return type(self)(
            shape=self.shape,
            dtype=self.dtype,
            rowwise_data=self._rowwise_data,
            rowwise_scale_inv=self._rowwise_scale_inv,
            columnwise_data=self._columnwise_data,
            columnwise_scale_inv=self._columnwise_scale_inv,
            fp8_dtype=self._fp8_dtype,
            quantizer=self._quantizer,
            **self._layout,
        )

    def dequantize(self, *, dtype=None):
        scales, (rows, columns) = self._rowwise_scale_inv, self._rowwise_data.shape
        if isinstance(self, MXFP8Tensor):
            wide = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
        elif self._is_2D_scaled:
            wide = scales.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        else:
            wide = scales.t().repeat_interleave(128, dim=1)
        return decoded(self._rowwise_data, wide[:rows, :columns], dtype or self.dtype)


class Float8BlockwiseQTensor(_Blocks):
    """128x128 blocks, or 1x128 with the scales of a row in a column; fp32 scales, padded to multiples of 4."""


class MXFP8Tensor(_Blocks):
    """Blocks of 32 in a row, E8M0 scales padded to multiples of [128, 4]."""


class DelayedScaling:
    pass


class Float8CurrentScaling:
    def __init__(self, power_of_2=False):
        self.fp8_quant_fwd_weight = types.SimpleNamespace(power_2_scale=power_of_2)


class Float8BlockScaling:
    def __init__(self, w_block_scaling_dim=2, power_of_2=True):
        self.w_block_scaling_dim = w_block_scaling_dim
        self.fp8_quant_fwd_weight = types.SimpleNamespace(power_2_scale=power_of_2)


class MXFP8BlockScaling:
    pass


def quantizer_for(recipe):
    name = type(recipe).__name__
    if name == "Float8CurrentScaling":
        return Float8CurrentScalingQuantizer(E4M3, "cpu", force_pow_2_scales=recipe.fp8_quant_fwd_weight.power_2_scale)
    if name == "Float8BlockScaling":
        power_of_2, dims = recipe.fp8_quant_fwd_weight.power_2_scale, recipe.w_block_scaling_dim
        return Float8BlockQuantizer(E4M3, force_pow_2_scales=power_of_2, block_scaling_dim=dims)
    if name == "MXFP8BlockScaling":
        return MXFP8Quantizer(E4M3)
    return Float8Quantizer(torch.ones(1)[0], torch.zeros(1), E4M3)


class State:
    enabled = preserve = False
    recipe = None


class Linear(nn.Module):
    """Quantizes its weight as the last act of its constructor, and attaches the copy as the real one does."""

    def __init__(self, inputs, outputs, dtype=torch.float32, device="cpu"):
        super().__init__()
        self.primary_weights_in_fp8, self.preserve = State.enabled, State.preserve
        self.quantizer = quantizer_for(State.recipe)
        self.register_parameter("weight", nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device)))
        self.reset_parameters(defer_init=torch.device(device).type == "meta")

    def reset_parameters(self, defer_init=False):
        if defer_init:
            return
        place = self.weight
        local = place._local_tensor if isinstance(place, DTensor) else place
        param = torch.empty_like(local, device="cpu") if local.is_meta else local.detach()
        nn.init.normal_(param, 0.0, 0.023)
        kept = None
        if self.primary_weights_in_fp8:
            kept = param.detach().cpu() if self.preserve else None
            param = self.quantizer(param)
        if isinstance(place, DTensor):
            local, mesh = param, place.device_mesh
            whole = DTensor.from_local(param, mesh, place.placements, shape=place.size(), stride=place.stride())
            param = nn.Parameter(whole)
            local = param._local_tensor
        else:
            local = param = nn.Parameter(param)
        if kept is not None:
            local._high_precision_init_val = kept
            local.get_high_precision_init_val = MethodType(_get, local)
            local.clear_high_precision_init_val = MethodType(_clear, local)
        self.weight = param

    def forward(self, x):
        return product(x, self.weight)


def _get(self):
    return getattr(self, "_high_precision_init_val", None)


def _clear(self):
    if hasattr(self, "_high_precision_init_val"):
        del self._high_precision_init_val


class FusedAdam(torch.optim.Optimizer):
    """Holds masters in its state; `set_scaled_state` is the way to them, and may write to what it is given."""

    def __init__(
        self, params, lr=1e-3, *, master_weights=False, master_weight_dtype=torch.float32, store_param_remainders=False
    ):
        super().__init__(params, {"lr": lr})
        self.master_weights, self.dtype = master_weights, master_weight_dtype
        self.store_param_remainders = store_param_remainders
        self._scales = {}

    def initialize_state(self, param, store_param_remainders):
        local = param._local_tensor if isinstance(param, DTensor) else param
        plain = local.dequantize(dtype=torch.float32)
        self.state[param] = {"exp_avg": torch.zeros_like(plain), "exp_avg_sq": torch.zeros_like(plain)}
        if not self.master_weights:
            return
        held = torch.empty_like(plain, dtype=self.dtype)
        if isinstance(param, DTensor):
            mesh, placements = param.device_mesh, param.placements
            held = DTensor.from_local(held, mesh, placements, shape=param.size(), stride=param.stride())
        self.state[param]["master_param"] = held
        self.set_scaled_state(param, "master_param", plain)

    def set_scaled_state(self, param, state_name, unscaled_state):
        assert unscaled_state.dtype == torch.float32
        held = self.state[param][state_name]
        held = held._local_tensor if isinstance(held, DTensor) else held
        if self.dtype != torch.float32:
            self._scales[param] = unscaled_state.abs().max() / (torch.finfo(self.dtype).max / 2)
            unscaled_state.mul_(1 / self._scales[param])
        held.copy_(unscaled_state)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                master = state["master_param"]
                moments = (state["exp_avg"], state["exp_avg_sq"])
                adam(param.grad, master, *moments, group["lr"], 0.9, 0.999, 1e-8, group["step"], 1, 1, 0.0)
                param.quantize_(master)

    def get_unscaled_state(self, param, state_name):
        held = self.state[param][state_name]
        held = held._local_tensor if isinstance(held, DTensor) else held
        return held if self.dtype == torch.float32 else held.float() * self._scales[param]


@contextlib.contextmanager
def quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    before = State.enabled, State.preserve, State.recipe
    State.enabled, State.preserve, State.recipe = enabled, preserve_high_precision_init_val, recipe
    try:
        yield
    finally:
        State.enabled, State.preserve, State.recipe = before


def remove():
    """Forget whatever was imported as TransformerEngine."""
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


def install():
    """Put the double where `import transformer_engine.pytorch` looks; return the module of tests' names."""
    remove()
    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    common, recipe = types.ModuleType("transformer_engine.common"), types.ModuleType("transformer_engine.common.recipe")
    pytorch.quantized_model_init, pytorch.Linear = quantized_model_init, Linear
    for kind in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling):
        setattr(recipe, kind.__name__, kind)
    package.pytorch, package.common, common.recipe = pytorch, common, recipe
    for name, module in {
        "transformer_engine": package,
        "transformer_engine.pytorch": pytorch,
        "transformer_engine.common": common,
        "transformer_engine.common.recipe": recipe,
    }.items():
        sys.modules[name] = module
    return sys.modules[__name__]

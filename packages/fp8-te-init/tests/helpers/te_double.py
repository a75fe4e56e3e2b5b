"""A double of what this package touches of TransformerEngine: its names, attributes and order of events, no kernels.

`test_te_real` asks the same of the real one, where it can be imported.
"""

import contextlib
import copy
import dataclasses
import itertools
import sys
import types

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import fp8_te_init as fti
from fp8_common import E4M3
from fp8_common.presets import te_current
from fp8_common.torch import casts

aten = torch.ops.aten


class Quantizer:
    """Blocks of values with a scale each; None is one scale for all, which delayed scaling has before the values."""

    def __init__(self, block=None, *, power_of_2=False, delayed=False):
        self.block, self.force_pow_2_scales, self.amax_epsilon = block, power_of_2, 0.0
        if delayed:
            self.scale = torch.ones(1)

    def __call__(self, values):
        return CLASSES[self.block](*self.parts(values), self, values.dtype)

    def parts(self, values):
        """Codes, and scales back of the blocks."""
        if hasattr(self, "scale"):
            return casts.quantize(values, self.scale, E4M3).view(torch.uint8), self.scale.reciprocal()
        made = casts.quantize_dynamic(values, E4M3, te_current(self.force_pow_2_scales), self.block)
        scale = made.scale if self.block else made.scale.view(1)
        return made.codes.view(torch.uint8), scale.reciprocal()


class QuantizedTensor(torch.Tensor):
    """Codes and scales under the names of its class; operators see dequantized values."""

    names: tuple[str, str]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes, inverse, quantizer, dtype):
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        for name, part in zip(cls.names, (codes, inverse), strict=True):
            setattr(self, name, part)
        self._fp8_dtype, self._quantizer, self._transpose_invalid = "DType.kFloat8E4M3", copy.copy(quantizer), True
        return self

    def parts(self):
        return [getattr(self, name) for name in self.names]

    def quantize_(self, values):
        for part, new in zip(self.parts(), self._quantizer.parts(values), strict=True):
            part.copy_(new)

    def dequantize(self, *, dtype=None):
        (codes, spread), (rows, columns) = self.parts(), self.shape
        for dim, size in enumerate(self._quantizer.block or ()):
            spread = spread.repeat_interleave(size, dim)
        values = codes.view(torch.float8_e4m3fn).float() * (spread[:rows, :columns] if spread.ndim > 1 else spread)
        return values.to(dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types_, args=(), kwargs=None):
        if func is aten.detach.default or (func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)):
            return cls(*args[0].parts(), args[0]._quantizer, args[0].dtype)
        if func is aten.copy_.default and isinstance(args[0], cls):
            args[0].quantize_(args[1])
            return args[0]
        args, kwargs = pytree.tree_map_only(QuantizedTensor, lambda t: t.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)


class Float8Tensor(QuantizedTensor):
    names = ("_data", "_scale_inv")


class Float8BlockwiseQTensor(QuantizedTensor):
    names = ("_rowwise_data", "_rowwise_scale_inv")


class MXFP8Tensor(Float8BlockwiseQTensor):
    pass


CLASSES = {
    None: Float8Tensor,
    (128, 128): Float8BlockwiseQTensor,
    (1, 128): Float8BlockwiseQTensor,
    (1, 32): MXFP8Tensor,
}


def recipe(name, **options):
    """Return a class of recipes; its fields are the options of its quantizers."""
    fields = [(field, type(default), default) for field, default in options.items()]
    return dataclasses.make_dataclass(name, fields, namespace={"quantizer": lambda self: Quantizer(**vars(self))})


DelayedScaling = recipe("DelayedScaling", delayed=True)
Float8CurrentScaling = recipe("Float8CurrentScaling", power_of_2=False)
Float8BlockScaling = recipe("Float8BlockScaling", block=(128, 128), power_of_2=True)
MXFP8BlockScaling = recipe("MXFP8BlockScaling", block=(1, 32), power_of_2=True)


class Linear(nn.Module):
    """Quantizes its weight as the last act of its constructor, and attaches the copy as the real one does."""

    building = (False, DelayedScaling(), False)
    __module__ = "transformer_engine.pytorch.module.linear"

    def __init__(self, inputs, outputs, dtype=torch.float32, device="cpu"):
        super().__init__()
        self.is_fp8, recipe, self.preserve = Linear.building
        self.quantizer = (recipe or DelayedScaling()).quantizer()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        if torch.device(device).type != "meta":
            self.reset_parameters()

    def reset_parameters(self):
        place = self.weight
        local = place.to_local() if isinstance(place, DTensor) else place
        values = torch.empty_like(local, device="cpu") if local.is_meta else local.detach()
        nn.init.normal_(values, 0.0, 0.023)
        made = self.quantizer(values) if self.is_fp8 else values
        if isinstance(place, DTensor):
            made = DTensor.from_local(
                made, place.device_mesh, place.placements, shape=place.shape, stride=place.stride()
            )
        self.weight = nn.Parameter(made)
        if self.is_fp8 and self.preserve:
            local = self.weight._local_tensor if isinstance(place, DTensor) else self.weight
            local._high_precision_init_val = values.detach().cpu()
            local.get_high_precision_init_val = lambda: vars(local).get("_high_precision_init_val")
            local.clear_high_precision_init_val = lambda: vars(local).pop("_high_precision_init_val", None)

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class FusedAdam(torch.optim.SGD):
    """Holds masters in its state; `set_scaled_state` is the way to them, and may write to what it is given."""

    def __init__(self, params, *, master_weights=True, dtype=torch.float32, store_param_remainders=False):
        super().__init__(params, lr=0.1)
        self.master_weights, self.dtype = master_weights, dtype
        self.store_param_remainders = store_param_remainders

    def initialize_state(self, param, store_param_remainders):
        self.state[param]["master_param"] = torch.zeros(param.shape, dtype=self.dtype)

    def set_scaled_state(self, param, name, values):
        assert values.dtype == torch.float32
        self.state[param][name].copy_(values if self.dtype == torch.float32 else values.mul_(8))


@contextlib.contextmanager
def quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    before, Linear.building = Linear.building, (enabled, recipe, preserve_high_precision_init_val)
    try:
        yield
    finally:
        Linear.building = before


@contextlib.contextmanager
def installed():
    """Put the double where `import transformer_engine.pytorch` looks."""
    recipes = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
    names = {"quantized_model_init": quantized_model_init, "Linear": Linear}
    modules = {"pytorch": names, "common.recipe": {kind.__name__: kind for kind in recipes}}
    made = {f"transformer_engine.{name}": types.SimpleNamespace(**inside) for name, inside in modules.items()}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            sys.modules.pop(name, None)


def built(preserve=True, backend="auto", dtype=torch.bfloat16, device="cpu", sizes=(24, 40, 16), **options):
    """Layers of TransformerEngine, built in the context of this package."""
    with fti.fp8_model_init(preserve_high_precision_init_val=preserve, backend=backend, **options):
        return plain(dtype, sizes, device)


def plain(dtype=torch.bfloat16, sizes=(24, 40, 16), device="cpu") -> nn.Sequential:
    """The same layers, in no context."""
    torch.manual_seed(0)
    return nn.Sequential(*(Linear(a, b, dtype, device) for a, b in itertools.pairwise(sizes)))

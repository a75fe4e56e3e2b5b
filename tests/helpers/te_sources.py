"""TransformerEngine's own Python on a CPU: its tensors, quantizers, base module and optimizer, unchanged.

Its compiled parts are replaced: the kernels by a few lines of torch that write into the same buffers, the rest by
mocks. The files are those that `import transformer_engine` would find; they are read from the path, not imported as a
package, because its `__init__` loads CUDA libraries. Written for 2.20.2.
"""

import dataclasses
import enum
import importlib
import sys
import types
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.helpers.te_double import remove
from tests.helpers.te_kernels import adam, by_blocks, decoded, encoded, product, scale_of

_loaded: dict[str, types.ModuleType] = {}


def missing() -> str | None:
    """Why there is nothing to test, or None."""
    if folder() is None:
        return "no Python sources of TransformerEngine on the path: put a release's folder there, compiled or not"
    return None


def folder() -> Path | None:
    for place in sys.path:
        found = Path(place) / "transformer_engine"
        if (found / "pytorch" / "tensor" / "float8_tensor.py").is_file():
            return found
    return None


class DType(enum.IntEnum):
    kByte, kInt32, kFloat32, kFloat16, kBFloat16 = 0, 2, 4, 5, 6
    kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = 7, 8, 10


class Mocked(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class OnCpu(TorchFunctionMode):
    """What is made on "cuda" is made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def install():
    """Put the sources where `import transformer_engine.pytorch` looks; return the module of tests' names."""
    remove()
    if not _loaded:
        _load()
    sys.modules.update(_loaded)
    return sys.modules[__name__]


def _load():
    before = set(sys.modules)
    root = folder()
    for name in ("", ".common", ".pytorch", ".pytorch.tensor", ".pytorch.tensor.storage", ".pytorch.module"):
        _package(f"transformer_engine{name}", root.joinpath(*name.split(".")[1:]))
    _package("transformer_engine.pytorch.optimizers", root / "pytorch" / "optimizers")
    sys.modules["transformer_engine.common"].decode_cudnn_version = lambda number: (9, 0, 0)
    tex = Mocked("transformer_engine_torch")
    tex.DType, tex.quantize, tex.fp8_transpose, tex.create_empty_quantized_tensor = DType, quantize, transpose, empty
    tex.multi_tensor_adam, tex.multi_tensor_adam_fp8 = multi_adam, adam_fp8
    pydantic, dataclass = types.ModuleType("pydantic"), types.ModuleType("pydantic.dataclasses")
    dataclass.dataclass = dataclasses.dataclass
    pytorch = "transformer_engine.pytorch"
    compiled = [f"{pytorch}.{name}" for name in ("onnx_extensions", "triton", "triton.pad", "cpp_extensions")]
    replaced = {name: Mocked(name) for name in (*compiled, f"{pytorch}.cpp_extensions.gemm")}
    replaced |= {"transformer_engine_torch": tex, "pydantic": pydantic, "pydantic.dataclasses": dataclass}
    hidden = {name: sys.modules.get(name) for name in ("pydantic", "pydantic.dataclasses")}
    sys.modules.update(replaced)
    names = ("tensor.float8_tensor", "tensor.float8_blockwise_tensor", "tensor.mxfp8_tensor", "quantization")
    for name in (*names, "module.base", "optimizers.fused_adam"):
        importlib.import_module(f"{pytorch}.{name}")
    found = {name for name in set(sys.modules) - before if name.startswith("transformer_engine")}
    _loaded.update({name: sys.modules[name] for name in found})
    for name, module in hidden.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    _on_a_hopper()
    package = _loaded[pytorch]
    package.quantized_model_init = _loaded[f"{pytorch}.quantization"].quantized_model_init
    package.Linear = make_linear()


def _package(name, place):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(place)]
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def _on_a_hopper():
    """Answer what is asked about the device: one whose products need transposed codes."""
    for module in _loaded.values():
        if "is_non_tn_fp8_gemm_supported" in module.__dict__:
            module.is_non_tn_fp8_gemm_supported = lambda: False
    mx = _loaded["transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage"]
    mx._FromMXFP8Func.forward = staticmethod(dequantize_mx)  # it moves the tensor to the GPU
    quantization = _loaded["transformer_engine.pytorch.quantization"]
    quantization.check_mxfp8_support = lambda: (False, "")
    quantization.get_device_compute_capability = lambda: (9, 0)


def __getattr__(name):
    """Give tests the real classes by their names."""
    for module in ("tensor.float8_tensor", "tensor.float8_blockwise_tensor", "tensor.mxfp8_tensor", "quantization"):
        found = getattr(_loaded.get(f"transformer_engine.pytorch.{module}"), name, None)
        if found is not None:
            return found
    if name == "E4M3":
        return _loaded["transformer_engine.pytorch.constants"].DType.kFloat8E4M3
    if name == "Linear":
        return _loaded["transformer_engine.pytorch"].Linear
    raise AttributeError(name)


def FusedAdam(params, **options):
    with OnCpu():
        return _loaded["transformer_engine.pytorch.optimizers.fused_adam"].FusedAdam(params, **options)


def make_linear() -> type:
    base = _loaded["transformer_engine.pytorch.module.base"].TransformerEngineBaseModule
    quantization = _loaded["transformer_engine.pytorch.quantization"]

    class Linear(base):
        """A layer on the real base class: its registration, its (deferred) initialisation, its quantizers."""

        def __init__(self, inputs, outputs, dtype=torch.float32, device="cpu"):
            with mock.patch("torch.cuda.is_available", return_value=True):
                super().__init__()
            weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
            self.register_parameter("weight", weight, init_fn=_start, fp8_meta_index=1)
            if self.primary_weights_in_fp8:
                self.quantizers["scaling_fwd"] = [None, quantizer_for(quantization), None]
            self.reset_parameters(defer_init=torch.device(device).type == "meta")

        def reset_parameters(self, defer_init=False):
            with OnCpu():
                super().reset_parameters(defer_init)

        def forward(self, x):
            return product(x, self.weight)

    return Linear


def _start(weight):
    torch.nn.init.normal_(weight, 0.0, 0.023)


def quantizer_for(quantization):
    recipe = quantization.FP8GlobalStateManager.get_fp8_recipe()
    e4m3, name = _loaded["transformer_engine.pytorch.constants"].DType.kFloat8E4M3, type(recipe).__name__
    names = sys.modules[__name__]
    if name == "DelayedScaling":
        return names.Float8Quantizer(torch.ones(1)[0], torch.zeros(1), e4m3)
    if name == "Float8CurrentScaling":
        power_2 = recipe.fp8_quant_fwd_weight.power_2_scale
        return names.Float8CurrentScalingQuantizer(e4m3, "cpu", force_pow_2_scales=power_2)
    if name == "Float8BlockScaling":
        weight = recipe.fp8_quant_fwd_weight
        return names.Float8BlockQuantizer(
            e4m3,
            rowwise=True,
            columnwise=True,
            force_pow_2_scales=weight.power_2_scale,
            block_scaling_dim=recipe.w_block_scaling_dim,
        )
    return names.MXFP8Quantizer(e4m3)


# ---------------------------------------------------------------- kernels


def quantize(source, quantizer, target=None, noop=None):
    kind = type(quantizer).__name__
    if kind in ("MXFP8Quantizer", "Float8BlockQuantizer"):
        return _put_blocks(source, quantizer, target, is_mx=kind == "MXFP8Quantizer")
    if kind == "Float8Quantizer":
        scale = quantizer.scale.reshape(())
        quantizer.amax.copy_(_amax(source))
    else:
        amax = _amax(source)
        if quantizer.with_amax_reduction:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        scale = scale_of(amax, quantizer.force_pow_2_scales)
    codes, inverse = encoded(source, scale), scale.reciprocal().reshape(1)
    if target is None:
        return sys.modules[__name__].Float8Tensor(
            shape=source.shape,
            dtype=source.dtype,
            data=codes,
            fp8_scale_inv=inverse,
            fp8_dtype=quantizer.dtype,
            quantizer=quantizer,
            device=source.device,
            data_transpose=transpose(codes) if quantizer.columnwise_usage else None,
        )
    target._data.copy_(codes)
    target._scale_inv.copy_(inverse)
    if target._transpose is not None:
        target._transpose, target._transpose_invalid = transpose(codes), False
    return target


def _amax(values):
    return values.float().abs().max() if values.numel() else torch.zeros(())


def _put_blocks(source, quantizer, target, *, is_mx):
    layout = "mx" if is_mx else f"{quantizer.block_scaling_dim}d"
    codes, inverse = by_blocks(source, layout, is_mx or quantizer.force_pow_2_scales)
    columns = by_blocks(source, "mx columns") if is_mx and quantizer.columnwise_usage else (None, None)
    if target is not None:
        target._rowwise_data.copy_(codes)
        target._rowwise_scale_inv.copy_(inverse)
        if columns[0] is not None:
            target._columnwise_data.copy_(columns[0])
            target._columnwise_scale_inv.copy_(columns[1])
        return target
    names = sys.modules[__name__]
    kind = names.MXFP8Tensor if is_mx else names.Float8BlockwiseQTensor
    options = {"with_gemm_swizzled_scales": False} if is_mx else {"is_2D_scaled": layout == "2d"}
    return kind(
        shape=source.shape,
        dtype=source.dtype,
        rowwise_data=codes,
        rowwise_scale_inv=inverse,
        columnwise_data=columns[0],
        columnwise_scale_inv=columns[1],
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        device=source.device,
        **options,
    )


def dequantize_mx(context, tensor, dtype):
    by_row = tensor._rowwise_data is not None
    data = tensor._rowwise_data if by_row else tensor._columnwise_data
    scales = tensor._rowwise_scale_inv if by_row else tensor._columnwise_scale_inv
    wide = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1 if by_row else 0)
    return decoded(data, wide[: data.shape[0], : data.shape[1]], dtype)


def transpose(codes, dtype=None, out=None):
    return codes.t().contiguous()


def empty(quantizer, shape, dtype, device, pin_memory):
    return quantize(torch.zeros(shape, dtype=dtype, device=device), quantizer.copy())


def multi_adam(chunk, noop, lists, *options):
    for tensors in zip(*lists, strict=True):
        adam(*tensors, *options)


def adam_fp8(chunk, noop, lists, *options):
    gradients, codes, firsts, seconds, masters, scales, amaxes, inverses = lists
    multi_adam(chunk, noop, [gradients, masters, firsts, seconds], *options[:-1])
    for code, master, scale, amax, inverse in zip(codes, masters, scales, amaxes, inverses, strict=True):
        code.copy_(encoded(master, scale))
        amax.copy_(master.abs().max())
        inverse.copy_(scale.reciprocal().reshape(inverse.shape))

"""Beside torchao's own layers: FP8 communication under them, and MXFP8 matmuls that equal theirs."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fp8_torch_fsdp as f8
from fp8_common import RECIPES
from fp8_common.presets import mx
from fp8_common.torch import dequantize_mx, quantize_mx
from fp8_common.torch.numerics import scale_inv_of_e8m0
from fp8_common.torch_layers.linear.matmul import swizzled
from fsdp_models import decoded, seeded, shard
from fsdp_training import batch
from tests.helpers.ranks import on_ranks

pytest.importorskip("torchao", reason="torchao is not installed")


def mx_matmul(x, weight, mode="rceil"):
    """Return torchao's emulated MX matmul. Its own emulated mode calls a CUDA kernel, its parts do not."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    casts = config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH
    formats, rule = [torch.float8_e4m3fn] * 3, config.ScaleCalculationMode[mode.upper()]
    return mx_mm.apply(x, weight, *formats, 32, KernelPreference.EMULATED, *casts, rule, False)


# ---------------------------------------------------------------- communication


WIDTH = 96


def block():
    """101 and 352 rows are no multiple of 2 or 3."""
    layers = nn.Linear(WIDTH, 352), nn.GELU(), nn.Linear(352, 101), nn.Linear(101, WIDTH)
    return nn.Sequential(nn.LayerNorm(WIDTH), *layers)


def of_torchao(layer, name=""):
    return isinstance(layer, nn.Linear) and layer.weight.shape == (352, WIDTH)


def with_float8():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model, config = nn.Sequential(block(), block()), Float8LinearConfig(emulate=True)
    return convert_to_float8_training(model, config=config, module_filter_fn=of_torchao)


def with_mx():
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    class OnACPU(MXFP8Linear):
        def forward(self, x):
            y = mx_matmul(x, self.weight)
            return y + self.bias.to(y.dtype)

    model = nn.Sequential(block(), block())
    for layer in filter(of_torchao, model.modules()):  # whose sizes allow it
        layer.__class__ = OnACPU
    return model


LAYERS = {"float8": with_float8, "mx": with_mx}


@pytest.mark.matrix("each", name=list(LAYERS), ranks=[2, 3])
@on_ranks(lambda given: given["ranks"])
def test_layers_of_torchao_compute_with_decoded_weights(rank, ranks, name):
    twin, x, gradients = seeded(LAYERS[name]).bfloat16(), batch(rank, 0, (96, WIDTH)).bfloat16(), []
    for own in twin.parameters():
        own.data = decoded(own.data).bfloat16() if own.ndim > 1 else own.data
    for compressed in (True, False):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = shard(seeded(LAYERS[name]), mp_policy=policy)
        f8.compress_communication(model, gradients=compressed)
        y = model(x)
        assert torch.equal(y, twin(x))
        (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for ours, wide in zip(*gradients, strict=True):
        error = (ours - wide).norm() / wide.norm()
        assert (0.005 < error < 0.08) if wide.ndim > 1 else error < 1e-6


# ---------------------------------------------------------------- matmuls


def recipe_of(mode):
    cast = dataclasses.replace(RECIPES["mxfp8"].input, policy=mx(mode))
    return f8.Recipe(name=f"mxfp8_{mode}", input=cast, weight=cast, grad_output=cast)


def torchao_step(x, weight, grad, mode):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = mx_matmul(x, weight, mode)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


def our_step(x, weight, grad, mode):
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype))
    model[0].weight.data.copy_(weight)
    f8.convert_to_float8_training(model, recipe=recipe_of(mode))
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(grad)
    return y.detach(), x.grad, model[0].weight.grad


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["normal", "lognormal columns"])
def test_all_three_matmuls_equal_torchaos_on_the_same_weight(mode, spread):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    weight = (0.02 * draw(96, 160) * (spread * draw(160)).exp()).bfloat16()
    x, grad = draw(64, 160).bfloat16(), draw(64, 96).bfloat16()
    decoded = dequantize_mx(*quantize_mx(weight, "e4m3", mode), "e4m3", torch.bfloat16)
    wanted = torchao_step(x, decoded, grad, mode)
    for given in (weight, decoded):  # the other plane of a weight is derived from the one that travels
        for name, ours, theirs in zip(("y", "dx", "dw"), our_step(x, given, grad, mode), wanted, strict=True):
            assert torch.equal(ours, theirs), name
    y, _, dw = torchao_step(x, weight, grad, mode)
    assert torch.equal(y, wanted[0])
    assert torch.equal(dw, wanted[2])


@pytest.mark.parametrize("shape", [(128, 4), (300, 5), (16, 32)])
def test_scales_lie_as_torchao_lays_them_for_blackwell(shape):
    from torchao.prototype.mx_formats.utils import to_blocked

    codes = torch.randint(0, 255, shape, dtype=torch.uint8)
    theirs = to_blocked(codes, use_triton_kernel=False)
    assert torch.equal(swizzled(scale_inv_of_e8m0(codes)).view(torch.uint8), theirs.flatten())

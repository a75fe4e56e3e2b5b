"""Published weights that multiply FP8 by FP8: layers, and stacks of experts one expert at a time."""

import pytest
import torch
import torch.nn.functional as F

from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.function import LinearSpec, fp8_linear
from fp8_common.torch_layers.linear.operand import quantize_operand
from fp8_te_init.published import load_published
from fp8_te_init.published.weight import E4M3
from published_files import MOE, ODD, tensors_of, values_of, write
from published_models import Llama
from tests.helpers.tensors import same

LAYER = "model.layers.0.self_attn.q_proj"


def loaded(folder, config=ODD, **options):
    model = Llama(config)
    load_published(model, folder, **options)
    return model


@pytest.mark.parametrize("layout", ["deepseek", "compressed-channel", "modelopt"])
def test_the_fp8_mode_multiplies_what_engines_would(tmp_path, layout):
    """Dynamic activations and gradients, quantized by the recipe, times the file's codes and scales."""
    folder = write(tmp_path, ODD, layout)
    layer = loaded(folder, multiply="fp8").get_submodule(LAYER)
    x = torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    config = layer.spec.config
    wide = values_of(tensors_of(folder), f"{LAYER}.weight", torch.float32)
    expected = (quantize_operand(x.detach(), config.input).dequantize() @ wide.t()).bfloat16()
    assert torch.allclose(y, expected, rtol=2**-7, atol=1e-3)
    decoded = F.linear(x, layer.weight.dequantize())
    assert 1e-3 < float((y - decoded).detach().norm() / decoded.detach().norm()) < 0.1
    assert 1e-3 < float((x.grad - grad @ layer.weight.dequantize()).norm() / x.grad.norm()) < 0.12
    if layout == "deepseek":
        grads = quantize_operand(grad, config.grad_output).dequantize()
        assert torch.allclose(x.grad, (grads @ wide).bfloat16(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("layout", ["deepseek", "compressed-channel", "modelopt"])
def test_the_fp8_mode_multiplies_by_each_expert_as_a_layer_would(tmp_path, layout):
    """Outputs and gradients are those of the experts' own loop over published layers that hold one expert each."""
    folder = write(tmp_path, MOE, layout)
    model = loaded(folder, MOE, multiply="fp8")
    experts, tensors = model.model.layers[0].mlp.experts, tensors_of(folder)
    x = torch.randn(24, 256, dtype=torch.bfloat16)
    chosen, weights = torch.arange(48).view(24, 2) % 4, torch.rand(24, 2).bfloat16()  # the fifth gets no token
    results = []
    for loop in (experts, AloneExperts(tensors, experts)):
        own = x.clone().requires_grad_()
        y = loop(own, chosen, weights)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), own.grad))
    assert all(map(same, *results))
    decoded = loaded(folder, MOE).model.layers[0].mlp.experts(x, chosen, weights)
    assert 1e-3 < float((results[0][0] - decoded).norm() / decoded.norm()) < 0.15


class AloneExperts:
    """The loop over experts, each with operands of its own matrices."""

    def __init__(self, tensors, experts):
        self.spec = experts.spec
        self.stacks = {name: getattr(experts, name) for name in ("gate_up_proj", "down_proj")}
        self.tensors = tensors

    def multiply(self, x, name, expert):
        names = {"gate_up_proj": ("gate_proj", "up_proj")}.get(name, (name,))
        keys = [f"model.layers.0.mlp.experts.{expert}.{one}.weight" for one in names]
        codes = torch.cat([self.tensors[key] for key in keys])
        assert same(codes.view(torch.uint8), self.stacks[name].codes[expert].view(torch.uint8))
        scales = [scales_of(self.tensors, key, self.spec.config.weight.granularity) for key in keys]
        block = (128, 128) if self.spec.config.weight.granularity == "blockwise_128x128" else None
        operand = Quantized(codes, torch.cat(scales), E4M3, block)
        spec = LinearSpec(self.spec.config, lambda weight, record, both: operand)
        return fp8_linear(x, codes.bfloat16(), spec)

    def __call__(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            token, place = torch.where(chosen == expert)
            gate, up = self.multiply(x[token], "gate_up_proj", int(expert)).chunk(2, dim=-1)
            y = self.multiply(F.silu(gate) * up, "down_proj", int(expert)) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


def scales_of(tensors, key, granularity):
    """Return float32 scales as operands have them: blocks, or one for each row."""
    layer = key.removesuffix(".weight")
    names = (f"{layer}.weight_scale_inv", f"{layer}.weight_scale")
    inv = next(tensors[name] for name in names if name in tensors).float()
    return inv if granularity == "blockwise_128x128" else inv.reshape(-1, 1).expand(len(tensors[key]), 1)

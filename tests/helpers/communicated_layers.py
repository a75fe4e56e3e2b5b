"""Layers of all kinds whose communication is compressed, and what has to hold for each."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8_common
import fp8_torch_fsdp as f8

WIDTH = 96
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def decoded(weight):
    """Return what a layer gets in the place of `weight`, by the definition in NumPy: bfloat16, codes, bfloat16."""
    if weight.ndim < 2:
        return weight.detach().bfloat16()
    rows = weight.detach().bfloat16().float().reshape(len(weight), -1).numpy()
    values = fp8_common.dequantize_mx(*fp8_common.quantize_mx(rows, "e4m3", "rceil"), "e4m3")
    return torch.from_numpy(values.astype(np.float32)).view(weight.shape).bfloat16()


class Experts(nn.Module):
    """Stacked weights [experts, out, in]; tokens go round-robin."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, WIDTH, WIDTH) * WIDTH**-0.5)

    def forward(self, x):
        return torch.cat([F.linear(part, own) for part, own in zip(x.chunk(6), self.weight, strict=True)])


class Images(nn.Module):
    """Tokens as images of 4 x 6 pixels; a row of the convolution has 36 values, no multiple of 32."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x.view(-1, 4, 4, 6)).view(x.shape)


def block():
    # 101 and 352 rows are no multiple of 2 or 3
    layers = nn.Linear(WIDTH, 352), nn.GELU(), nn.Linear(352, 101), nn.Linear(101, WIDTH)
    return nn.Sequential(nn.LayerNorm(WIDTH), *layers)


KINDS = {
    "plain": lambda: nn.Sequential(block(), block()),
    "embedding and head": lambda: nn.Sequential(nn.Embedding(67, WIDTH), block(), nn.Linear(WIDTH, 67)),
    "convolution": lambda: nn.Sequential(Images(), block()),
    "experts": lambda: nn.Sequential(block(), Experts()),
}


def build(kind):
    torch.manual_seed(0)
    return (KINDS[kind] if isinstance(kind, str) else kind)()


def shard(model, **options):
    for part in model:
        fully_shard(part, mp_policy=POLICY, **options)
    return fully_shard(model, mp_policy=POLICY, **options)


def batch(kind, rank):
    generator = torch.Generator().manual_seed(rank)
    if kind == "embedding and head":
        return torch.randint(67, (96,), generator=generator)
    return torch.randn(96, WIDTH, generator=generator).bfloat16()


def backward(model, x):
    """Run a step that gives every gradient its own size; return the output."""
    y = model(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y.detach()


def decoded_model(kind):
    """The model that a gather in codes gives its layers."""
    reference = build(kind).bfloat16()
    for own, weight in zip(reference.parameters(), build(kind).parameters(), strict=True):
        own.data = decoded(weight)
    return reference


def layers_of_others(rank, ranks, kind):
    everything = {"parameters": ["*"]}  # embeddings and heads too
    reference, outputs, gradients = decoded_model(kind), [], []
    for options in (everything, everything, {**everything, "gradients": False}):
        model = shard(build(kind))
        f8.compress_communication(model, **options)
        outputs.append(backward(model, batch(kind, rank)))
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    return outputs[0], reference(batch(kind, rank)), *gradients


def check_layers(results):
    """Check what `layers_of_others` returned on each rank."""
    for y, expected, first, again, wide in results:
        assert torch.equal(y, expected)
        for name, gradient in first.items():
            assert torch.equal(gradient, again[name]), f"{name}: the bits of a gradient repeat"
            error = ((gradient - wide[name]).norm() / wide[name].norm()).item()
            assert (0.005 < error < 0.08) if gradient.ndim > 1 else error < 1e-6, f"{name}: {error}"

"""Plain tensor-parallel layers that cast their whole weight at each forward, to compare FP8 primary weights with."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fp8_te_init as fti
from fp8_te_init._shards import place_of
from fp8_te_init._tensor_parallel import cut, parallel_linear


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def slice_of(whole, like):
    return whole[place_of(like).inside()]


def distribute_like(value, like):
    """Return a DTensor of any placements, FSDP2's on top of tensor parallelism too, from a whole tensor."""
    whole = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(slice_of(value, like).clone(), like.device_mesh, like.placements, **whole)


class ParallelTwin(nn.Linear):
    """Plain weights; each forward casts the whole weight and multiplies this rank's part of the codes."""

    recipe: str

    def forward(self, x):
        whole = nn.Linear(self.in_features, self.out_features, bias=False, dtype=self.weight.dtype)
        with torch.no_grad():
            whole.weight.copy_(whole_of(self.weight))
        layer = fti.convert_linear(whole, recipe=self.recipe)
        return parallel_linear(layer._local_product, x, Cast.apply(self.weight, layer.weight), self.bias)


class Cast(torch.autograd.Function):
    """This rank's part of a whole FP8 weight in the place of a plain part, which gets its gradient."""

    @staticmethod
    def forward(ctx, plain, whole):
        return cut(whole, plain.detach(), None)

    @staticmethod
    def backward(ctx, grad):
        return grad, None

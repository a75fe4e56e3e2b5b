"""What TransformerEngine's kernels compute, in a few lines of torch, for its double and for its own Python on a CPU."""

import torch

FULL = 448.0
BLOCKS = {"2d": (128, 128), "1d": (1, 128), "mx": (1, 32), "mx columns": (32, 1)}
PADDING = {"2d": (1, 4), "1d": (1, 4), "mx": (128, 4), "mx columns": (4, 128)}


def encoded(values, scale):
    """uint8 codes."""
    return (values.float() * scale).clamp(-FULL, FULL).to(torch.float8_e4m3fn).view(torch.uint8)


def decoded(codes, scale_inv, dtype):
    return (codes.view(torch.float8_e4m3fn).float() * scale_inv).to(dtype)


def scale_of(amax, power_of_2=False):
    scale = torch.where(amax > 0, FULL / amax, torch.ones_like(amax))
    return torch.exp2(torch.frexp(scale).exponent - 1.0) if power_of_2 else scale


def by_blocks(values, layout, power_of_2=True):
    """uint8 codes, and the scales back in the shape and order in which the real kernels leave them."""
    block, padding = BLOCKS[layout], PADDING[layout]
    rows, columns = values.shape
    wide = torch.nn.functional.pad(values.float(), (0, -columns % block[1], 0, -rows % block[0]))
    tiles = wide.view(wide.shape[0] // block[0], block[0], wide.shape[1] // block[1], block[1])
    scale = scale_of(tiles.abs().amax((1, 3)), power_of_2)
    codes = encoded(tiles, scale[:, None, :, None]).view(wide.shape)[:rows, :columns].contiguous()
    inverse = scale.reciprocal()
    if layout == "1d":
        inverse = inverse.t()
    if layout.startswith("mx"):
        inverse = (torch.frexp(inverse).exponent + 126).to(torch.uint8)
    pads = (0, -inverse.shape[1] % padding[1], 0, -inverse.shape[0] % padding[0])
    return codes, torch.nn.functional.pad(inverse, pads).contiguous()


def adam(gradient, parameter, first, second, lr, beta1, beta2, eps, step, mode, bias_correction, decay):
    """One step of AdamW, in place, in the order of arguments of the real kernel."""
    first.lerp_(gradient.float(), 1 - beta1)
    second.lerp_(gradient.float().square(), 1 - beta2)
    size = (second / (1 - beta2**step)).sqrt() + eps
    parameter.sub_(lr * (first / (1 - beta1**step) / size + decay * parameter))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.dequantize(), grad.t() @ x


def product(x, weight):
    """x @ weight.T for a quantized weight, whose gradient is dense."""
    return _Product.apply(x, weight)

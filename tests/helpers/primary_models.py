"""Models with FP8 primary weights, their masters, and what must hold of both, on one rank and on several."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fp8_te_init as fti
from fp8_common.torch.compat import local_of
from tests.helpers.sharded_models import WIDTHS, mlp, shard

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


def plain(seed=0, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.GELU(), nn.Linear(40, 16, dtype=dtype))


def built(recipe=None, seed=0, dtype=torch.float32, *, preserve=True, **options) -> nn.Sequential:
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve, **options):
        return plain(seed, dtype)


def deep(recipe=None, seed=0, dtype=torch.float32, *, widths=WIDTHS, preserve=True, device="cpu") -> nn.Sequential:
    """Layers whose rows are uneven over ranks."""
    torch.manual_seed(seed)
    with torch.device(device), fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return mlp(widths, dtype)


def plain_deep(seed=0, dtype=torch.float32, widths=WIDTHS) -> nn.Sequential:
    torch.manual_seed(seed)
    return mlp(widths, dtype)


def sharded(world_size, *args, **options) -> nn.Sequential:
    return shard(deep(*args, **options), world_size)


def masters_for(model, cls=torch.optim.SGD, *, seed=True, **options) -> fti.MasterOptimizer:
    """An optimizer of all parameters, seeded unless said otherwise."""
    optimizer = fti.MasterOptimizer(cls, model.parameters(), **({"lr": 0.1} | options))
    if seed:
        fti.seed_masters(optimizer, model)
    return optimizer


def loss_of(model, rows=8) -> torch.Tensor:
    return (model(torch.ones(rows, 24, dtype=next(model.parameters()).dtype)).float() - 1).square().mean()


def step(model, *optimizers) -> float:
    loss = loss_of(model)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    return loss.item()


def weights(model) -> list[nn.Parameter]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def masters(model, optimizer) -> list[torch.Tensor]:
    return [optimizer.master_of(weight) for weight in weights(model)]


def codes(model) -> list[torch.Tensor]:
    """The codes of the rows that are held here."""
    return [local_of(weight).state.own_codes.clone() for weight in weights(model)]


def are_codes_of_masters(model, optimizer) -> bool:
    own = [local_of(weight).state for weight in weights(model)]
    made = [state.quantized(local_of(one)) for state, one in zip(own, masters(model, optimizer), strict=True)]
    return equal(made, codes(model))


def whole(tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def equal(ours, theirs) -> bool:
    """Whether tensors of two lists are equal in every bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def rounded(values, recipe="tensorwise") -> torch.Tensor:
    """Values after quantization as a new weight."""
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=values.dtype)
    with torch.no_grad():
        layer.weight.copy_(values)
    return fti.convert_linear(layer, recipe=recipe).weight.dequantize()

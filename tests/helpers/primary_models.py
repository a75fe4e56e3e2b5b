"""Models with FP8 primary weights, and what trains their masters, on one rank and on several."""

import torch
from torch import nn

import fp8_te_init as fti
from fp8_common.torch_layers.linear.function import fp8_linear
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
    with torch.device(device), fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return plain_deep(seed, dtype, widths)


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


class Tied(nn.Module):
    """`first` says what is built first, and gives the other its weight."""

    def __init__(self, first="linear", size=16):
        super().__init__()
        other = nn.Embedding(size, 16) if first == "embedding" else nn.Linear(16, size, bias=False)
        self.other, self.head = other, nn.Linear(16, size, bias=False)
        if first == "head":
            self.other = nn.Embedding(size, 16)
            self.other.weight = self.head.weight
            self.other.weight = self.head.weight  # again
        else:
            self.head.weight = self.other.weight

    def forward(self, x):
        x = self.other(x.argmax(-1)) if isinstance(self.other, nn.Embedding) else self.other(x)
        return self.head(torch.tanh(x))


def tied(seed=0, first="linear", recipe=None, *, size=16, converted=False):
    torch.manual_seed(seed)
    if converted:
        return fti.convert_linear(Tied(first, size), recipe=recipe)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return Tied(first, size)


def train_tied(model, optimizer):
    model(torch.eye(16)[:3]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class CastAtEachForward(nn.Linear):
    """Plain weights that each forward casts with `spec`, TransformerEngine's method without FP8 primary weights."""

    def forward(self, x):
        output = fp8_linear(x, self.weight, self.spec)
        return output if self.bias is None else output + self.bias.to(output.dtype)

"""Models, shards and training loops that the tests of several ranks share; imported in every rank by its file."""

import itertools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# rows of the layers: uneven over 2 and 3 ranks; 2 rows over 3 or 4 ranks leave a rank without any
WIDTHS = (24, 40, 7, 2, 24)


def mlp(widths=WIDTHS, dtype=torch.float32, bias=True) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=bias, dtype=dtype) for a, b in itertools.pairwise(widths)))


def shard(model: nn.Sequential, world_size: int, **options) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batches(rank: int, steps: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(16, 24, generator=generator).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - 1).square().mean()


def train(model, optimizer, rank, steps, dtype=torch.float32) -> list[float]:
    return train_on(model, optimizer, batches(rank, steps, dtype))


def train_on(model, optimizer, inputs) -> list[float]:
    losses = []
    for x in inputs:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

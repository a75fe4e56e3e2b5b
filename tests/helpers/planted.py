"""Models with one violation each, which `certify` has to find; a module, so that other processes can import it."""

import torch
import torch.distributed as dist
from torch import nn


class Planted(nn.Module):
    """Two layers with one between them that breaks a rule."""

    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 6)
        self.middle = middle
        self.down = nn.Linear(6, 6)

    def forward(self, x):
        return self.down(self.middle(self.up(x)))


class Keep(nn.Module):
    def forward(self, x):
        return x


class Peek(nn.Module):
    """Adds a little of the next token."""

    def forward(self, x):
        return x + 0.125 * torch.roll(x, -1, 1) * (torch.arange(x.shape[1]) < x.shape[1] - 1)[:, None]


class BatchScale(nn.Module):
    """Divides by the largest value of the batch at each token."""

    def forward(self, x):
        return x / x.detach().abs().amax((0, 2), keepdim=True)


class ReadPadding(nn.Module):
    """Adds the mean over tokens, padding included."""

    def forward(self, x):
        return x + x.mean(1, keepdim=True)


class WorldConstant(nn.Module):
    """Adds a constant that depends on the rank."""

    def forward(self, x):
        return x + (2.0**-10 * dist.get_rank() if dist.is_initialized() else 0.0)


class ReadSize(nn.Module):
    """Divides by the number of examples that it is given."""

    def forward(self, x):
        return x * len(x)


class Forgets(nn.Module):
    """Counts its calls in a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls / 16)

"""Models with one violation each, which `certify` has to find; a module, so that other processes can import it."""

import torch
import torch.distributed as dist
from torch import nn

from fp8_common.torch.certify import Function


class Planted(nn.Module):
    """Two layers with one between them, a module or a function, that breaks a rule."""

    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle = middle if isinstance(middle, nn.Module) else Function(middle)

    def forward(self, x):
        return self.down(self.middle(self.up(x)))


def peek(x):
    """Add a little of the next token."""
    return x + 0.125 * torch.roll(x, -1, 1) * (torch.arange(x.shape[1]) < x.shape[1] - 1)[:, None]


def divide_by_the_largest_of_the_batch(x):
    return x / x.detach().abs().amax((0, 2), keepdim=True)


def add_the_mean_over_tokens(x):
    """Padding included."""
    return x + x.mean(1, keepdim=True)


def add_a_constant_of_the_rank(x):
    return x + (2.0**-10 * dist.get_rank() if dist.is_initialized() else 0.0)


def multiply_by_the_number_of_examples(x):
    return x * len(x)


class Forgets(nn.Module):
    """Counts its calls in a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls / 16)

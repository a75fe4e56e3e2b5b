"""Optimizers that hold parameters which a conversion has replaced."""

import pytest
import torch
from torch import nn

from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding.replaced import MARK, mark_replaced, watch_optimizers


def test_an_optimizer_with_a_replaced_parameter_raises_in_step():
    kept, replaced = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([kept, replaced], lr=1.0)
    mark_replaced(replaced, "convert()")
    kept.grad = torch.ones(2)
    with pytest.raises(Fp8Error, match=r"holds 1 of 2 parameters .*: convert\(\) replaced them"):
        optimizer.step()
    assert torch.equal(kept, torch.ones(2))
    replaced.grad = torch.ones(2)  # somebody else still uses it
    optimizer.step()
    replaced.grad = None
    replaced.requires_grad_(False)
    optimizer.step()
    torch.optim.SGD([kept], lr=1.0).step()


def test_a_tensor_subclass_may_know_by_itself_that_it_was_replaced():
    class Knows(nn.Parameter):
        replaced = None

    setattr(Knows, MARK, property(lambda self: self.replaced))
    parameter = Knows(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    watch_optimizers()
    optimizer.step()
    Knows.replaced = "fully_shard"
    with pytest.raises(Fp8Error, match="fully_shard replaced them"):
        optimizer.step()

"""Linear layers whose weight is stored transposed, as Transformers' `Conv1D`: the numbers of `Float8Linear`."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8

# The class is told by the module that its forward comes from, which is not installed here.
NAMES = {"__name__": "transformers.pytorch_utils", "nn": nn, "torch": torch}
exec(
    """
class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * torch.logspace(-2, 2, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)
""",
    NAMES,
)
Conv1D = NAMES["Conv1D"]
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "tensorwise_delayed"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_numbers_are_those_of_a_linear_layer(recipe):
    torch.manual_seed(0)
    layer = Conv1D(48, 160)
    linear = nn.Linear(160, 48)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.t())
        linear.bias.copy_(layer.bias)
    low, wanted = (f8.convert_to_float8_training(one, recipe=recipe) for one in (layer, linear))
    assert isinstance(low, Conv1D)
    x = torch.randn(2, 5, 160)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [one(own) for one, own in zip((low, wanted), inputs, strict=True)]
    for own in outputs:
        own.square().sum().backward()
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=0)
    torch.testing.assert_close(low.weight.grad.t(), wanted.weight.grad, rtol=0, atol=0)
    assert type(f8.unconvert(low)) is Conv1D
    assert f8.float8_report(nn.Sequential(low)).weights[0].class_name == "Conv1D"


def train(rank, world_size, recipe):
    losses = []
    for gather in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Conv1D(48, 32), nn.GELU(), Conv1D(7, 48))
        config = f8.Float8LinearConfig(recipe=recipe, all_gather=gather)
        model = f8.convert_to_float8_training(model, config=config)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, own = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank)), []
        for _ in range(3):
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        losses.append(own)
    return losses


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gather_changes_no_number(run_ranks, recipe):
    for low, high in run_ranks(2, train, recipe):
        assert low == high

"""Values that are put into an FP8 weight are the values that it computes with, and that every view of it reads."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.prune import l1_unstructured, remove

from fp8_common import Fp8Error
from fsdp_models import converted, mesh_of, seeded, shard
from fsdp_training import batch
from tests.helpers.ranks import on_ranks


def set_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 3


def set_transposed(model):
    model[0].weight.data = (torch.arange(576.0).view(24, 24) / 256).t()


def from_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 2, model.parameters())


def prune(model):
    l1_unstructured(model[0], "weight", amount=0.5)
    model(batch(0))
    remove(model[0], "weight")


def restore(model):
    """What sharpness-aware minimisation does."""
    kept = [parameter.data.clone() for parameter in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 1)
    model(batch(0))
    for parameter, old in zip(model.parameters(), kept, strict=True):
        parameter.data = old


def two_layers():
    return nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 8))


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise"])
@pytest.mark.parametrize("change", [set_data, set_transposed, from_vector, prune, restore])
def test_data_that_is_set_is_computed_with(change, recipe):
    low, wanted = converted(seeded(two_layers), recipe), seeded(two_layers)
    low(batch(0))
    change(low)
    change(wanted)
    assert torch.equal(low(batch(0)), converted(copy.deepcopy(wanted), recipe)(batch(0)))
    own, plain = low.state_dict(), wanted.state_dict()
    assert all(torch.equal(own[name], plain[name]) for name in plain)


@pytest.mark.parametrize("value", [torch.zeros(8, 24), torch.zeros(24, 24, dtype=torch.int32)])
def test_data_of_another_form_raises(value):
    low = converted(two_layers())
    with pytest.raises(Fp8Error, match="can only be set to a plain tensor of the same shape"):
        low[0].weight.data = value


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise"])
def test_data_of_another_dtype_makes_a_weight_of_that_dtype(recipe):
    """Accelerate makes float32 parameters of bfloat16 ones so, before it shards them."""
    low = converted(seeded(two_layers).bfloat16(), recipe)
    twin = converted(seeded(two_layers).bfloat16().float(), recipe)
    optimizer = torch.optim.AdamW(low.parameters())
    for parameter in low.parameters():
        parameter.data = parameter.data.to(torch.float32)
    assert {p.dtype for p in low.parameters()} == {torch.float32}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in low.parameters()]
    for net, own in ((low, optimizer), (twin, torch.optim.AdamW(twin.parameters()))):
        net(batch(0)).sum().backward()
        own.step()
    assert torch.equal(low(batch(0)), twin(batch(0)))
    assert all(torch.equal(p, q) for p, q in zip(low.state_dict().values(), twin.state_dict().values(), strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@on_ranks(2)
def test_a_gathered_weight_reads_the_same_through_every_view(rank, recipe):
    model = converted(two_layers(), recipe)
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-2, 2, 24)[:, None])
    shard(model, mesh_of())(batch(0))
    model[0].unshard()
    weight = model[0].weight
    whole = weight.dequantize()
    reads = [
        lambda w: w.view(-1).norm(),
        lambda w: w.reshape(4, 144).sum(1),
        lambda w: w.flatten()[-5:],
        lambda w: w.unflatten(0, (4, 6)).sum(),
        lambda w: w.T.as_strided((4, 4), (24, 1), 25),
        lambda w: w.detach().norm(),
        lambda w: torch.zeros(24, 24).add_(w),
        lambda w: torch.tensor(w.tolist()),
        lambda w: torch.from_numpy(w.detach().numpy()),
    ]
    with pytest.raises(RuntimeError, match="would write to a gathered FP8 weight"):
        dist.all_reduce(weight)
    assert [index for index, read in enumerate(reads) if not torch.equal(read(weight), read(whole))] == []

"""Full state dicts of sharded FP8 weights: gathered, saved, loaded and broadcast over gloo, with the unsharded bits."""

import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8_te_init as fti
from fp8_common import Fp8Error
from tests.helpers.sharded_models import WIDTHS, mlp, shard

pytestmark = pytest.mark.distributed

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


def built(recipe, seed=0, device="cpu"):
    torch.manual_seed(seed)
    with torch.device(device):
        return fti.convert_linear(mlp(WIDTHS), recipe=recipe)


def bits(state):
    """Return tensors of a state dict as plain bytes."""
    return {name: (v.dtype, v.detach().contiguous().reshape(-1).view(torch.uint8)) for name, v in state.items()}


def unlike(a, b):
    a, b = bits(a), bits(b)
    same = {k for k in a.keys() & b.keys() if a[k][0] == b[k][0] and torch.equal(a[k][1], b[k][1])}
    return sorted((a.keys() | b.keys()) - same)


def gathered(rank, world_size, recipe):
    """Return how state dicts that were gathered in three ways differ from the unsharded one, and their classes."""
    reference = built(recipe).state_dict()
    model = shard(built(recipe), world_size)
    options = [StateDictOptions(full_state_dict=True, cpu_offload=offload) for offload in (False, True)]
    full, offloaded = (get_model_state_dict(model, options=option) for option in options)
    each = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if rank:
        assert offloaded == {}
        offloaded = full
    classes = {type(value) for state in (full, offloaded, each) for value in state.values()}
    buffer = io.BytesIO()
    torch.save(full, buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=True)
    return [unlike(state, reference) for state in (full, offloaded, each, read)], classes


@pytest.mark.matrix("each", world_size=[2, 3], recipe=RECIPES)
def test_full_state_dicts_have_the_bits_of_the_unsharded_model(run_ranks, world_size, recipe):
    for different, classes in run_ranks(world_size, gathered, recipe):
        assert different == [[], [], [], []]
        assert classes == {torch.Tensor}


def loaded(rank, world_size, recipe, way):
    """Return how a model that got a full state dict differs from it, and from the twin that trains on."""
    reference = built(recipe).state_dict()
    model = shard(built(recipe, 1, "meta" if way == "meta" else "cpu"), world_size)
    broadcast = way != "each"
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, dict(reference) if rank == 0 or not broadcast else {}, options=options)
    after = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    twin = built(recipe, 2)
    twin.load_state_dict(reference)
    whole = fti.MasterOptimizer(torch.optim.SGD, twin.parameters(), lr=0.1)
    masters = all(
        torch.equal(ours.full_tensor(), theirs)
        for ours, theirs in zip(optimizer.masters(), whole.masters(), strict=True)
    )
    x = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(rank))
    return unlike(after, reference), masters, torch.equal(model(x), twin(x))


@pytest.mark.matrix("each", world_size=[2, 3], recipe=RECIPES, way=["each", "broadcast", "meta"])
def test_full_state_dicts_are_loaded_by_all_ranks(run_ranks, world_size, recipe, way):
    for different, masters, same in run_ranks(world_size, loaded, recipe, way):
        assert different == []
        assert masters
        assert same


def refused(rank, world_size):
    reference = {name: value for name, value in built("tensorwise").state_dict().items() if "scale" not in name}
    model = shard(built("tensorwise", 1), world_size)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    with pytest.raises(RuntimeError, match="codes mean nothing without their scales"):
        set_model_state_dict(model, reference if rank == 0 else {}, options=options)


def test_broadcast_codes_without_scales_are_refused_on_all_ranks(run_ranks):
    run_ranks(2, refused)


def test_codes_of_another_format_are_not_copied():
    layer = fti.convert_linear(nn.Linear(4, 4))
    with torch.no_grad(), pytest.raises(Fp8Error, match="float8_e5m2"):
        layer.weight.copy_(torch.zeros(4, 4, dtype=torch.float8_e5m2))


def replicated_and_cut(rank, world_size):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = built("rowwise")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    full = get_model_state_dict(fully_shard(model, mesh=mesh), options=StateDictOptions(full_state_dict=True))
    return unlike(full, built("rowwise").state_dict())


def test_replicas_of_shards_gather_the_same_bits(run_ranks):
    assert run_ranks(4, replicated_and_cut) == [[]] * 4

"""Full state dicts of sharded FP8 weights: gathered, saved, loaded and broadcast over gloo, with the unsharded bits."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

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
    set_model_state_dict(model, reference if rank == 0 else {}, options=options)
    with pytest.raises(Fp8Error, match="without the scales that belong to them"):
        model(torch.ones(2, WIDTHS[0]))
    return True


def test_broadcast_codes_without_scales_are_refused_on_all_ranks(run_ranks):
    assert run_ranks(2, refused) == [True, True]


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


def whole(state):
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13, bias=False)
        self.embedding.weight = self.head.weight

    def forward(self, x):
        return self.head(self.embedding(x))


def tied(seed, world_size=0):
    torch.manual_seed(seed)
    with fti.fp8_model_init(recipe="rowwise", preserve_high_precision_init_val=True):
        model = Tied()
    return fully_shard(model, mesh=init_device_mesh("cpu", (world_size,))) if world_size else model


def what_users_do_with_entries(rank, world_size, folder):
    """Return by name whether the entries of a sharded state dict are as good as plain ones."""
    reference = built("blockwise").state_dict()
    model = shard(built("blockwise"), world_size)
    state = model.state_dict()
    as_good = {
        "deepcopy": unlike(whole(copy.deepcopy(state)), reference) == [],
        "clone": unlike(whole({k: v.clone() for k, v in state.items()}), reference) == [],
        "cpu": unlike(whole({k: v.cpu() for k, v in state.items()}), reference) == [],
        "detach": unlike(whole({k: v.detach() for k, v in state.items()}), reference) == [],
    }
    floats = {k: v.float() for k, v in state.items()}
    as_good["float"] = all(torch.equal(v, reference[k].float()) for k, v in whole(floats).items())
    torch.save(state, f"{folder}/{rank}.pt")
    with torch.serialization.safe_globals([DTensor]):
        read = torch.load(f"{folder}/{rank}.pt", weights_only=False)
    local = {type(value.to_local()) for value in read.values() if isinstance(value, DTensor)}
    as_good["files hold plain tensors"] = local == {torch.Tensor}
    dcp.async_save(state, checkpoint_id=f"{folder}/dcp").result()
    other = shard(built("blockwise", 1), world_size)
    target = other.state_dict()
    dcp.load(target, checkpoint_id=f"{folder}/dcp")
    other.load_state_dict(target)
    as_good["async save"] = unlike(whole(other.state_dict()), reference) == []
    model.load_state_dict(state)
    as_good["own state"] = unlike(whole(model.state_dict()), reference) == []
    third = shard(built("blockwise", 2), world_size)
    third.load_state_dict(state, assign=True)
    as_good["assign"] = unlike(whole(third.state_dict()), reference) == []
    return as_good


@pytest.mark.matrix(world_size=[2, 3])
def test_sharded_entries_are_as_good_as_plain_ones(run_ranks, world_size, tmp_path):
    for as_good in run_ranks(world_size, what_users_do_with_entries, str(tmp_path)):
        assert [name for name, good in as_good.items() if not good] == []


def other_models(rank, world_size):
    """Return by name whether full state dicts reach models of other kinds, and optimizers."""
    good = {}
    send = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    both = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    reference = tied(0).state_dict()
    model = tied(1, world_size)
    set_model_state_dict(model, dict(reference) if rank == 0 else {}, options=send)
    good["tied weights"] = unlike(whole(model.state_dict()), reference) == []
    plain = built("tensorwise_delayed").state_dict()
    for name, options in (("cpu_offload", both), ("ddp", send)):
        model = built("tensorwise_delayed", 1)
        model = DistributedDataParallel(model) if name == "ddp" else shard(model, world_size)
        set_model_state_dict(model, dict(plain) if rank == 0 else {}, options=options)
        model = model.module if name == "ddp" else model
        good[name] = unlike(whole(model.state_dict()), plain) == []
    torch.manual_seed(0)
    values = dict(mlp(WIDTHS).state_dict()) if rank == 0 else {}
    model = shard(built("rowwise", 1), world_size)
    set_model_state_dict(model, values, options=send)
    model(torch.ones(2, WIDTHS[0]))  # the ranks agree on scales at the next gather
    model.reshard()
    first = built("rowwise").state_dict()
    good["values"] = unlike(whole(model.state_dict()), first) == []
    model, optimizer = one_step(0, rank, world_size)
    full = StateDictOptions(full_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=full)
    masters = [master.full_tensor() for master in optimizer.masters()]
    again, resumed = one_step(1, rank, world_size)
    set_state_dict(again, resumed, model_state_dict=of_model, optim_state_dict=of_optimizer, options=full)
    pairs = zip(resumed.masters(), masters, strict=True)
    good["masters"] = all(torch.equal(ours.full_tensor(), theirs) for ours, theirs in pairs)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=full)
    good["codes"] = unlike(whole(again.state_dict()), of_model) == []
    return good


def one_step(seed, rank, world_size):
    model = shard(built("tensorwise", seed), world_size)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
    model(torch.ones(2, WIDTHS[0]) * (rank + 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_full_state_dicts_reach_other_models_and_optimizers(run_ranks):
    for good in run_ranks(2, other_models):
        assert [name for name, one in good.items() if not one] == []

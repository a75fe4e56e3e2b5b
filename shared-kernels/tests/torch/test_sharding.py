"""Shards under FSDP2 and tensor parallelism: where they lie, who agrees on them, and the buffers they travel in."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp8_common import CastRecipe, Fp8UnsupportedError
from fp8_common.torch_layers.sharding import fsdp, fsdp_forwards
from fp8_common.torch_layers.sharding.agreement import group_of_parts
from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid
from tests.helpers.ranks import on_ranks

READ_NAMES = {
    "FSDPState": "_is_root _modules _state_ctx _fsdp_param_group _lazy_init _device_handle post_optim_event "
    "_root_pre_forward _register_pre_backward_hook _training_state _pre_forward iter_forward_root all_states "
    "IDLE PRE_BACKWARD",
    "FSDPParam": "sharded_param padded_sharded_param_size _orig_size _param_fqn shard_mesh _module_info "
    "fsdp_placement device orig_dtype offload_to_cpu",
    "FSDPParamGroup": "_reduce_scatter_comm fsdp_params is_unsharded _to_sharded reshard_after_backward "
    "post_forward_mesh_info mesh_info _all_gather_result all_gather_event all_gather_work device_handle "
    "_training_state",
}


def test_this_torch_has_the_private_names():
    """If this fails, FSDP2 changed: fp8_common/torch_layers/sharding/fsdp.py is the one file to adapt."""
    fsdp.check()
    for owner, names in READ_NAMES.items():
        source = inspect.getsource(inspect.getmodule(getattr(fsdp, owner)))
        missing = [name for name in names.split() if name not in source]
        assert not missing, f"torch {torch.__version__}: {owner} has no {missing}"


def test_autograd_numbers_its_backwards_and_its_nodes():
    """If this fails, autograd changed: fp8_common/torch_layers/sharding/fsdp_forwards.py is the one file to adapt."""
    x, seen, ended = torch.ones(2, requires_grad=True), [], []
    first = fsdp_forwards.next_node()
    y = x * 2
    second = fsdp_forwards.next_node()

    def begin(grad):
        number = fsdp_forwards.running_node()
        fsdp_forwards.at_end_of_backward(lambda: ended.append(fsdp_forwards.graph_task()))
        seen.append((fsdp_forwards.in_backward(), first <= number < second, fsdp_forwards.keeps_graph()))

    fsdp_forwards.on_backward({"output": (y, None, 3)}, begin, lambda *grads: seen.append("passed"))
    (grad,) = torch.autograd.grad(y.sum(), y)
    assert seen == [(True, True, False)], "the node of the output has not run"
    z = y.sum()
    z.backward(grad.new_ones(()), retain_graph=True)
    z.backward()
    assert seen[1:] == [(True, True, True), "passed", (True, True, False), "passed"]
    assert len(ended) == 3
    assert not fsdp_forwards.in_backward()


@on_ranks(2)
def test_forwards_are_seen_where_fsdp2_begins_and_ends_them(rank):
    class Inner(nn.Linear):
        def method(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    model = nn.Sequential(Inner(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    register_fsdp_forward_method(model[0], "method")
    model(torch.ones(2, 4))
    seen = []
    fsdp_forwards.on_forwards(
        model,
        lambda modules, outermost: seen.append(("before", modules[0] is model, outermost)),
        lambda modules, output, outermost: seen.append(("after", modules[0] is model, outermost)),
    )
    inner, outer = [("before", False, False), ("after", False, False)], [("before", True, True), ("after", True, True)]
    model(torch.ones(2, 4))
    assert seen == [outer[0], *inner, outer[1]]
    for call in (model[0], model[0].method):
        seen.clear()
        call(torch.ones(2, 4))
        assert seen[0] == ("before", False, True)
        assert seen[-1] == ("after", False, True)
    seen.clear()
    handle = model[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4))
    handle.remove()
    seen.clear()
    model(torch.ones(2, 4))
    assert seen[0] == outer[0], "a forward that raised has ended"


def test_unsharded_modules_have_no_shards_and_no_root():
    model = nn.Linear(4, 4)
    assert list(fsdp.shards(model)) == list(fsdp.named_shards(model)) == []
    assert fsdp.region_of(model.weight) == Region.whole(torch.Size((4, 4)))
    assert group_of_parts(model.weight) is None
    with pytest.raises(Fp8UnsupportedError, match=r"outside of torch\.distributed\.fsdp\.fully_shard"):
        fsdp.find_root(lambda local: False)


@on_ranks(2)
def test_shards_say_where_they_lie(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 5, bias=False)))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(model[1])
    fully_shard(model)
    found = {}
    for name, shard in fsdp.named_shards(model):
        region, local = shard.region, shard.local
        first = region.offset[0]
        assert region.full_shape == whole[name].shape
        assert torch.equal(local, whole[name][first : first + local.shape[0]])
        assert shard.parameter is model.get_parameter(name)
        assert shard.padded_shape[0] == -(-region.full_shape[0] // 2)
        assert region.offset == (*fsdp.region_of(shard.parameter).offset,)
        assert shard.peers() == (0, 1)
        assert not shard.is_gathered
        assert fsdp.find_root(lambda other, own=local: other is own) is model
        found[name] = (first, local.shape[0])
    assert [shard.name for shard in fsdp.shards(model, recurse=False)] == ["weight", "bias"]
    everywhere = {id(shard.local) for shard in fsdp.shards()}
    assert everywhere >= {id(shard.local) for shard in fsdp.shards(model)}
    model(torch.ones(2, 4))
    shard = next(shard for shard in fsdp.shards(model) if shard.full_name == "1.0.weight")
    model[1].unshard()
    assert shard.is_gathered
    assert model[1][0].weight.shape == (5, 3)
    shard.reshard()
    assert not shard.is_gathered
    shard.reshard()
    first = {"0.weight": (0, 2), "0.bias": (0, 2), "1.0.weight": (0, 3)}
    second = {"0.weight": (2, 1), "0.bias": (2, 1), "1.0.weight": (3, 2)}
    assert found == (second if rank else first)


@on_ranks(4)
def test_ranks_share_a_scale_if_their_parts_do(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    by_rows, by_columns = fsdp.shards(model)
    own = (rank % 2, rank % 2 + 2)
    everybody = (0, 1, 2, 3)
    tensorwise, rowwise, blockwise = (
        ScaleGrid(CastRecipe(granularity=name)) for name in ("tensorwise", "rowwise", "blockwise_128x128")
    )
    assert by_rows.peers() == by_columns.peers() == everybody
    assert by_rows.peers(tensorwise) == by_columns.peers(tensorwise) == everybody
    assert by_rows.peers(blockwise) == by_columns.peers(blockwise) == own
    assert (by_rows.peers(rowwise), by_columns.peers(rowwise)) == (own, everybody)
    assert by_rows.group(rowwise).size() == 2
    assert by_rows.group() is by_columns.group(), "the same group each time"
    assert by_rows.region == Region(torch.Size((4, 4)), (2 * (rank // 2), 0)), "of what FSDP2 gathers"


@on_ranks(4)
def test_copies_share_a_scale_only_on_request(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = nn.Linear(4, 8, bias=False)
    fully_shard(model, mesh=mesh)
    (shard,) = fsdp.shards(model)
    assert shard.peers() == (0, 1) if rank < 2 else (2, 3)
    assert shard.peers(replicas=True) == (0, 1, 2, 3)
    assert group_of_parts(shard.parameter).size() == 2


@on_ranks(4)
def test_parts_of_weights_that_are_cut_twice_say_where_they_lie_and_who_has_the_others(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(30.0).view(5, 6)
    for placements, size in (([Shard(0), Shard(1)], 4), ([Replicate(), Shard(0)], 2), ([Shard(0), Shard(0)], 4)):
        tensor = distribute_tensor(whole, mesh, placements)
        (rows, columns), local = fsdp.region_of(tensor).offset, tensor.to_local()
        assert torch.equal(whole[rows : rows + local.shape[0], columns : columns + local.shape[1]], local)
        assert group_of_parts(tensor).size() == size
    assert group_of_parts(distribute_tensor(whole, mesh, [Replicate(), Replicate()])) is None

"""Secondary shards: codes cross nodes once for each change, with the numbers of FSDP2's own gather."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8StaleError, Fp8UnsupportedError
from fp8_torch_fsdp import _secondary_shards as secondary

pytestmark = pytest.mark.distributed
NODES, RANKS = 2, 2


def small_model(recipe, **gathering):
    """Two blocks of an FP8 layer (odd sizes, with bias) and a norm; the last layer stays wide."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)) for _ in range(2)], nn.Linear(40, 8))
    config = f8.Float8LinearConfig.from_recipe_name(recipe)
    if gathering:
        config = f8.Float8LinearConfig(all_gather=f8.AllGatherConfig(**gathering))
    f8.convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "2")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model[:2]:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def node_mesh(shape=(NODES, RANKS)):
    return init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "ranks"))


class Between:
    """Counts what crosses nodes: elements that one rank sends to the same rank of other nodes."""

    def __init__(self, monkeypatch, mesh):
        self.sent = []
        gather, between = secondary.compat.all_gather_tensor, mesh.get_group(0)

        def counted(output, own, group=None):
            if group is between:
                self.sent.append(own.numel())
            return gather(output, own, group=group)

        monkeypatch.setattr(secondary.compat, "all_gather_tensor", counted)


def micro_batches(model, count, rank):
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for i in range(count):
        model.set_requires_gradient_sync(i == count - 1)
        loss = model(torch.randn(6, 40, generator=generator)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def train(model, rank, steps=3, edit=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        losses += micro_batches(model, 2, rank)
        if edit and step == 1:
            with torch.no_grad():  # on every rank: by hand, between two micro-batches
                model[0][0].weight.mul_(3)
        losses += micro_batches(model, 2, rank)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses += [model(torch.ones(2, 40)).sum().item() for _ in range(2)]
    return losses


def compare(rank, world_size, recipe, edit):
    plain = train(small_model(recipe), rank, edit=edit)
    model, mesh = small_model(recipe), node_mesh()
    handle = f8.keep_secondary_shards(model, mesh)
    assert handle.nbytes == 0
    with pytest.MonkeyPatch.context() as patch:
        between = Between(patch, mesh)
        found = train(model, rank, edit=edit)
    kept = handle.nbytes
    handle.remove()
    assert handle.nbytes == 0
    again = train(model, rank, steps=1)
    return plain, found, between.sent, kept, again


@pytest.mark.matrix("each", recipe=["tensorwise", "tensorwise_delayed", "blockwise"], edit=[False, True])
def test_codes_cross_nodes_once_for_each_change_and_numbers_stay(run_ranks, recipe, edit):
    shard = 40 * 40 // (NODES * RANKS)
    for plain, found, sent, kept, again in run_ranks(NODES * RANKS, compare, recipe, edit):
        assert found == plain
        # three optimizer steps, and the evaluation after the last one; a block whose weight was edited once more.
        # Four micro-batches of two gathers each would cross nodes 3 * 8 + 2 times for each block.
        assert sent == [shard] * (2 * 4 + edit)
        assert kept == 2 * NODES * shard
        assert len(again) == 6


def narrow_model(**options):
    """Layers that not every rank has a row of, and none in equal parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 7), nn.Linear(7, 2, bias=False), nn.Linear(2, 40))
    f8.convert_to_float8_training(model, recipe="tensorwise_delayed", module_filter_fn=lambda module, name: True)
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def load_in_the_middle(rank, world_size, folder):
    found = []
    for secondary_shards in (False, True):
        model = narrow_model()
        handle = f8.keep_secondary_shards(model, node_mesh()) if secondary_shards else None
        losses, path = train(model, rank), folder / str(secondary_shards)
        model.train()
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        losses += train(model, rank)
        model.train()
        losses += micro_batches(model, 1, rank)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        found.append((losses, micro_batches(model, 2, rank) + train(model, rank, steps=1)))
        del handle
    return found


def test_uneven_shards_and_a_checkpoint_that_is_loaded_have_the_numbers_of_fsdp2(run_ranks, tmp_path):
    for plain, ours in run_ranks(NODES * RANKS, load_in_the_middle, tmp_path):
        assert ours == plain
        assert plain[1][:2] != plain[0][-2:]


def write_inside(rank, world_size):
    model = small_model("tensorwise")
    f8.keep_secondary_shards(model, node_mesh())
    micro_batches(model, 1, rank)

    def edit(module, args):
        with torch.no_grad():
            module[0].weight.mul_(0.5)

    # before FSDP2's own hook gathers the block, after the plan has agreed on scales
    model[1].register_forward_pre_hook(edit, prepend=True)
    try:
        micro_batches(model, 1, rank)
    except Fp8StaleError as error:
        return str(error)
    return "no error"


def test_a_write_inside_of_a_forward_is_an_error_on_all_ranks(run_ranks):
    for message in run_ranks(NODES * RANKS, write_inside):
        assert "inside of the forward" in message


def refusals(rank, world_size):
    found = []

    def attempt(make, mesh, times=1):
        model = make()
        try:
            for _ in range(times):
                f8.keep_secondary_shards(model, mesh)
        except (Fp8Error, Fp8UnsupportedError) as error:
            found.append(str(error))
        else:
            found.append("no error")
        return model

    mesh = node_mesh()
    attempt(lambda: nn.Linear(8, 8), mesh)
    attempt(lambda: small_model("tensorwise"), init_device_mesh("cpu", (world_size,)))
    attempt(lambda: small_model("rowwise"), mesh)
    attempt(lambda: small_model("tensorwise", cache="none"), mesh)
    attempt(lambda: small_model("tensorwise"), mesh, times=2)
    model = narrow_model(reshard_after_forward=2)
    f8.keep_secondary_shards(model, mesh)
    with pytest.raises(Fp8Error) as raised:
        micro_batches(model, 1, rank)
    found.append(str(raised.value))
    swapped = torch.arange(world_size).view(RANKS, NODES).t().contiguous()
    attempt(lambda: small_model("tensorwise"), dist.device_mesh.DeviceMesh("cpu", swapped))
    return found


def test_what_cannot_be_kept_is_refused_on_all_ranks(run_ranks):
    wanted = (
        "no weight that FSDP2 gathers in FP8",
        "has two dimensions",
        "the ranks agree on no scales",
        'cache="none"',
        "already",
        "reshard_after_forward with an integer does not work",
        "row by row",
    )
    for found in run_ranks(NODES * RANKS, refusals):
        assert len(found) == len(wanted)
        for message, part in zip(found, wanted, strict=True):
            assert part in message

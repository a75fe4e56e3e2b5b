"""Several ranks with TransformerEngine's tensors: on a double of them, and on its own files where they are at hand."""

import contextlib
import importlib
import warnings

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8UnsupportedError
from fp8_te_init._backends.te_rows import BLOCKS, MX, te_kind
from tests.helpers import te_double, te_sources
from tests.helpers.sharded_models import shard, train_on
from tests.helpers.te_models import block_recipe, built, te_free

MAKES = ["te_double", "te_sources"][: 1 if te_sources.missing() else 2]


@contextlib.contextmanager
def ready(make):
    """The double or the sources, in a rank that runs other tests afterwards."""
    yield importlib.import_module(f"tests.helpers.{make}").install()
    te_double.remove()


def with_te(rank, world_size, function, make, *args):
    with ready(make) as te:
        return globals()[function](rank, world_size, te, *args)


def gathered(rank, world_size, te, init):
    model = built(te, dtype=torch.float32, sizes=(24, 41, 24), device="meta" if init == "meta" else "cpu")
    if init == "meta":
        shard(model, world_size)
        for layer in model.to_empty(device="cpu"):
            layer.reset_parameters()
    if init == "eager":
        shard(model, world_size)
    starts = [layer.weight.get_high_precision_init_val().clone() for layer in model]
    of_locals = [layer.weight._local_tensor.get_high_precision_init_val() for layer in model]
    assert all(torch.equal(a, b) for a, b in zip(starts, of_locals, strict=True))
    if init == "eager":
        model(torch.ones(2, 24))  # the root's weights stay gathered
        assert fti.memory_report(model).copies > 0
        model.reshard()
        assert all(
            torch.equal(layer.weight.get_high_precision_init_val(), a) for layer, a in zip(model, starts, strict=True)
        )
    reductions = fti.rescale_(model)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    fti.seed_masters(optimizer, model)
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(rank))
    losses = train_on(model, optimizer, [x] * 3)
    scales = [layer.weight._local_tensor._scale_inv.item() for layer in model]
    return starts, scales, losses, (reductions, optimizer.reductions)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("make", MAKES)
def test_fsdp2_gathers_codes_and_the_shares_make_up_the_start(run_ranks, make, world_size):
    torch.manual_seed(0)
    starts = [te_double.Linear(24, 41).weight.detach(), te_double.Linear(41, 24).weight.detach()]
    results = run_ranks(world_size, with_te, "gathered", make, "eager")
    for index, start in enumerate(starts):
        assert torch.equal(torch.cat([shares[index] for shares, *_ in results]), start)
    assert len({tuple(scales) for _, scales, *_ in results}) == 1, "one scale on all ranks"
    for _, _, losses, reductions in results:
        assert losses[-1] < losses[0]
        assert reductions == (1, 3)


def without_padding(rank, world_size, te):
    """Upstream's own hooks on rows that do not divide equally."""
    with te_free():
        model = shard(nn.Sequential(te.Linear(24, 41), te.Linear(41, 24)), world_size)
    mesh, local = model[0].weight.device_mesh, model[0].weight._local_tensor
    own = te.Float8Tensor.fsdp_pre_all_gather
    own = getattr(own, "__wrapped__", own)  # as it is without this package
    sent, _ = own(local, mesh, model[0].weight.size(), (24, 1), model[0], None)
    return sent[0].shape[0]


@pytest.mark.distributed
def test_trap_upstreams_hooks_send_as_many_rows_as_each_rank_has(run_ranks):
    """FSDP2 raises on the ranks with padding alone; the others wait. Where it runs, so do all tests of this file."""
    if why := te_sources.missing():
        pytest.skip(why)
    assert run_ranks(2, with_te, "without_padding", "te_sources") == [21, 20]


def sharded_blocks(rank, world_size, te, kind, sizes, device):
    model = built(te, recipe=block_recipe(kind), sizes=sizes, device=device, backend="te")
    try:
        shard(model, world_size)
        if device == "meta":
            for layer in model.to_empty(device="cpu"):
                torch.manual_seed(rank)
                layer.reset_parameters()
        kinds = [te_kind(layer.weight._local_tensor) for layer in model]
        optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        return kinds, set(fti.seed_masters(optimizer, model).sources.values())
    except (fti.StaleInitError, Fp8UnsupportedError) as error:
        return type(error).__name__, str(error)


@pytest.mark.distributed
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("kind", ["2d", "mx"])
def test_trap_sharding_turns_block_scaled_weights_into_plain_ones(run_ranks, make, kind):
    """Upstream does so in silence; the masters would be made of rounded values."""
    for name, message in run_ranks(2, with_te, "sharded_blocks", make, kind, (256, 200, 96), "cpu"):
        assert name == "StaleInitError"
        assert "0.weight: This weight has no FP8 codes any more" in message
        assert "apply fully_shard, then call reset_parameters" in message


@pytest.mark.distributed
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(("kind", "name"), [("2d", BLOCKS), ("mx", MX)])
def test_block_scaled_weights_that_are_sharded_first_are_seeded(run_ranks, make, kind, name):
    for kinds, sources in run_ranks(2, with_te, "sharded_blocks", make, kind, (128, 256, 512), "meta"):
        assert kinds == [name, name]
        assert sources == {"copy"}


@pytest.mark.distributed
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(("kind", "unit", "rows"), [("2d", 128, 192), ("mx", 32, 80)])
def test_shards_that_cut_blocks_are_refused_on_all_ranks(run_ranks, make, kind, unit, rows):
    for name, message in run_ranks(2, with_te, "sharded_blocks", make, kind, (128, rows), "meta"):
        assert name == "Fp8UnsupportedError"
        assert f"in multiples of {unit}; this one has {rows} rows on 2 ranks" in message


def trained_blocks(rank, world_size, te, kind, device):
    """Three steps of a sharded model through the hooks of TransformerEngine's own tensors."""
    sizes = (128, 256, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # theirs: of views that FSDP2 makes and does not use
        model = built(te, dtype=torch.float32, recipe=block_recipe(kind), sizes=sizes, device=device, backend="te")
        shard(model, world_size)
    if device == "meta":
        for layer in model.to_empty(device="cpu"):
            layer.reset_parameters()
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    fti.seed_masters(optimizer, model)
    x = torch.randn(8, sizes[0], generator=torch.Generator().manual_seed(rank))
    return train_on(model, optimizer, [x] * 3)


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "device"), [("2d", "meta"), ("mx", "meta"), ("mx", "cpu")])
def test_block_scaled_weights_train_through_their_own_hooks(run_ranks, kind, device):
    if why := te_sources.missing():
        pytest.skip(why)
    for losses in run_ranks(2, with_te, "trained_blocks", "te_sources", kind, device):
        assert losses[2] < losses[1] < losses[0]

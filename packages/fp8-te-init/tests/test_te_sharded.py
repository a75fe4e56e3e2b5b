"""Several ranks with TransformerEngine's tensors: on a double of them, and on its own files where they are at hand."""

import contextlib
import importlib
import warnings

import pytest
import torch

import fp8_te_init as fti
from fp8_common import Fp8UnsupportedError
from fp8_te_init.te import BLOCKS, MX
from tests.helpers import te_double, te_sources
from tests.helpers.sharded_models import shard, train_on
from tests.helpers.te_models import block_recipe, built

MAKES = ["te_double", "te_sources"][: 1 if te_sources.missing() else 2]


@contextlib.contextmanager
def ready(make):
    """The double or the sources, in a rank that runs other tests afterwards."""
    yield importlib.import_module(f"tests.helpers.{make}").install()
    te_double.remove()


def with_te(rank, world_size, function, make, *args):
    with ready(make) as te:
        return globals()[function](rank, world_size, te, *args)


def deferred(rank, world_size, te):
    model = built(te, dtype=torch.float32, sizes=(24, 12 * world_size, 24 * world_size), device="meta", backend="te")
    shard(model, world_size)
    model.to_empty(device="cpu")
    for layer in model:
        torch.manual_seed(rank)
        layer.reset_parameters()
    starts = [layer.weight._local_tensor.get_high_precision_init_val().clone() for layer in model]
    reductions = fti.rescale_(model)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    sources = fti.seed_masters(optimizer, model).sources
    masters = [optimizer.master_of(layer.weight).to_local() for layer in model]
    same = all(torch.equal(a, b) for a, b in zip(starts, masters, strict=True))
    scales = [layer.weight._local_tensor._scale_inv.item() for layer in model]
    return same, set(sources.values()), scales, reductions, fti.memory_report(model).copies


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("make", MAKES)
def test_layers_that_are_sharded_before_they_are_reset_start_from_their_rows(run_ranks, make, world_size):
    results = run_ranks(world_size, with_te, "deferred", make)
    assert len({tuple(scales) for _, _, scales, *_ in results}) == 1, "one scale on all ranks"
    for same, sources, _, reductions, copies in results:
        assert same
        assert sources == {"init"}
        assert reductions == 1
        assert copies == 0


def sharded_blocks(rank, world_size, te, kind, sizes, device):
    model = built(te, recipe=block_recipe(kind), sizes=sizes, device=device, backend="te")
    try:
        shard(model, world_size)
        if device == "meta":
            for layer in model.to_empty(device="cpu"):
                torch.manual_seed(rank)
                layer.reset_parameters()
        kinds = [type(layer.weight._local_tensor).__name__ for layer in model]
        optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        return kinds, set(fti.seed_masters(optimizer, model).sources.values())
    except (fti.StaleInitError, Fp8UnsupportedError) as error:
        return type(error).__name__, str(error)


@pytest.mark.distributed
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(("kind", "name"), [("2d", BLOCKS), ("mx", MX)])
def test_block_scaled_weights_that_are_sharded_first_are_seeded(run_ranks, make, kind, name):
    for kinds, sources in run_ranks(2, with_te, "sharded_blocks", make, kind, (128, 256, 512), "meta"):
        assert kinds == [name, name]
        assert sources == {"init"}


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

"""TransformerEngine's tensors through the adapter, on a double that keeps to its protocol."""

import sys

import pytest
import te_double
import torch
from sharded_models import shard
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_te_init.backends.te_hooks import install_fsdp_hooks
from fp8_te_init.backends.te_rows import te_rows
from fp8_te_init.store import STORE


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    te_double.install()
    yield
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


def built(preserve="cpu", backend="auto", dtype=torch.bfloat16, **options) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.primary_weights(preserve=preserve, backend=backend, **options):
        return nn.Sequential(te_double.Linear(24, 40, dtype), te_double.Linear(40, 16, dtype))


def exact(dtype=torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [layer.weight.detach() for layer in (te_double.Linear(24, 40, dtype), te_double.Linear(40, 16, dtype))]


@pytest.mark.parametrize("preserve", ["cpu", "residual"])
def test_copies_move_into_this_packages_keeping(preserve):
    net = built(preserve)
    for layer, start in zip(net, exact(), strict=True):
        assert isinstance(layer.weight, te_double.Float8Tensor)
        assert not hasattr(layer.weight, "_high_precision_init_val"), "the upstream copy is gone"
        assert torch.equal(layer.weight.get_high_precision_init_val(), start)
        assert torch.equal(layer.weight.get_high_precision_init_val(), start), "again"
    net[0].weight.clear_high_precision_init_val()
    assert net[0].weight.get_high_precision_init_val() is None
    net[0].weight.clear_high_precision_init_val()


def test_nothing_is_kept_or_quantized_unless_asked():
    assert built("none")[0].weight.get_high_precision_init_val() is None
    assert type(built(enabled=False)[0].weight) is nn.Parameter
    assert type(built(backend="native")[0].weight) is nn.Parameter


def test_both_kinds_of_layers_in_one_model_and_one_only():
    with fti.primary_weights():
        both = nn.Sequential(te_double.Linear(24, 40), nn.Linear(40, 8))
    with fti.primary_weights(backend="te"):
        one = nn.Sequential(te_double.Linear(24, 40), nn.Linear(40, 8))
    assert [type(layer) for layer in both] == [te_double.Linear, fti.PrimaryFloat8Linear]
    assert [type(layer) for layer in one] == [te_double.Linear, nn.Linear]


def test_trap_masters_of_unit_scale_weights_are_half_zero_without_the_copy():
    net = nn.Sequential(te_double.Linear(24, 40))
    torch.manual_seed(0)
    with fti.primary_weights():
        net = nn.Sequential(te_double.Linear(256, 256))
        with torch.no_grad():
            net[0].weight.mul_(1)
    weight = net[0].weight
    start = weight.get_high_precision_init_val()
    error = (weight.dequantize() - start).norm() / start.norm()
    assert error > 0.02
    assert fti.rescale_(net) == 0
    again = (weight.dequantize() - start).norm() / start.norm()
    assert again < error
    assert torch.equal(weight.get_high_precision_init_val(), start), "the start survives a rescaling"
    assert torch.equal(weight._quantizer.scale.reshape(()), torch.tensor(448.0) / start.float().abs().max())


@pytest.mark.parametrize("optimizer", ["fused", "master"])
def test_masters_are_seeded_and_everything_is_released(optimizer):
    net = built()
    if optimizer == "fused":
        chosen = te_double.FusedAdam(net.parameters())
        master = lambda p: chosen.state[p]["master_param"]  # noqa: E731
    else:
        chosen = fti.MasterOptimizer(torch.optim.AdamW, net.parameters())
        master = chosen.master_of
    report = fti.seed_masters(chosen, net)
    assert set(report.sources.values()) == {"copy"}
    for layer, start in zip(net, exact(), strict=True):
        assert torch.equal(master(layer.weight), start.float())
    assert fti.memory_report(net).copies == 0


def test_a_fused_optimizer_without_masters_is_refused():
    net = built()
    with pytest.raises(fti.MissingInitError, match="without a float32 master"):
        fti.seed_masters(te_double.FusedAdam(net.parameters(), master_weights=False), net)


def test_training_with_masters_quantizes_into_the_tensor():
    net = built(dtype=torch.float32)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    fti.seed_masters(optimizer, net)
    x, losses = torch.randn(32, 24), []
    for _ in range(10):
        loss = (net(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    weight = net[0].weight
    assert torch.equal(te_rows(weight).quantized(optimizer.master_of(weight)), weight._data)


def test_trap_a_loaded_checkpoint_makes_the_start_stale():
    net = built()
    with torch.no_grad():
        net[0].weight.copy_(torch.randn(40, 24))
    with pytest.raises(fti.StaleInitError):
        net[0].weight.get_high_precision_init_val()


def test_a_reset_outside_of_the_block_is_taken_over_too():
    net = built()
    torch.manual_seed(0)
    for layer in net:
        layer.reset_parameters()
        STORE.reconcile(layer, "weight")
    for layer, start in zip(net, exact(), strict=True):
        assert torch.equal(layer.weight.get_high_precision_init_val(), start)
        assert not hasattr(layer.weight, "_high_precision_init_val")


def test_every_scale_that_could_have_been_used_is_tried():
    """The tensor stores 1 / scale alone; some scales share it."""
    values = torch.randn(64, 64)
    for number in torch.logspace(-3, 4, 300):
        tensor = te_double.Float8Quantizer(number.reshape(1), torch.zeros(1), "kFloat8E4M3")(values)
        tensor._quantizer = None
        rows = te_rows(nn.Parameter(tensor))
        assert torch.equal(rows.quantized(values), tensor._data)


def test_memory_is_counted():
    net = built()
    report = fti.memory_report(net)
    assert (report.codes, report.scales, report.copies) == (24 * 40 + 40 * 16, 8, 2 * (24 * 40 + 40 * 16))


def test_what_this_release_lacks_is_named():
    tensor = te_double.Float8Quantizer(torch.ones(1), torch.zeros(1), "kFloat8E4M3")(torch.ones(4, 4))
    del tensor._scale_inv
    with pytest.raises(Fp8UnsupportedError, match="Float8Tensor has no _scale_inv, which fp8-te-init needs"):
        te_rows(tensor)


def test_errors_without_a_usable_transformer_engine(monkeypatch):
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "quantized_model_init")
    with pytest.raises(Fp8UnsupportedError, match="neither quantized_model_init nor fp8_model_init"):
        built(backend="te")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(Fp8UnsupportedError, match="cannot be imported here"):
        built(backend="te")


def test_recipes_by_name_become_recipe_objects():
    assert built(recipe="tensorwise", backend="te")[0].weight is not None
    with pytest.raises(Fp8UnsupportedError, match="has no recipe for 'rowwise'"):
        built(recipe="rowwise", backend="te")
    with pytest.raises(Fp8Error, match="Unknown recipe"):
        built(recipe="fp4")


def gathered(rank, world_size):
    te_double.install()
    torch.manual_seed(0)
    with fti.primary_weights():
        model = nn.Sequential(te_double.Linear(24, 41, torch.float32), te_double.Linear(41, 24, torch.float32))
    whole = [layer.weight._data.clone() for layer in model]
    install_fsdp_hooks(te_double.Float8Tensor)
    shard(model, world_size)
    starts = [layer.weight.get_high_precision_init_val().clone() for layer in model]
    reductions = fti.rescale_(model)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    fti.seed_masters(optimizer, model)
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(3):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    scales = [layer.weight.to_local()._scale_inv.item() for layer in model]
    return starts, scales, losses, whole, (reductions, optimizer.reductions)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp2_gathers_codes_and_the_shares_make_up_the_start(run_ranks, world_size):
    torch.manual_seed(0)
    starts = [te_double.Linear(24, 41).weight.detach(), te_double.Linear(41, 24).weight.detach()]
    results = run_ranks(world_size, gathered)
    for index, start in enumerate(starts):
        assert torch.equal(torch.cat([shares[index] for shares, *_ in results]), start)
    assert len({tuple(scales) for _, scales, *_ in results}) == 1, "one scale on all ranks"
    for _, _, losses, _, reductions in results:
        assert losses[-1] < losses[0]
        assert reductions == (1, 3)

"""TransformerEngine's tensors through the adapter: on a double of them, and on its own files where they are at hand."""

import functools
import importlib
import itertools
import sys
import types

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_te_init.te import TeWeight, fp8_of
from tests.helpers import te_double, te_sources
from tests.helpers.te_kernels import encoded
from tests.helpers.te_models import block_recipe, built, exact, te_free

MAKES = ["te_double", "te_sources"][: 1 if te_sources.missing() else 2]


@pytest.fixture(params=MAKES)
def te(request):
    yield {"te_double": te_double, "te_sources": te_sources}[request.param].install()
    te_double.remove()


def test_copies_are_those_of_transformer_engine_until_they_are_cleared(te):
    net = built(te)
    for layer, start in zip(net, exact(te), strict=True):
        assert isinstance(layer.weight, te.Float8Tensor)
        assert torch.equal(layer.weight.get_high_precision_init_val(), start)
        assert torch.equal(layer.weight.get_high_precision_init_val(), start), "again"
    net[0].weight.clear_high_precision_init_val()
    assert net[0].weight.get_high_precision_init_val() is None
    net[0].weight.clear_high_precision_init_val()


def test_nothing_is_kept_or_quantized_unless_asked(te):
    assert fp8_of(built(te, preserve=False)[0].weight).init_values() is None
    assert type(built(te, enabled=False)[0].weight) is nn.Parameter
    assert type(built(te, backend="native")[0].weight) is nn.Parameter


def test_both_kinds_of_layers_in_one_model_and_one_only(te):
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        both = nn.Sequential(te.Linear(24, 40), nn.Linear(40, 8))
    with fti.fp8_model_init(preserve_high_precision_init_val=True, backend="te"):
        one = nn.Sequential(te.Linear(24, 40), nn.Linear(40, 8))
    assert [type(layer) for layer in both] == [te.Linear, fti.PrimaryFloat8Linear]
    assert [type(layer) for layer in one] == [te.Linear, nn.Linear]


def test_trap_masters_of_unit_scale_weights_are_half_zero_without_the_copy(te):
    net = nn.Sequential(te.Linear(24, 40))
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        net = nn.Sequential(te.Linear(256, 256))
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
def test_masters_are_seeded_and_everything_is_released(te, optimizer):
    net = built(te)
    if optimizer == "fused":
        chosen = te.FusedAdam(net.parameters(), master_weights=True)
        master = lambda p: chosen.state[p]["master_param"]  # noqa: E731
    else:
        chosen = fti.MasterOptimizer(torch.optim.AdamW, net.parameters())
        master = chosen.master_of
    report = fti.seed_masters(chosen, net)
    assert set(report.sources.values()) == {"init"}
    for layer, start in zip(net, exact(te), strict=True):
        assert torch.equal(master(layer.weight), start.float())
    assert fti.memory_report(net).copies == 0


def test_a_fused_optimizer_without_masters_is_refused(te):
    net = built(te)
    with pytest.raises(fti.MissingInitError, match="without a float32 master"):
        fti.seed_masters(te.FusedAdam(net.parameters(), master_weights=False), net)


def test_training_with_masters_quantizes_into_the_tensor(te):
    net = built(te, dtype=torch.float32)
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
    assert torch.equal(fp8_of(weight).quantized(optimizer.master_of(weight)), weight._data)


def test_trap_a_loaded_checkpoint_makes_the_start_stale(te):
    net = built(te)
    with torch.no_grad():
        net[0].weight.copy_(torch.randn(40, 24))
    with pytest.raises(fti.StaleInitError, match="does not quantize to its present codes"):
        fti.seed_masters(fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1), net)


def test_deferred_layers_hand_over_their_copies_when_they_are_reset(te):
    net = built(te, device="meta")
    assert net[0].weight.is_meta
    torch.manual_seed(0)
    for layer in net:
        layer.reset_parameters()
    for layer, start in zip(net, exact(te), strict=True):
        assert torch.equal(layer.weight.get_high_precision_init_val(), start)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    assert set(fti.seed_masters(optimizer, net).sources.values()) == {"init"}
    assert net[0].weight.get_high_precision_init_val() is None


def test_trap_a_second_reset_leaves_a_rounded_copy(te):
    """It is made of the FP8 weight: what upstream calls the high-precision value is an FP8 tensor."""
    with te_free():
        naive = te.Linear(24, 40)
    naive.reset_parameters()
    assert isinstance(naive.weight.get_high_precision_init_val(), te.Float8Tensor)
    net = built(te)
    net[0].reset_parameters()
    with pytest.raises(fti.StaleInitError, match="initialized a second time"):
        fp8_of(net[0].weight).init_values()


@functools.cache
def ambiguous_scales() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scales that are not the reciprocal of their reciprocal, each with a value whose code tells the two apart."""
    midpoints = torch.arange(17.0, 32.0, 2.0)
    found = {-1: [], 1: []}
    for scale in 1 + torch.rand(20_000, generator=torch.Generator().manual_seed(0)):
        nearest = scale.reciprocal().reciprocal()
        values = torch.nextafter(midpoints / scale, torch.tensor([[0.0], [torch.inf]])).reshape(-1)
        values = torch.cat([values, midpoints / scale])
        told = (encoded(values, scale) != encoded(values, nearest)).nonzero()
        if told.numel():
            found[1 if scale > nearest else -1].append((scale, values[told[0, 0]]))
        if min(map(len, found.values())) == 3:
            return [*found[-1][:3], *found[1][:3]]
    raise AssertionError(f"too few: {found}")


def test_every_scale_that_could_have_been_used_is_tried(te):
    """The tensor stores 1 / scale alone; some scales share it."""
    for scale, value in ambiguous_scales():
        values = value.expand(4, 4)
        tensor = te.Float8Quantizer(scale.reshape(1), torch.zeros(1), te.E4M3)(values)
        tensor._quantizer = None
        rows = fp8_of(nn.Parameter(tensor))
        assert torch.equal(rows.quantized(values), tensor._data)
        assert not torch.equal(rows.quantized(values * 1.25), tensor._data), "other values stay others"


def test_memory_is_counted(te):
    net = built(te)
    report = fti.memory_report(net)
    assert (report.codes, report.scales, report.copies) == (24 * 40 + 40 * 16, 8, 2 * (24 * 40 + 40 * 16))


def test_what_this_release_lacks_is_named(te):
    tensor = te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.E4M3)(torch.ones(4, 4))
    del tensor._scale_inv
    with pytest.raises(Fp8UnsupportedError, match="Float8Tensor has no _scale_inv, which fp8-te-init needs"):
        fp8_of(tensor)


def test_errors_without_a_usable_transformer_engine(te, monkeypatch):
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "quantized_model_init")
    with pytest.raises(Fp8UnsupportedError, match="neither quantized_model_init nor fp8_model_init"):
        built(te, backend="te")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(Fp8UnsupportedError, match="cannot be imported here"):
        built(te, backend="te")


def test_recipes_by_name_become_recipe_objects(te):
    assert built(te, recipe="tensorwise", backend="te")[0].weight is not None
    with pytest.raises(Fp8UnsupportedError, match="has no recipe for 'rowwise'"):
        built(te, recipe="rowwise", backend="te")
    assert type(built(te, recipe="rowwise")[0].weight) is nn.Parameter, "auto leaves what it cannot do"
    with pytest.raises(Fp8Error, match="Unknown recipe"):
        built(te, recipe="fp4")


KINDS = ["2d", "1d", "fp32 scales", "mx"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(256, 384, 128), (96, 64, 160)])
def test_block_scaled_tensors_are_read_as_they_read_themselves(te, kind, sizes):
    net = built(te, recipe=block_recipe(kind), sizes=sizes)
    for layer, start in zip(net, exact(te, sizes=sizes), strict=True):
        weight = layer.weight
        assert isinstance(fp8_of(weight), TeWeight)
        rows = fp8_of(weight)
        assert torch.equal(rows.values(), weight.dequantize(dtype=torch.float32))
        assert torch.equal(rows.quantized(start), rows.own_codes)
        assert torch.equal(weight.get_high_precision_init_val(), start)
        assert rows.amax_bits(start).numel() == 0, "blocks need no agreement"


def test_recipes_of_transformer_engine_alone_leave_other_layers(te):
    with fti.fp8_model_init(recipe=block_recipe("mx"), preserve_high_precision_init_val=True):
        net = nn.Sequential(te.Linear(64, 32), nn.Linear(32, 8))
    assert isinstance(fp8_of(net[0].weight), TeWeight)
    assert type(net[1]) is nn.Linear
    with (
        pytest.raises(Fp8Error, match="no native layer for the recipe MXFP8BlockScaling"),
        fti.fp8_model_init(recipe=block_recipe("mx"), preserve_high_precision_init_val=True, backend="native"),
    ):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_block_scaled_masters_are_seeded_trained_and_quantized_by_their_own_quantizer(te, kind):
    sizes = (64, 160, 96)
    net = built(te, dtype=torch.float32, recipe=block_recipe(kind), sizes=sizes)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    assert set(fti.seed_masters(optimizer, net).sources.values()) == {"init"}
    for layer, start in zip(net, exact(te, torch.float32, sizes), strict=True):
        assert torch.equal(optimizer.master_of(layer.weight), start)
    before = net[0].weight._rowwise_data.clone()
    (net(torch.randn(8, 64)) - 1).square().mean().backward()
    optimizer.step()
    weight = net[0].weight
    again = weight._quantizer(optimizer.master_of(weight).detach())
    assert not torch.equal(weight._rowwise_data, before)
    assert torch.equal(weight._rowwise_data, again._rowwise_data)
    assert torch.equal(weight._rowwise_scale_inv, again._rowwise_scale_inv)
    assert fti.memory_report(net).codes == sum(a * b for a, b in itertools.pairwise(sizes))


def test_columns_alone_are_refused(te):
    weight = built(te, recipe=block_recipe("2d"), sizes=(64, 32))[0].weight
    weight._columnwise_data, weight._rowwise_data = weight._rowwise_data.t(), None
    with pytest.raises(Fp8UnsupportedError, match="holds transposed codes alone"):
        _ = fp8_of(weight).own_codes


@pytest.mark.parametrize(("power_of_2", "scale"), [(False, 448 / 0.75), (True, 512.0)])
def test_current_scaling_keeps_the_choices_of_its_quantizer(te, power_of_2, scale):
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8CurrentScaling()
    recipe.fp8_quant_fwd_weight = types.SimpleNamespace(power_2_scale=power_of_2, amax_epsilon=0.0)
    net = built(te, recipe=recipe)
    rows = fp8_of(net[0].weight)
    values = torch.zeros(40, 24)
    values[0, 0] = -0.75
    rows.quantize_(values, rows.amax_bits(values), record="step")
    assert net[0].weight._scale_inv.item() == (1 / torch.tensor(scale, dtype=torch.float32)).item()
    assert torch.equal(rows.quantized(values), rows.own_codes)


def test_the_format_is_read_from_every_kind_of_enumeration(te):
    weight = built(te)[0].weight
    assert fp8_of(weight).fmt.name == "e4m3"
    weight._fp8_dtype = type(weight._fp8_dtype).kFloat8E5M2 if te is te_sources else "DType.kFloat8E5M2"
    assert fp8_of(weight).fmt.name == "e5m2"


@pytest.mark.parametrize("recipe", ["tensorwise_delayed", "tensorwise", "blockwise"])
def test_the_fused_optimizer_trains_the_seeded_masters(te, recipe):
    net = built(te, dtype=torch.float32, recipe=recipe)
    starts = [torch.nn.Parameter(start.clone()) for start in exact(te, torch.float32)]
    optimizer = te.FusedAdam(net.parameters(), lr=1e-2, master_weights=True)
    reference = torch.optim.AdamW(starts, lr=1e-2, weight_decay=0.0)
    fti.seed_masters(optimizer, net)
    for _ in range(3):
        (net(torch.randn(8, 24)) - 1).square().mean().backward()
        for layer, twin in zip(net, starts, strict=True):
            twin.grad = layer.weight.grad.clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for layer, twin in zip(net, starts, strict=True):
        master = optimizer.get_unscaled_state(layer.weight, "master_param")
        torch.testing.assert_close(master, twin.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(fp8_of(layer.weight).quantized(master), fp8_of(layer.weight).own_codes)


def test_masters_that_share_bits_with_the_parameter_are_refused(te):
    net = built(te)
    optimizer = te.FusedAdam(net.parameters(), master_weights=True, store_param_remainders=True)
    with pytest.raises(fti.MissingInitError, match=r"which FP8 codes are not\. Use store_param_remainders=False"):
        fti.seed_masters(optimizer, net)
    assert fti.memory_report(net).copies > 0, "nothing is dropped"


def test_loops_written_for_transformer_engine_run_unchanged(te):
    """Megatron's: get, slice, float, set, clear."""
    net = built(te)
    masters = {}
    for name, parameter in net.named_parameters():
        if hasattr(parameter, "get_high_precision_init_val"):
            flat = parameter.get_high_precision_init_val().view(-1)
            masters[name] = flat[: flat.numel() // 2].clone().detach().float()
            parameter.clear_high_precision_init_val()
    for (name, master), start in zip(masters.items(), exact(te), strict=True):
        assert torch.equal(master, start.view(-1)[: master.numel()].float()), name
    assert fti.memory_report(net).copies == 0

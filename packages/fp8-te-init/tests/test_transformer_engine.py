"""TransformerEngine's tensors through the adapter, on a double of them; `test_te_real` asks the real ones."""

import itertools
import sys
from unittest import mock

import pytest
import torch
from torch import nn

import fp8_te_init as fti
import te_double as te
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.torch import quantize
from fp8_te_init.transformer_engine import BLOCKS, MX, TeWeight, fp8_of
from tests.helpers.sharded_models import shard, train_on

BLOCK_RECIPES = {
    "2d": te.Float8BlockScaling(),
    "1d": te.Float8BlockScaling(block=(1, 128)),
    "fp32 scales": te.Float8BlockScaling(power_of_2=False),
    "mx": te.MXFP8BlockScaling(),
}
RECIPES = {"delayed": te.DelayedScaling(), "current": te.Float8CurrentScaling(), **BLOCK_RECIPES}


@pytest.fixture(autouse=True)
def installed():
    with te.installed():
        yield


def starts(**options):
    return [layer.weight.detach() for layer in te.plain(**options)]


def sgd(net):
    return fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)


def fused(**options):
    return lambda net: te.FusedAdam(net.parameters(), **options)


# ---------------------------------------------------------------- what is built


@pytest.mark.parametrize(
    ("options", "theirs", "ours"),
    [
        ({}, te.Float8Tensor, fti.PrimaryFloat8Linear),
        ({"backend": "te"}, te.Float8Tensor, nn.Linear),
        ({"backend": "te", "recipe": "tensorwise"}, te.Float8Tensor, nn.Linear),
        ({"backend": "te", "recipe": "mxfp8"}, te.MXFP8Tensor, nn.Linear),
        ({"backend": "native"}, nn.Parameter, fti.PrimaryFloat8Linear),
        ({"enabled": False}, nn.Parameter, nn.Linear),
        ({"recipe": "rowwise"}, nn.Parameter, fti.PrimaryFloat8Linear),  # which theirs do not have
        ({"recipe": BLOCK_RECIPES["mx"]}, te.MXFP8Tensor, nn.Linear),  # which ours do not have
    ],
)
def test_both_kinds_of_layers_are_built_as_their_recipe_and_backend_say(options, theirs, ours):
    with fti.fp8_model_init(preserve_high_precision_init_val=True, **options):
        net = nn.Sequential(te.Linear(64, 32), nn.Linear(32, 8))
    assert (type(net[0].weight), type(net[1])) == (theirs, ours)
    assert fp8_of(te.built(preserve=False)[0].weight).init_values() is None


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [(256, 384, 128), (96, 64, 160)])
def test_tensors_are_read_as_they_read_themselves_and_copies_are_theirs(recipe, sizes):
    net = te.built(recipe=RECIPES[recipe], sizes=sizes)
    for layer, start in zip(net, starts(sizes=sizes), strict=True):
        rows = fp8_of(layer.weight)
        assert isinstance(rows, TeWeight)
        assert torch.equal(rows.values(), layer.weight.dequantize(dtype=torch.float32))
        assert torch.equal(rows.quantized(start), rows.local_codes)
        assert torch.equal(layer.weight.get_high_precision_init_val(), start)
        assert rows.amax_bits(start).numel() == (recipe not in BLOCK_RECIPES), "blocks need no agreement"


def test_memory_is_counted_and_the_format_is_read_from_the_name_of_the_dtype():
    net = te.built()
    report, weight = fti.memory_report(net), net[0].weight
    assert (report.codes, report.scales, report.copies) == (24 * 40 + 40 * 16, 8, 2 * (24 * 40 + 40 * 16))
    assert fp8_of(weight).fmt.name == "e4m3"
    weight._fp8_dtype = "DType.kFloat8E5M2"
    assert fp8_of(weight).fmt.name == "e5m2"


# ---------------------------------------------------------------- masters


@pytest.mark.parametrize("makes", [[fused()], [sgd], [fused(dtype=torch.float16), sgd]])
def test_masters_of_all_optimizers_start_from_the_copies_which_are_released(makes):
    """A fused optimizer that scales its masters does it in place, which must not reach the next optimizer's."""
    net = te.built(dtype=torch.float32)
    optimizers = [make(net) for make in makes]
    report = fti.seed_masters(optimizers, net)
    assert set(report.sources.values()) == {"init"}
    for layer, start in zip(net, starts(dtype=torch.float32), strict=True):
        for optimizer in optimizers:
            is_fused = isinstance(optimizer, te.FusedAdam)
            held = optimizer.state[layer.weight]["master_param"] if is_fused else optimizer.master_of(layer.weight)
            factor = 8 if held.dtype == torch.float16 else 1
            assert torch.equal(held, (start * factor).to(held.dtype))
    assert fti.memory_report(net).copies == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_quantizes_masters_into_the_tensor_by_its_own_quantizer(recipe):
    sizes = (64, 160, 96)
    net = te.built(dtype=torch.float32, recipe=RECIPES[recipe], sizes=sizes)
    optimizer = sgd(net)
    fti.seed_masters(optimizer, net)
    losses = train_on(net, optimizer, [torch.ones(8, 64)] * 5)
    assert losses[-1] < losses[0]
    weight = net[0].weight
    again = weight._quantizer(optimizer.master_of(weight))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weight.parts(), again.parts(), strict=True))
    assert fti.memory_report(net).codes == sum(a * b for a, b in itertools.pairwise(sizes))


def test_trap_delayed_scaling_begins_with_scale_1_which_a_rescaling_mends():
    net = te.built(sizes=(256, 256))
    weight = net[0].weight
    start = weight.get_high_precision_init_val()

    def error():
        return (weight.dequantize() - start).norm() / start.norm()

    first = error()
    assert first > 0.02
    assert fti.rescale_(net) == 0
    assert error() < first
    assert torch.equal(weight.get_high_precision_init_val(), start), "the start survives a rescaling"
    assert weight._quantizer.scale == torch.tensor(448.0) / start.float().abs().max()


@pytest.mark.parametrize(("power_of_2", "scale"), [(False, 448 / 0.75), (True, 512.0)])
def test_current_scaling_keeps_the_choices_of_its_quantizer(power_of_2, scale):
    weight = te.built(recipe=te.Float8CurrentScaling(power_of_2=power_of_2))[0].weight
    rows, values = fp8_of(weight), torch.zeros(40, 24)
    values[0, 0] = -0.75
    rows.quantize_(values, rows.amax_bits(values), record="step")
    assert weight._scale_inv.item() == (1 / torch.tensor(scale, dtype=torch.float32)).item()
    assert torch.equal(rows.quantized(values), rows.local_codes)


def test_deferred_layers_hand_over_their_copies_when_they_are_reset():
    net = te.built(device="meta")
    assert net[0].weight.is_meta
    torch.manual_seed(0)
    for layer in net:
        layer.reset_parameters()
    optimizer = sgd(net)
    assert set(fti.seed_masters(optimizer, net).sources.values()) == {"init"}
    assert torch.equal(optimizer.master_of(net[0].weight), starts()[0].float())


def codes_of(values, scale):
    return quantize(values, scale, "e4m3").view(torch.uint8)


def test_every_scale_that_could_have_been_used_is_tried():
    """The tensor stores 1 / scale alone; some scales share it."""
    midpoints, found = torch.arange(17.0, 32.0, 2.0), {-1: [], 1: []}
    for scale in 1 + torch.rand(20_000, generator=torch.Generator().manual_seed(0)):
        nearest = scale.reciprocal().reciprocal()
        values = torch.nextafter(midpoints / scale, torch.tensor([[0.0], [torch.inf]])).reshape(-1)
        values = torch.cat([values, midpoints / scale])
        told = (codes_of(values, scale) != codes_of(values, nearest)).nonzero()
        if told.numel():
            found[1 if scale > nearest else -1].append((scale, values[told[0, 0]]))
        if min(map(len, found.values())) == 3:
            break
    for scale, value in [*found[-1][:3], *found[1][:3]]:
        quantizer, values = te.Quantizer(delayed=True), value.expand(4, 4)
        quantizer.scale = scale.view(1)
        tensor = quantizer(values)
        tensor._quantizer = None
        rows = fp8_of(nn.Parameter(tensor))
        assert torch.equal(rows.quantized(values), tensor._data)
        assert not torch.equal(rows.quantized(values * 1.25), tensor._data), "other values stay others"


# ---------------------------------------------------------------- refusals


def without(name):
    weight = te.built()[0].weight
    delattr(weight, name)
    fp8_of(weight)


def columns_alone():
    weight = te.built(recipe=BLOCK_RECIPES["2d"], sizes=(64, 32))[0].weight
    weight._rowwise_data = None
    return fp8_of(weight).local_codes


def loaded(net):
    with torch.no_grad():
        net[0].weight.copy_(torch.randn(40, 24))
    return sgd(net)


def reset_twice(net):
    """Then the copy is made of the FP8 weight: what they call a high-precision value is an FP8 tensor."""
    net[0].reset_parameters()
    net[0].weight._high_precision_init_val = net[0].weight.detach()
    return sgd(net)


REMAINDERS = r"which FP8 codes are not\. Use store_param_remainders=False"


@pytest.mark.parametrize(
    ("optimizer", "error", "told"),
    [
        (fused(master_weights=False), fti.MissingInitError, "without a float32 mas"),
        (fused(store_param_remainders=True), fti.MissingInitError, REMAINDERS),
        (loaded, fti.StaleInitError, "does not quantize to its present codes"),
        (reset_twice, fti.StaleInitError, "initialized a second time"),
    ],
    ids=["no masters", "masters share bits with the parameter", "a checkpoint was loaded", "a second reset"],
)
def test_seeding_that_would_go_wrong_raises_and_drops_nothing(optimizer, error, told):
    net = te.built()
    with pytest.raises(error, match=told):
        fti.seed_masters(optimizer(net), net)
    assert fti.memory_report(net).copies > 0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: without("_scale_inv"), "Float8Tensor has no _scale_inv, which fp8-te-init needs"),
        (columns_alone, "holds transposed codes alone"),
        (lambda: te.built(recipe="rowwise", backend="te"), "has no recipe for 'rowwise'"),
        (lambda: te.built(recipe="fp4"), "Unknown recipe"),
        (lambda: te.built(recipe=te.MXFP8BlockScaling(), backend="native"), "no native layer for the recipe MXFP8"),
    ],
    ids=["a release lacks an attribute", "columns alone", "no such recipe there", "unknown recipe", "theirs alone"],
)
def test_what_cannot_be_read_or_built_is_named(call, told):
    with pytest.raises(Fp8Error, match=told):
        call()


def test_errors_without_a_usable_transformer_engine(monkeypatch):
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "quantized_model_init")
    with pytest.raises(Fp8UnsupportedError, match="neither quantized_model_init nor fp8_model_init"):
        te.built(backend="te")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(Fp8UnsupportedError, match="cannot be imported here"):
        te.built(backend="te")


# ---------------------------------------------------------------- several ranks


def deferred(rank, world_size, recipe, sizes):
    """Return what layers start from that are sharded before they are reset, or the sentence that refuses them."""
    with te.installed():
        model = te.built(dtype=torch.float32, sizes=sizes, device="meta", backend="te", recipe=RECIPES[recipe])
        shard(model, world_size).to_empty(device="cpu")
        for layer in model:
            torch.manual_seed(rank)
            layer.reset_parameters()
        locals_ = [layer.weight._local_tensor for layer in model]
        drawn = [local.get_high_precision_init_val().clone() for local in locals_]
        try:
            reductions, optimizer = fti.rescale_(model), sgd(model)
            sources = set(fti.seed_masters(optimizer, model).sources.values())
        except Fp8UnsupportedError as error:
            return str(error)
        masters = [optimizer.master_of(layer.weight).to_local() for layer in model]
        same = all(torch.equal(a, b) for a, b in zip(drawn, masters, strict=True))
        kinds, scales = {type(local).__name__ for local in locals_}, [local.parts()[1].tolist() for local in locals_]
        return same, sources, fti.memory_report(model).copies, kinds, reductions, scales


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("recipe", "world_size", "sizes", "kind"),
    [
        ("delayed", 2, (24, 24, 48), "Float8Tensor"),
        ("current", 4, (24, 48, 96), "Float8Tensor"),
        ("2d", 2, (128, 256, 512), BLOCKS),
        ("mx", 2, (128, 256, 512), MX),
    ],
)
def test_layers_that_are_sharded_before_they_are_reset_start_from_their_rows(
    run_ranks, recipe, world_size, sizes, kind
):
    results = run_ranks(world_size, deferred, recipe, sizes)
    for same, sources, copies, kinds, reductions, scales in results:
        assert (same, sources, copies, kinds) == (True, {"init"}, 0, {kind})
        if recipe not in BLOCK_RECIPES:
            assert (reductions, scales) == (1, results[0][-1]), "one scale on all ranks"


@pytest.mark.distributed
@pytest.mark.parametrize(("recipe", "unit", "rows"), [("2d", 128, 192), ("mx", 32, 80)])
def test_shards_that_cut_blocks_raise_on_all_ranks(run_ranks, recipe, unit, rows):
    for message in run_ranks(2, deferred, recipe, (128, rows)):
        assert f"in multiples of {unit}; this one has {rows} rows on 2 ranks" in message


# ---------------------------------------------------------------- when copies go


def get_of(net):
    return [layer.weight.get_high_precision_init_val() for layer in net]


@pytest.mark.parametrize(
    ("release", "after_forward", "after_step"),
    [("seed", [True, True], [False, False]), ("forward", [False] * 2, [False] * 2), ("manual", [True] * 2, [True] * 2)],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_drops_copies_of_te_modules_by_the_rule_for_native_layers(recipe, release, after_forward, after_step):
    """`release` was ignored: old values stayed after a step, and a second optimizer raised StaleInitError."""
    sizes = (64, 160, 96)
    net = te.built(dtype=torch.float32, recipe=RECIPES[recipe], sizes=sizes, release=release)
    optimizer = sgd(net)
    net(torch.ones(2, 64))
    assert [value is not None for value in get_of(net)] == after_forward
    train_on(net, optimizer, [torch.ones(8, 64)])
    assert [value is not None for value in get_of(net)] == after_step
    assert fti.memory_report(net).copies == (4 * (64 * 160 + 160 * 96) if release == "manual" else 0)
    again = sgd(net)
    assert all(again.master_of(layer.weight) is optimizer.master_of(layer.weight) for layer in net), "they share it"


@pytest.mark.parametrize(("release", "left"), [("seed", False), ("forward", False), ("manual", True)])
def test_te_modules_that_no_optimizer_holds_drop_their_copies_after_the_first_forward(release, left):
    net = te.built(dtype=torch.float32, release=release)
    assert all(value is not None for value in get_of(net))
    net[0](torch.ones(2, 24))
    assert [value is not None for value in get_of(net)] == [left, True], "each after its own"
    net(torch.ones(2, 24))
    assert [value is not None for value in get_of(net)] == [left, left]


# ---------------------------------------------------------------- weights that are FP8 no more


def cut(rank, world_size):
    """Build on the device, then shard: what TransformerEngine's block-scaled tensors become plain tensors of."""
    with te.installed():
        model = te.built(dtype=torch.float32, sizes=(128, 256), recipe=te.Float8BlockScaling(), backend="te")
        told = []
        try:
            shard(model, world_size)
        except Fp8Error as error:
            return [str(error)]
        optimizer = sgd(model)
        try:
            fti.seed_masters(optimizer, model)
        except Fp8Error as error:
            told.append(str(error))
        return told


@pytest.mark.distributed
def test_a_weight_that_fully_shard_cut_into_plain_values_is_told_of_on_all_ranks(run_ranks):
    """Strict seeding reported success, with masters from rounded values."""
    for told in run_ranks(2, cut):
        assert len(told) == 1
        assert "was built as an FP8 weight of TransformerEngine, and is a Tensor of torch.float32 now" in told[0]
        assert "meta device (device='meta'), fully_shard, to_empty, then reset_parameters" in told[0]


def cut_after_building(rank, world_size):
    """Make shards without copies, which TransformerEngine's own per-tensor and MX tensors become by `fully_shard`."""
    told = []
    place = "fp8_te_init.masters.optimizer.logger.warning"
    with te.installed(), mock.patch(place, lambda *said: told.append(said[-1])):
        model = te.built(dtype=torch.float32, sizes=(64, 128), device="meta", backend="te")
        shard(model, world_size).to_empty(device="cpu")
        for layer in model:
            layer.reset_parameters()
            layer.weight._local_tensor.clear_high_precision_init_val()
        optimizer = sgd(model)
        with pytest.raises(fti.MissingInitError) as raised:
            fti.seed_masters(optimizer, model)
    return [*told, str(raised.value)]


@pytest.mark.distributed
def test_a_copy_that_fully_shard_lost_is_told_of_with_the_order_of_calls(run_ranks):
    """The error advised what the user had done."""
    for told in run_ranks(2, cut_after_building):
        assert len(told) == 2
        assert all("(device='meta'), fully_shard, to_empty, then reset_parameters" in sentence for sentence in told)
        assert "TransformerEngine's copy of 0.weight did not survive fully_shard" in told[1]


def test_a_plain_weight_instead_of_an_fp8_one_is_told_of_by_seeding_and_the_report(caplog):
    net = te.built(dtype=torch.float32)
    optimizer = sgd(net)
    net[1]._parameters["weight"] = nn.Parameter(net[1].weight.dequantize())  # as FSDP2 puts parameters
    with pytest.raises(fti.MissingInitError, match=r"1\.weight was built as an FP8 weight"):
        fti.seed_masters(optimizer, net)
    fti.memory_report(net)
    assert "1.weight was built as an FP8 weight" in caplog.text
    caplog.clear()
    for _ in range(2):
        net(torch.ones(2, 24))
    (said,) = [sentence for sentence in caplog.messages if "was built as an FP8 weight" in sentence]
    assert "Linear.weight was built as" in said
    assert "Use TransformerEngine's order" in said
    net[1].weight = nn.Parameter(torch.ones(16, 40))  # the user's own
    caplog.clear()
    fti.memory_report(net)
    assert not caplog.text

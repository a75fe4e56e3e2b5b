"""Every way to keep or make high-precision values: exact to the bit, or refused, or said to be a stand-in."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error, decode
from fp8_te_init._kept_in_module import kept_for
from fp8_te_init._native_rows import NativeRows
from fp8_te_init._parameters import fp8_weights
from fp8_te_init._rows import Rows
from fp8_te_init._sources import ReplaySource, ResidualSource
from fp8_te_init._sources.dither import dithered
from fp8_te_init._sources.residual import from_ordinal, ordinal


def layer(preserve, dtype=torch.bfloat16, shape=(64, 48), recipe="tensorwise") -> nn.Linear:
    torch.manual_seed(0)
    with fti.primary_weights(recipe, preserve=preserve):
        return nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)


def source(module):
    return kept_for(module, "weight").source


# ---------------------------------------------------------------- residual


def test_the_order_of_bfloat16_is_undone_for_all_patterns():
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(from_ordinal(ordinal(values)).view(torch.int16), values.view(torch.int16))
    finite = values[torch.isfinite(values)].float()
    numbers = ordinal(values[torch.isfinite(values)])
    by_number = finite[numbers.argsort()]
    assert (by_number.diff() >= 0).all()


@pytest.mark.parametrize("scale", ["amax", "power_of_2"])
def test_residuals_keep_all_bfloat16_patterns_in_range(scale):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = patterns[torch.isfinite(patterns)]
    values = values[(values.abs() <= 1.0) & (values.abs() >= 2.0**-12)]
    weight = nn.Linear(values.numel() // 16, 16, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        weight.weight.copy_(values[: weight.weight.numel()].view_as(weight.weight))
    start = weight.weight.detach().clone()
    recipe = "rowwise" if scale == "power_of_2" else "tensorwise"
    fti.convert_linear(weight, recipe=recipe, preserve="residual")
    assert isinstance(source(weight), ResidualSource)
    got = weight.weight.get_high_precision_init_val()
    assert torch.equal(got.view(torch.int16), start.view(torch.int16))


def test_residuals_keep_every_bfloat16_pattern_up_to_the_maximum_among_ordinary_values():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    patterns = patterns[patterns.abs() <= 1.0]
    assert patterns.numel() == 2 * (127 * 128 + 1), "zeros and subnormal ones too"
    module = nn.Linear(512, 800, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.normal_(0, 0.2).clamp_(-1, 1).view(-1)[: patterns.numel()] = patterns
    start = module.weight.detach().clone()
    fti.convert_linear(module, preserve="residual")
    assert isinstance(source(module), ResidualSource)
    got = module.weight.get_high_precision_init_val()
    assert torch.equal(got.view(torch.int16), start.view(torch.int16))


def test_residuals_take_one_byte_and_are_exact():
    module = layer("residual", shape=(256, 256))
    assert source(module).nbytes <= 1.1 * 256 * 256
    copy = layer("cpu", shape=(256, 256))
    assert torch.equal(module.weight.get_high_precision_init_val(), copy.weight.get_high_precision_init_val())


def test_residuals_keep_negative_zeros_and_escapes():
    module = nn.Linear(64, 4, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.normal_()
        module.weight[0, 0], module.weight[1, 1], module.weight[2, 2] = -0.0, 1e-30, -1e-38
    start = module.weight.detach().clone()
    fti.convert_linear(module, preserve="residual")
    got = module.weight.get_high_precision_init_val()
    assert torch.equal(got.view(torch.int16), start.view(torch.int16))


def test_the_rows_of_a_residual_keep_their_own_escapes():
    module = nn.Linear(64, 6, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.normal_()
        for row in range(6):
            module.weight[row, row] = -(10.0 ** -(30 + row))
    start = module.weight.detach().clone()
    fti.convert_linear(module, preserve="residual")
    whole, weight = source(module), module.weight.state
    assert isinstance(whole, ResidualSource)
    for first, last in [(0, 2), (2, 5), (5, 6), (6, 6)]:
        part = whole.narrowed(Rows(first, last))
        rows = dataclasses.replace(weight, codes=weight.codes[first:last], first_row=first)
        got = part.values(NativeRows(rows, torch.bfloat16))
        assert torch.equal(got.view(torch.int16), start[first:last].view(torch.int16))
        assert part.nbytes < 64 * (last - first) + 8 * 6


@pytest.mark.parametrize(
    ("dtype", "spread", "why"),
    [(torch.float32, 1.0, "differences of bfloat16"), (torch.bfloat16, 1e-9, "too coarse")],
)
def test_what_residuals_cannot_keep_is_copied_and_said(dtype, spread, why, caplog):
    module = nn.Linear(64, 64, bias=False, dtype=dtype)
    with torch.no_grad():
        module.weight.mul_(spread)
        module.weight[0, 0] = 1.0
    start = module.weight.detach().clone()
    fti.convert_linear(module, preserve="residual")
    assert why in caplog.text
    assert source(module).name == "cpu"
    assert torch.equal(module.weight.get_high_precision_init_val(), start)


def test_rescaling_encodes_residuals_again():
    module = layer("residual")
    start = module.weight.get_high_precision_init_val().clone()
    module.weight.state.take_scale(module.weight.scale / 4)
    module.weight.state.codes.copy_(module.weight.state.quantized(start))
    with pytest.raises(fti.StaleInitError, match="residual"):
        module.weight.get_high_precision_init_val()
    kept_for(module, "weight").keep(start, fp8_weights(module)[0].weight)
    fti.rescale_(module)
    assert torch.equal(module.weight.get_high_precision_init_val(), start)


# ---------------------------------------------------------------- replay

INITS = {
    "default": None,
    "normal": lambda w: nn.init.normal_(w, 0, 0.02),
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "kaiming": lambda w: nn.init.kaiming_normal_(w),
    "xavier": lambda w: nn.init.xavier_uniform_(w),
    "constant": lambda w: nn.init.constant_(w, 0.25),
    "scaled": lambda w: w.data.normal_(generator=torch.Generator().manual_seed(4)).mul_(0.5),
}


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_keeps_nothing_per_element_is_exact_and_leaves_the_generator_alone(init, dtype):
    modules = [layer("replay", dtype), layer("cpu", dtype)]
    if INITS[init]:
        for module in modules:
            torch.manual_seed(3)
            INITS[init](module.weight)
    kind = source(modules[0])
    assert isinstance(kind, ReplaySource)
    assert kind.nbytes <= 5056
    before = torch.get_rng_state()
    value = modules[0].weight.get_high_precision_init_val()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(value, modules[1].weight.get_high_precision_init_val())


def test_what_cannot_be_replayed_is_copied_and_said(caplog):
    module = layer("replay")
    values = torch.randn(64, 48).bfloat16()
    with torch.no_grad():
        module.weight.copy_(values)
    assert "cannot keep this weight exactly (it was not made by" in caplog.text
    assert source(module).name == "cpu"
    assert torch.equal(module.weight.get_high_precision_init_val(), values)


# ---------------------------------------------------------------- Philox


# ---------------------------------------------------------------- checkpoint


def test_masters_come_from_a_checkpoint_file(tmp_path):
    plain = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    for place in (plain.state_dict(), tmp_path / "model.pt", str(tmp_path / "model.pt")):
        net = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
        fti.convert_linear(net, preserve="none")
        net.load_state_dict(plain.state_dict())
        optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
        report = fti.seed_masters(optimizer, net, checkpoint=place)
        assert set(report.sources.values()) == {"checkpoint"}
        for ours, theirs in zip(net, plain, strict=True):
            assert torch.equal(optimizer.master_of(ours.weight), theirs.weight)


def test_masters_come_from_a_folder_of_distributed_checkpoints(tmp_path):
    import torch.distributed.checkpoint as dcp

    plain = nn.Linear(24, 40)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    net = fti.convert_linear(nn.Linear(24, 40), preserve="none")
    net.load_state_dict(plain.state_dict())
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    fti.seed_masters(optimizer, net, checkpoint=tmp_path / "dcp", prefix="model.")
    assert torch.equal(optimizer.master_of(net.weight), plain.weight)


def test_a_checkpoint_that_is_not_there_is_named():
    net = layer("none")
    with pytest.raises(Fp8Error, match=r"There is no checkpoint 'nowhere\.pt'"):
        fti.seed_masters(fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=1), net, checkpoint="nowhere.pt")


# ---------------------------------------------------------------- dither


@pytest.mark.matrix(
    recipe=["tensorwise", "rowwise", "blockwise"], std=[0.02, 1.44e-3, 3.0], fmt=["e4m3", "e5m2"], zeros=[False, True]
)
def test_dither_changes_no_code(recipe, std, fmt, zeros):
    import dataclasses

    from fp8_common import get_recipe

    base = get_recipe(recipe)
    weight = dataclasses.replace(base.weight, format=fmt)
    grad = dataclasses.replace(base.grad_output, format="e4m3")
    config = fti.PrimaryConfig(recipe=dataclasses.replace(base, weight=weight, grad_output=grad))
    module = nn.Linear(300, 200, bias=False)
    with torch.no_grad():
        module.weight.normal_(0, std)
        if zeros:
            module.weight[:50] = 0.0
            module.weight[50:60] = -0.0
    fti.convert_linear(module, config=config, preserve="none")
    named = fp8_weights(module)[0]
    values = dithered(named.weight, seed=0, name="w")
    assert torch.equal(named.weight.quantized(values), named.weight.codes())
    assert (values != named.weight.values()).float().mean() > 0.9, "and does move the values"


def naive_dither(values, scale):
    """Half a unit in the last place of noise: wrong at the edges of binades."""
    exponent = torch.floor(torch.log2((values * scale).abs().clamp_min(2.0**-6)))
    return values + (torch.rand_like(values) - 0.5) * torch.exp2(exponent - 3) / scale


def test_trap_half_ulp_noise_changes_codes():
    module = layer("none", torch.float32, (512, 512))
    with torch.no_grad():
        module.weight.normal_(0, 0.02)
    named = fp8_weights(module)[0]
    naive = naive_dither(named.weight.values(), module.weight.scale)
    wrong = (named.weight.quantized(naive) != named.weight.codes()).float().mean()
    assert wrong > 0.01
    assert torch.equal(named.weight.quantized(dithered(named.weight, seed=0, name="w")), named.weight.codes())


def test_every_code_can_be_dithered():
    module = fti.convert_linear(nn.Linear(256, 64, bias=False), preserve="none")
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    module.weight.state.codes.copy_(codes)
    module.weight.state.scale = torch.tensor(3.7)
    values = dithered(fp8_weights(module)[0].weight, seed=1, name="w")
    again = module.weight.state.quantized(values)
    is_nan = torch.from_numpy(np.isnan(decode(np.arange(256, dtype=np.uint8), "e4m3")))
    assert torch.equal(again[:, ~is_nan], codes[:, ~is_nan])
    assert values[:, is_nan].isnan().all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_dither_keeps_the_scale_of_the_next_step(recipe):
    module = nn.Linear(300, 200, bias=False)
    fti.convert_linear(module, recipe=recipe, preserve="none")
    weight, scale = fp8_weights(module)[0].weight, module.weight.scale.clone()
    values = dithered(weight, seed=0, name="w")
    weight.store(values, weight.keys(values), step=False)
    assert torch.allclose(module.weight.scale, scale, rtol=1e-6, atol=0)

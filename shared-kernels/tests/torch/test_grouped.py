"""Grouped products as the tensor cores are asked for them: layouts and sizes, on a double that checks both."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from fp8_common import E4M3, E5M2, Fp8Error
from fp8_common.torch import _triton, casts
from fp8_common.torch.compat import assume_constant_result
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear import group_offsets, grouped_matmul
from fp8_common.torch_layers.linear.config import GemmConfig, LinearConfig
from fp8_common.torch_layers.linear.function import LinearSpec, fp8_linear
from fp8_common.torch_layers.linear.group_offsets import GroupOffsets, zero_rows
from fp8_common.torch_layers.linear.grouped import RowGroups
from fp8_common.torch_layers.linear.grouped_matmul import path_of
from fp8_common.torch_layers.linear.matmul import MatmulOptions
from fp8_common.torch_layers.linear.plan import decide
from fp8_common.torch_layers.linear.row_codes import pack_rows, unpack_rows
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid

SIZES = {"uneven": [5, 0, 17, 40], "aligned": [16, 32, 0, 16], "one": [0, 0, 0, 7], "empty": [0, 0, 0, 0]}
EXPERTS, COLUMNS, ROWS = 4, 48, 64


def without_memory(x):
    """Return a tensor without data that lies like `x`."""
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def assert_as_the_device_does(ends, rows):
    """What kernels of torch assert on the device, where it ends the process (GroupMMCommon.cuh)."""
    assert all(start <= end for start, end in itertools.pairwise([0, *ends]))
    assert ends[-1] <= rows


@pytest.fixture
def products(monkeypatch):
    """Count the products that the double of `scaled_grouped_mm` makes."""
    made, real, grouped_mm_of_torch = [], grouped_matmul.scaled_grouped_mm, F.grouped_mm

    def scaled_grouped_mm(a, b, a_inv, b_inv, *, offsets, **how):
        # torch's own checks of layouts, sizes and dtypes
        shape = real(*map(without_memory, (a, b, a_inv, b_inv)), offsets=without_memory(offsets), **how).shape
        assert offsets.dtype == torch.int32
        made.append((tuple(a.shape), tuple(b.shape)))
        # what is not computed stays as the memory was
        y, ends = torch.full(shape, torch.nan, dtype=how["out_dtype"]), offsets.tolist()
        assert_as_the_device_does(ends, a.shape[0] if b.ndim == 3 else a.shape[1])
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start == end:
                continue
            if b.ndim == 3:
                product = a[start:end].float() @ b[group].float()
                y[start:end] = (product * a_inv[start:end, None] * b_inv[group]).to(y.dtype)
            else:
                assert (end - start) % 16 == 0
                product = a[:, start:end].float() @ b[start:end].float()
                rows, columns = a_inv.view(len(ends), -1)[group], b_inv.view(len(ends), -1)[group]
                y[group] = (product * rows[:, None] * columns).to(y.dtype)
        return y

    def grouped_mm(a, b, *, offs):
        made.append("bfloat16")
        assert_as_the_device_does(offs.tolist(), a.shape[0] if b.ndim == 3 else a.shape[1])
        y = grouped_mm_of_torch(a, b, offs=offs)
        ends = torch.cat([offs.new_zeros(1), offs])
        if b.ndim == 3:
            y[ends[-1] :] = torch.nan
        else:
            y[ends.diff() == 0] = torch.nan
        return y

    monkeypatch.setattr(grouped_matmul, "device_multiplies", lambda device: "fp8")
    monkeypatch.setattr(grouped_matmul, "scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    return made


@pytest.fixture
def on_the_device(monkeypatch, products):
    """Let products be made as on a device that multiplies FP8."""
    path = grouped_matmul.path_of
    monkeypatch.setattr(grouped_matmul, "path_of", lambda a, b, how: path(a, b, how._replace(emulate=False)))
    return products


def looped(monkeypatch, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(grouped_matmul, "device_multiplies", lambda device: "")
        return run(*arguments, **options)


def stack(recipe, **options):
    """Return the layer of a stack of weights."""
    config = LinearConfig(recipe=recipe, emulate=True, **options)
    grid = ScaleGrid(config.weight, stacked=True)

    def weight(weight, record, both):
        made = grid.quantize_whole(weight)
        scale = made.scale.reshape(-1) if config.weight.granularity == "tensorwise" else made.scale
        return Quantized(made.codes, casts.reciprocal(scale), config.weight.fp8_format, grid.tile)

    return LinearSpec(config, weight)


def run(recipe, sizes, dtype=torch.bfloat16, **options):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(EXPERTS, ROWS, COLUMNS, generator=generator).to(dtype)
    weight = (weight * 8.0 ** torch.arange(EXPERTS)[:, None, None]).to(dtype).requires_grad_()
    x = torch.randn(sum(sizes) + 3, COLUMNS, generator=generator).to(dtype)
    x[sum(sizes) :] = torch.nan
    x.requires_grad_()
    y = fp8_linear(x, weight, stack(recipe, **options), torch.tensor(sizes).cumsum(0))
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


@pytest.mark.matrix(recipe=["tensorwise", "rowwise"], sizes=list(SIZES))
def test_grouped_matmuls_of_the_device_are_the_looped_ones(monkeypatch, on_the_device, recipe, sizes):
    sizes = SIZES[sizes]
    native, rows = run(recipe, sizes), sum(sizes) + 3
    if recipe == "tensorwise":  # gradients are E5M2, which that operator does not take
        assert on_the_device == [((rows, COLUMNS), (EXPERTS, COLUMNS, ROWS)), "bfloat16", "bfloat16"]
    else:
        # of a and b the rows are padded to multiples of 16 within each group, by an upper bound that needs no offsets
        padded = -(-(rows + EXPERTS * 15) // 16) * 16
        products = [((rows, COLUMNS), (EXPERTS, COLUMNS, ROWS)), ((ROWS, padded), (padded, COLUMNS))]
        assert on_the_device == [*products, ((rows, ROWS), (EXPERTS, ROWS, COLUMNS))]
    for actual, wanted in zip(native, looped(monkeypatch, recipe, sizes), strict=True):
        assert not wanted.isnan().any()
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=0)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_decoded_groups_are_the_looped_ones(monkeypatch, products, recipe):
    monkeypatch.setattr(grouped_matmul, "device_multiplies", lambda device: "bfloat16")
    decoded = run(recipe, SIZES["uneven"])
    assert products == ["bfloat16"] * 3
    for actual, wanted in zip(decoded, looped(monkeypatch, recipe, SIZES["uneven"]), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=0)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_few_rows_are_multiplied_in_bfloat16_by_decoded_weights(monkeypatch, products, recipe, sizes):
    """Rows and gradients are not cast: the results are those of bfloat16 matmuls with the rounded weight."""
    few = {"min_rows_per_expert": 1000}
    native, wanted = run(recipe, SIZES[sizes], **few), looped(monkeypatch, recipe, SIZES[sizes], **few)
    assert products == ["bfloat16"] * 3
    for actual, one in zip(native, wanted, strict=True):
        assert not one.isnan().any()
        torch.testing.assert_close(actual, one, rtol=2e-2, atol=0)
    wide = wide_loop(recipe, SIZES[sizes])
    assert all(torch.equal(one, other) for one, other in zip(wanted, wide, strict=True))


def wide_loop(recipe, sizes):
    """Return output and gradients of plain matmuls, expert after expert."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(EXPERTS, ROWS, COLUMNS, generator=generator).bfloat16()
    weight = (weight * 8.0 ** torch.arange(EXPERTS)[:, None, None]).bfloat16()
    x = torch.randn(sum(sizes) + 3, COLUMNS, generator=generator).bfloat16()
    grad = torch.randn(len(x), ROWS, generator=generator).bfloat16()
    y, grad_x, grad_weight = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(weight)
    scaled = stack(recipe).weight_operand(weight, False, False)
    own = scaled.scale_inv[:, None, None] if scaled.scale_inv.ndim == 1 else scaled.expanded_scale_inv
    values = (scaled.codes.float() * own).bfloat16()
    end = 0
    for group, size in enumerate(sizes):
        part = slice(end, end := end + size)
        y[part], grad_x[part] = x[part] @ values[group].mT, grad[part] @ values[group]
        grad_weight[group] = grad[part].mT @ x[part]
    return y, grad_x, grad_weight


class GradientInCodes(torch.autograd.Function):
    """Passes values on; the gradient arrives as codes, as a dispatch sends it."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return coded(grad)


def coded(x):
    cast = LinearConfig(recipe="rowwise").input
    return unpack_rows(pack_rows(x, cast), x.shape[1], cast, x.dtype, torch.arange(len(x)))


def test_few_rows_that_arrive_as_codes_are_their_values():
    weight, ends = torch.randn(2, ROWS, COLUMNS).bfloat16().requires_grad_(), torch.tensor([3, 10])
    x, grad = torch.randn(12, COLUMNS).bfloat16(), torch.randn(12, ROWS).bfloat16()
    spec, found = stack("rowwise", min_rows_per_expert=100), []
    for codes in (True, False):
        rows, weight.grad = coded(x) if codes else coded(x).dequantize(), None
        y = fp8_linear(rows.requires_grad_(), weight, spec, ends)
        GradientInCodes.apply(y).backward(grad) if codes else y.backward(coded(grad).dequantize())
        found.append((y.detach(), rows.grad, weight.grad))
    assert found[0][1] is not None
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_rows_decide_whether_experts_are_multiplied_in_high_precision():
    rows = sum(SIZES["uneven"]) + 3
    exactly = run("rowwise", SIZES["uneven"], min_rows_per_expert=rows // EXPERTS)
    below = run("rowwise", SIZES["uneven"], min_rows_per_expert=rows // EXPERTS + 1)
    usual = run("rowwise", SIZES["uneven"])
    assert all(torch.equal(one, other) for one, other in zip(exactly, usual, strict=True))
    assert not torch.equal(below[0], usual[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_rows_per_expert": -1}, "a non-negative integer, got -1"),
        ({"min_rows_per_expert": True}, "a non-negative integer, got True"),
        ({"min_rows_per_expert": 3.5}, "a non-negative integer, got 3.5"),
        (
            {"min_rows_per_expert": 8, "recipe": "tensorwise_delayed"},
            "cannot be used with delayed scaling of input and grad_output",
        ),
    ],
)
def test_a_number_of_rows_that_does_not_fit_raises(options, message):
    with pytest.raises(Fp8Error, match=message):
        LinearConfig(**options)


@pytest.mark.parametrize(("gemms", "wanted"), [(GemmConfig(), True), (GemmConfig(fast_accum_grad_weight=False), False)])
def test_gradients_of_groups_are_accumulated_fast_by_default(gemms, wanted):
    config, x = LinearConfig(gemms=gemms), torch.ones(4, 8)
    for grouped in (True, False):
        plan = decide(config, x, 8, x.dtype, casts_rows=False, grouped=grouped)
        fast = [own.use_fast_accum for own in (plan.output, plan.grad_input, plan.grad_weight)]
        assert fast == ([True, True, wanted] if grouped else [True, False, False])


def test_which_matmuls_are_made_of_codes(products):
    options = MatmulOptions(torch.bfloat16, emulate=False)
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    e4m3, e5m2 = (Quantized(codes, torch.ones(1), fmt) for fmt in (E4M3, E5M2))
    assert path_of(e4m3, e4m3, options) == "fp8"
    assert path_of(e5m2, e4m3, options) == "bfloat16"
    assert path_of(e4m3, e4m3, options._replace(emulate=True)) == "bfloat16"
    assert path_of(e4m3, e4m3, options._replace(out_dtype=torch.float16)) == "looped"
    assert path_of(Quantized(codes, torch.ones(1, 1), E4M3, (1, 128)), e4m3, options) == "looped"
    assert path_of(Quantized(codes[:, :8], torch.ones(1), E4M3), e4m3, options) == "looped"


def test_nothing_waits_for_the_device(monkeypatch):
    """Casts and native products run on tensors without data, so they read none."""
    offsets = torch.empty(EXPERTS, dtype=torch.int32, device="meta")
    groups = RowGroups(offsets, 37)
    config = LinearConfig(recipe="rowwise")
    x = torch.empty(37, COLUMNS, dtype=torch.bfloat16, device="meta")
    options = MatmulOptions(torch.bfloat16, emulate=False)
    monkeypatch.setattr(grouped_matmul, "device_multiplies", lambda device: "fp8")
    a, b = (groups.quantize_over_rows(x, config.input) for _ in range(2))
    assert groups.matmul_over_rows(a, b, options).shape == (EXPERTS, COLUMNS, COLUMNS)
    weight = torch.empty(EXPERTS, ROWS, COLUMNS, dtype=torch.float8_e4m3fn, device="meta")
    weights = Quantized(weight, torch.empty(EXPERTS, ROWS, 1, device="meta"), config.weight.fp8_format)
    rows = groups.quantize(x, config.input, None, record=False, both=False)
    assert groups.matmul(rows, weights, options).shape == (37, ROWS)


class OffsetsOnAGpu(torch.Tensor):
    """Offsets on a CPU that say they are on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("offsets", "fit"), [([2, 2, 5], True), ([2, 1, 5], False), ([-1, 2, 5], False), ([2, 2, 9], False)]
)
def test_where_only_the_device_knows_that_offsets_do_not_fit_results_are_nan(offsets, fit):
    """An assertion would end the process there."""
    operand = Quantized(torch.zeros(3, 4, 8, dtype=torch.float8_e4m3fn), torch.ones(3), E4M3)
    groups = RowGroups(torch.tensor(offsets).as_subclass(OffsetsOnAGpu), 5)
    checked = groups.checked(operand)
    assert checked.scale_inv.isnan().all() == (not fit)
    rows = Quantized(operand.codes, torch.ones(3, 4, 1), E4M3, transposed=Quantized(operand.codes.mT, None, E4M3))
    assert groups.checked(rows).transposed.scale_inv.shape == (3, 1, 4)
    assert groups.checked(rows).transposed.scale_inv.isnan().all() == (not fit)
    ends = groups.offsets.tolist()
    assert ends == sorted(ends), "the kernels of torch end the process at offsets that fall"
    assert 0 <= ends[0] <= ends[-1] <= 5, "and at those that lead past the rows"
    assert not fit or ends == offsets


@pytest.mark.parametrize("how", ["fp8", "bfloat16"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("ends", [[64, 32, 128, 128], [64, 96, 256, 512], [-7, 3, 3, 128], [999, 0, 0, 0]])
def test_invalid_offsets_give_nan_without_a_wait(monkeypatch, on_the_device, recipe, ends, how):
    """All three products, as where the host does not know the offsets; what they give is NaN."""
    monkeypatch.setattr(GroupOffsets, "known_on_host", property(lambda groups: False))
    monkeypatch.setattr(group_offsets, "check_offsets", lambda offsets, rows: None)
    monkeypatch.setattr(grouped_matmul, "device_multiplies", lambda device: how)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(EXPERTS, ROWS, COLUMNS, generator=generator).bfloat16().requires_grad_()
    x = torch.randn(128, COLUMNS, generator=generator).bfloat16().requires_grad_()
    y = fp8_linear(x, weight, stack(recipe), torch.tensor(ends))
    y.backward(torch.ones_like(y))
    assert len(on_the_device) == 3
    assert y.isnan().all()


def test_compiled_matmuls_give_nan_for_invalid_offsets():
    x, weight = torch.ones(5, COLUMNS, dtype=torch.bfloat16), torch.ones(3, ROWS, COLUMNS, dtype=torch.bfloat16)
    spec = stack("tensorwise")
    product = torch.compile(lambda x, w, o: fp8_linear(x, w, spec, o), backend="aot_eager", fullgraph=True)
    assert product(x, weight, torch.tensor([2, 2, 5])).isfinite().all()
    with pytest.raises(Fp8Error, match="must begin at 0 or above, never fall"):
        product(x, weight, torch.tensor([2, 1, 5]))


@pytest.mark.parametrize("fused", [True, False])
def test_rows_of_no_group_are_zero_in_compiled_code(monkeypatch, fused):
    """Where compilers see casts as on a GPU, zeros are written in place, and nothing else changes."""
    monkeypatch.setattr(_triton, "rounds_once", assume_constant_result(lambda *device: fused))
    y, keep = torch.randn(5, 3, 2), torch.tensor([True, False, True, True, False])
    before = y.clone()
    backend = "inductor" if fused else "aot_eager"  # which writes in place, and which does not
    program = torch.compile(lambda y, keep: zero_rows(y * 2, keep) + 1, fullgraph=True, backend=backend)
    assert torch.equal(program(y, keep), torch.where(keep[:, None, None], before * 2, 0) + 1)
    assert torch.equal(y, before)

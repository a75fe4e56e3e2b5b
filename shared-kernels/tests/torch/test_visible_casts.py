"""Casts that a compiler may fuse: compiled by Inductor for a CPU, they have the bits of the definition."""

import ml_dtypes
import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common.presets import deepgemm, flax, msamp, te_current, te_delayed, torchao
from fp8_common.testing import adversarial, adversarial_amax, assert_same_bits
from fp8_common.testing.compare import as_numpy
from fp8_common.torch import _triton, casts
from fp8_common.torch.compat import assume_constant_result

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
POLICIES = {preset.__name__: preset() for preset in (te_delayed, te_current, torchao, flax, msamp, deepgemm)}
FOLD = torch.linspace(0.5, 2, 96)


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Compile the casts of this file as on a GPU, each test anew."""
    monkeypatch.setattr(_triton, "rounds_once", assume_constant_result(lambda *device: True))
    torch._dynamo.reset()


def tensor(x):
    """Return a tensor with the bits of a NumPy array."""
    bits = torch.from_numpy(np.ascontiguousarray(x).view({2: np.int16, 4: np.int32}[x.dtype.itemsize]).copy())
    return bits.view(getattr(torch, x.dtype.name))


def matrices(dtype, fmt):
    """A matrix with special values in some rows, one without, one of zeros."""
    rng = np.random.default_rng(0)
    calm = (rng.normal(size=(48, 96)) * np.exp2(rng.integers(-9, 9, size=(48, 96)))).astype(DTYPES[dtype])
    planted, special = calm.copy(), adversarial(fmt, DTYPES[dtype])
    planted[:20] = np.resize(special, (20, 96))
    return [calm, planted, np.zeros_like(calm)]


def compiled(function, *arguments):
    """Compile for the CPU, as one graph, and call."""
    return torch.compile(function, fullgraph=True, dynamic=False)(*arguments)


def reciprocal(scale):
    """Return 1 / scale in float32."""
    with np.errstate(all="ignore"):
        return np.float32(1) / scale


def assert_cast(made, x, scale, fmt):
    """Compare codes, scale and its reciprocal with the definition."""
    assert_same_bits(made.scale, scale)
    assert_same_bits(made.scale_inv, reciprocal(scale))
    assert_same_bits(made.codes, f8.quantize(x, scale, fmt), fmt=fmt, source=x)
    if made.by_columns is not None:
        assert_same_bits(made.by_columns.codes.t().contiguous(), f8.quantize(x, scale, fmt), fmt=fmt, source=x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_one_scale(dtype, fmt):
    form = f8.get_format(fmt)
    for both in (False, True):
        for x in matrices(dtype, fmt):
            made = compiled(lambda x, both=both: casts.quantize_dynamic(x, form, f8.CANONICAL, both=both), tensor(x))
            assert (made.by_columns is not None) == both
            assert_cast(made, x, f8.amax_to_scale(f8.amax(x), fmt), fmt)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_scale_for_each_row_and_for_each_column(dtype, fmt):
    form = f8.get_format(fmt)
    for x in matrices(dtype, fmt):
        rows, columns = compiled(
            lambda x: [casts.quantize_dynamic(y, form, f8.CANONICAL, (1, 0)) for y in (x, x.t())],
            tensor(x),
        )
        assert_cast(rows, x, f8.quantize_rowwise(x, fmt).scale, fmt)
        turned = np.ascontiguousarray(x.T)
        assert_cast(columns, turned, f8.quantize_rowwise(turned, fmt).scale, fmt)


@pytest.mark.parametrize("dtype", DTYPES)
def test_folded_rows(dtype):
    for x in matrices(dtype, "e5m2"):
        made = compiled(
            lambda x, fold: casts.quantize_dynamic(x, f8.E5M2, f8.CANONICAL, (1, 0), fold=fold), tensor(x), FOLD
        )
        with np.errstate(all="ignore"):
            folded = x.astype(np.float32) * as_numpy(FOLD)
        assert_cast(made, folded, f8.quantize_rowwise(folded, "e5m2").scale, "e5m2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fold", [None, FOLD])
def test_rows_and_columns_by_one_operator(dtype, fold):
    """The fold is that of the rows: what is contracted over them is cast without it."""
    for x in matrices(dtype, "e4m3"):
        made = compiled(
            lambda x: casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL, (1, 0), fold=fold, both=True), tensor(x)
        )
        with np.errstate(all="ignore"):
            folded = x if fold is None else x.astype(np.float32) * as_numpy(fold)
        turned = np.ascontiguousarray(x.T)
        assert_cast(made._replace(by_columns=None), folded, f8.quantize_rowwise(folded, "e4m3").scale, "e4m3")
        assert_cast(made.by_columns, turned, f8.quantize_rowwise(turned, "e4m3").scale, "e4m3")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_rule_for_scales_in_compiled_code(policy):
    """Rows of one element: their amax are all kinds of values."""
    rule = POLICIES[policy]
    x = adversarial_amax().reshape(-1, 1)
    made = compiled(lambda x: casts.quantize_dynamic(x, f8.E4M3, rule, (1, 0)), tensor(x))
    with np.errstate(all="ignore"):
        scale = f8.amax_to_scale(f8.amax(x, axis=-1, keepdims=True), "e4m3", rule)
    assert_same_bits(made.scale, scale)
    assert_same_bits(made.scale_inv, reciprocal(scale))


def test_a_given_scale_and_an_amax_from_one_pass():
    for x in matrices("bfloat16", "e4m3"):
        codes, amax, _ = compiled(lambda x, s: casts.quantize_with_amax(x, s, f8.E4M3), tensor(x), torch.tensor(0.37))
        assert_same_bits(codes, f8.quantize(x, np.float32(0.37), "e4m3"), fmt="e4m3", source=x)
        assert_same_bits(amax, f8.amax(x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_cast_is_what_others_see(dtype):
    """A compiler keeps float32 between a producer and the cast; the codes are those of the 16-bit values."""
    rng = np.random.default_rng(1)
    a, b = (tensor(rng.normal(size=(64, 96)).astype(DTYPES[dtype])) for _ in range(2))

    def program(a, b):
        x = torch.nn.functional.silu(a) * b + a
        scale = torch.full((), 3.0)
        rows = casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL, (1, 0))
        whole = casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL, both=True)
        return x, rows, whole, casts.quantize_with_amax(x, scale, f8.E4M3)

    x, rows, whole, (codes, amax, _) = compiled(program, a, b)
    x = as_numpy(x)
    assert_cast(rows, x, f8.quantize_rowwise(x, "e4m3").scale, "e4m3")
    assert_cast(whole, x, f8.amax_to_scale(f8.amax(x), "e4m3"), "e4m3")
    assert_same_bits(codes, f8.quantize(x, np.float32(3), "e4m3"), fmt="e4m3", source=x)
    assert_same_bits(amax, f8.amax(x))


@pytest.mark.parametrize(("capability", "fused"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_casts_are_fused_only_where_a_conversion_rounds_once(monkeypatch, capability, fused):
    """On 8.9 Triton converts through float16: 0.28 % of E4M3 codes would be others."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _triton.rounds_once("cuda", 0) == fused
    assert not _triton.rounds_once("cpu", None)

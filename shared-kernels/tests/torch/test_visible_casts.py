"""Casts that a compiler may fuse: compiled by Inductor for a CPU, they have the bits of the definition."""

import numpy as np
import pytest
import torch

import fp8_common as f8
from conformance_implementations import as_tensor
from fp8_common.presets import te_current, te_delayed
from fp8_common.testing import adversarial, adversarial_amax, assert_same_bits
from fp8_common.testing.compare import as_numpy
from fp8_common.torch import _triton, casts, delayed, numerics
from fp8_common.torch.compat import assume_constant_result
from kernel_inputs import DTYPES

FOLD = torch.linspace(0.5, 2, 96)


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Compile the casts of this file as on a GPU, each test anew."""
    monkeypatch.setattr(_triton, "rounds_once", assume_constant_result(lambda *device: True))
    torch._dynamo.reset()


def compiled(function):
    """Compile for the CPU, as one graph."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def assert_cast(made, x, scale, fmt):
    """Compare codes, scale and its reciprocal with the definition; casts both ways may keep the reciprocal alone."""
    if made.scale is not None:
        assert_same_bits(made.scale, scale)
    assert_same_bits(made.scale_inv, f8.numerics.reciprocal(scale))
    assert_same_bits(made.codes, f8.quantize(x, scale, fmt), fmt=fmt, source=x)


def assert_rows(made, x, fmt):
    assert_cast(made, x, f8.quantize_rowwise(x, fmt).scale, fmt)


def dynamic(x, fmt, block=None, **options):
    return casts.quantize_dynamic(x, f8.formats.get_format(fmt), f8.CANONICAL, block, **options)


CASTS = {
    "one scale": lambda x, fmt: dynamic(x, fmt),
    "one scale, both ways": lambda x, fmt: dynamic(x, fmt, both=True),
    "rows": lambda x, fmt: dynamic(x, fmt, (1, 0)),
    "columns": lambda x, fmt: dynamic(x.t(), fmt, (1, 0)),
    "folded rows": lambda x, fmt: dynamic(x, fmt, (1, 0), fold=FOLD),
    "rows and columns": lambda x, fmt: dynamic(x, fmt, (1, 0), both=True),
    "folded rows and columns": lambda x, fmt: dynamic(x, fmt, (1, 0), fold=FOLD, both=True),
    "a given scale": lambda x, fmt: casts.quantize_with_amax(x, torch.tensor(0.37), f8.formats.get_format(fmt)),
}


@pytest.mark.matrix("each", name=list(CASTS), dtype=list(DTYPES), fmt=["e4m3", "e5m2"])
def test_every_cast_of_a_matrix(name, dtype, fmt):
    rng = np.random.default_rng(0)
    calm = (rng.normal(size=(48, 96)) * np.exp2(rng.integers(-9, 9, size=(48, 96)))).astype(DTYPES[dtype])
    planted = calm.copy()
    planted[:20] = np.resize(adversarial(fmt, DTYPES[dtype]), (20, 96))
    program = compiled(lambda x: CASTS[name](x, fmt))
    for x in (calm, planted, np.zeros_like(calm)):
        made = program(as_tensor(x))
        if name == "a given scale":
            assert_same_bits(made[0], f8.quantize(x, np.float32(0.37), fmt), fmt=fmt, source=x)
            assert_same_bits(made[1], f8.amax(x))
            continue
        assert (made.transposed is not None) == ("both" in name or "and columns" in name)
        turned = np.ascontiguousarray(x.T)
        if name.startswith("one"):
            scale = f8.amax_to_scale(f8.amax(x), fmt)
            assert_cast(made, x, scale, fmt)
            if made.transposed is not None:
                assert_same_bits(made.transposed.codes, f8.quantize(turned, scale, fmt), fmt=fmt, source=turned)
            continue
        with np.errstate(all="ignore"):
            folded = x.astype(np.float32) * as_numpy(FOLD) if "fold" in name else x
        assert_rows(made, turned if name == "columns" else folded, fmt)
        if made.transposed is not None:
            assert_rows(made.transposed, turned, fmt)


@pytest.mark.parametrize("late", [None, False, True])
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_scale_of_earlier_steps(fmt, ready, late):
    x = np.random.default_rng(2).normal(size=(48, 96)).astype(DTYPES["bfloat16"])
    flags, policy = (torch.tensor(ready), None if late is None else torch.tensor(late)), te_delayed()

    @compiled
    def program(x, scale, fits):
        return delayed.cast_delayed(x, numerics.amax_of(x), scale, *flags, f8.formats.get_format(fmt), policy, fits)

    dynamic = f8.amax_to_scale(f8.amax(x), fmt, te_delayed())
    for earlier, fits in ((dynamic / 4, False), (dynamic / 4, True), (dynamic / 2, True)):
        used = ready and (not fits or earlier * 2 >= dynamic)
        want = np.float32(np.nan) if used and late else earlier if used else dynamic
        codes, transposed, scale, scale_inv = program(as_tensor(x), torch.tensor(earlier), fits)
        assert_same_bits(scale, want)
        assert_same_bits(scale_inv, f8.numerics.reciprocal(want))
        assert_same_bits(codes, f8.quantize(x, want, fmt), fmt=fmt, source=x)
        turned = np.ascontiguousarray(x.T)
        assert_same_bits(transposed, f8.quantize(turned, want, fmt), fmt=fmt, source=turned)


def test_every_rule_for_scales():
    """Rows of one element: their amax are all kinds of values."""
    rules, x = [preset() for preset in (te_delayed, te_current)], adversarial_amax()
    program = compiled(lambda x: [casts.quantize_dynamic(x, f8.E4M3, rule, (1, 0)) for rule in rules])
    for rule, made in zip(rules, program(as_tensor(x[:, None])), strict=True):
        want = f8.amax_to_scale(x[:, None], "e4m3", rule)
        assert_same_bits(made.scale, want, name=rule.name)
        assert_same_bits(made.scale_inv, f8.numerics.reciprocal(want), name=rule.name)


def test_casts_show_their_results_to_watchers():
    """A compiler keeps float32 between a producer and the cast; the codes are those of the 16-bit values."""

    @compiled
    def program(half, brain):
        x, y = (torch.nn.functional.silu(a) * b + a for a, b in (half, brain))
        rows, whole = dynamic(x, "e4m3", (1, 0)), dynamic(y, "e4m3")
        return x, rows, y, whole, casts.quantize_with_amax(y, torch.full((), 3.0), f8.E4M3)

    rng = np.random.default_rng(1)
    pairs = [[as_tensor(rng.normal(size=(64, 96)).astype(DTYPES[dtype])) for _ in range(2)] for dtype in [*DTYPES][:2]]
    x, rows, y, whole, (codes, amax) = program(*pairs)
    assert_rows(rows, as_numpy(x), "e4m3")
    seen = as_numpy(y)
    assert_cast(whole, seen, f8.amax_to_scale(f8.amax(seen), "e4m3"), "e4m3")
    assert_same_bits(codes, f8.quantize(seen, np.float32(3), "e4m3"), fmt="e4m3", source=seen)
    assert_same_bits(amax, f8.amax(seen))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_16_bit_value_and_float32_near_each_limit(fmt):
    """A compiler saturates by comparisons: NaN stays NaN, and a finite number whose product overflows saturates."""
    limits = np.float32([f8.formats.get_format(fmt).max, np.finfo(np.float32).max, np.finfo(np.float32).tiny, np.inf])
    near = limits.view(np.int32)[:, None] + np.arange(-70, 70, dtype=np.int32)
    single = np.concatenate([near.ravel(), near.ravel() | np.int32(-(2**31))]).view(np.float32)
    halves = [np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype]) for dtype in ("bfloat16", "float16")]
    program = compiled(lambda x, scale: casts.quantize(x, scale, f8.formats.get_format(fmt)))
    for x in (single, *halves):
        for scale in np.float32([1, 448, 2.0**100, 2.0**-100, 0.3, np.nan]):
            codes, wanted = program(as_tensor(x), torch.tensor(scale)), f8.quantize(x, scale, fmt)
            assert_same_bits(codes, wanted, fmt=fmt, source=x, name=str(scale))

"""Operators use the kernels where they apply."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import fp8_common as f8
from fp8_common import Fp8UnsupportedError
from fp8_common import torch as f8t
from fp8_common.testing import assert_same_bits
from fp8_common.torch import _triton, casts
from fp8_common.torch._operators import policy_key


def parts_of(made):
    return made.codes, made.scale, made.scale_inv


POLICY = policy_key(f8.CANONICAL)
X = torch.linspace(-5, 7, 12 * 160).reshape(12, 160)
FOLD = torch.linspace(1, 3, 160)
TWO = torch.tensor(2.0)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched."""
    names, run = [], _triton.run
    monkeypatch.setattr(_triton, "run", lambda plan, *x, **tensors: (names.append(plan.name), run(plan, *x, **tensors)))
    return names


CALLS = {
    "amax": (lambda x: f8t.amax(x), ["amax"]),
    "quantize": (lambda x: f8t.quantize(x, TWO, "e4m3"), ["cast"]),
    "transposed memory": (lambda x: f8t.quantize(x.t(), TWO, "e4m3"), ["cast"]),
    "strided memory": (lambda x: f8t.quantize(x[:, ::2], TWO, "e4m3"), ["cast"]),
    "rowwise": (lambda x: f8t.quantize_rowwise(x, "e4m3"), ["rowwise"]),
    "1x128": (lambda x: f8t.quantize_blockwise(x, "e5m2"), ["block_1x128"]),
    "128x128": (lambda x: f8t.quantize_blockwise(x, "e5m2", (128, 128)), ["block_128x128"]),
    "mx": (lambda x: f8t.quantize_mx(x, "e4m3"), ["mx"]),
    "fake": (lambda x: f8t.fake_quantize(x, TWO, "e4m3"), ["cast", "dequantize"]),
    "tensorwise": (lambda x: parts_of(casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL)), ["amax", "cast"]),
    "with amax": (lambda x: casts.quantize_with_amax(x, TWO, f8.E4M3)[:2], ["cast"]),
    "folded": (lambda x: parts_of(casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL, (1, 0), fold=FOLD)), ["rowwise"]),
    "columns": (lambda x: f8t.quantize_rowwise(x, "e4m3", axis=0), []),
    "a scale per row": (lambda x: f8t.quantize(x, torch.ones(12, 1), "e4m3"), []),
    "fnuz": (lambda x: f8t.quantize(x, TWO, "e4m3fnuz"), []),
    "batched blocks": (lambda x: f8t.quantize_blockwise(x.view(2, 6, 160), "e4m3", (128, 128)), []),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_are_launched_and_equal_the_references(name, launched, monkeypatch):
    call, kernels = CALLS[name]
    got = call(X)
    assert launched == kernels
    monkeypatch.setenv("FP8_COMMON_BACKEND", "reference")
    want = call(X)
    assert launched == kernels
    for g, w in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        assert_same_bits(g, w)
        assert g.stride() == w.stride()


def test_compiled_code_launches_the_same_kernels_and_fake_tensors_none(launched):
    compiled = torch.compile(lambda x: f8t.quantize_mx(x, "e4m3"), backend="aot_eager", fullgraph=True)
    with FakeTensorMode() as mode:
        f8t.quantize_mx(mode.from_tensor(X), "e4m3")
    assert launched == []
    for got, want in zip(compiled(X), f8t.quantize_mx(X, "e4m3"), strict=True):
        assert_same_bits(got, want)
    assert launched == ["mx", "mx"]


def test_opcheck_with_kernels():
    opcheck(torch.ops.fp8_common.quantize.default, (X, TWO, "e4m3"))
    for block in (None, [1, 0], [1, 128]):
        opcheck(torch.ops.fp8_common.dynamic.default, (X, None, None, "e4m3", POLICY, block))


def test_a_gpu_without_fp8_raises_only_on_demand(monkeypatch):
    monkeypatch.setattr(_triton, "_obstacle", lambda device: "compute capability 8.0 has no FP8 conversion")
    with pytest.raises(Fp8UnsupportedError, match=r"FP8_COMMON_BACKEND=triton, but compute capability 8\.0"):
        f8t.quantize(X, TWO, "e4m3")
    monkeypatch.setenv("FP8_COMMON_BACKEND", "auto")
    assert f8t.quantize(X, TWO, "e4m3").dtype == torch.float8_e4m3fn

"""Kernels of gated MLPs equal the NumPy definition bit for bit: the activation at every bfloat16, and all casts."""

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import fp8_common as f8
import kernel_inputs
from fp8_common._kernels.gated import silu_mul, silu_mul_backward
from fp8_common.testing import assert_same_bits
from fp8_common.torch import _triton
from fp8_common.torch_layers.linear import gated
from fp8_common.torch_layers.linear.grouped import RowGroups
from kernel_inputs import DTYPES, SEED, calm, planted, tensor

ALL = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
ENDS = {"uneven": [3, 3, 20, 90], "empty": [0, 0, 0], "one": [100], "full": [16, 100], "many": [*range(0, 100, 3), 100]}
ROWS = 103
"""The last ones are in no group."""


@triton.jit
def values_kernel(gate_ptr, up_ptr, grad_ptr, y_ptr, of_gate_ptr, of_up_ptr, again_ptr, BLOCK: tl.constexpr):
    """Store the activation and the gradients, which the kernels cast at once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(gate_ptr + at), tl.load(up_ptr + at)
    tl.store(y_ptr + at, silu_mul(gate, up))
    of_gate, of_up, y = silu_mul_backward(tl.load(grad_ptr + at), gate, up)
    tl.store(of_gate_ptr + at, of_gate)
    tl.store(of_up_ptr + at, of_up)
    tl.store(again_ptr + at, y)


def test_activation_and_gradients_are_the_definition_at_every_gate():
    rng = np.random.default_rng(SEED)
    up, grad = (rng.normal(size=ALL.size).astype(ALL.dtype) for _ in range(2))
    up[::97], grad[::89] = np.inf, np.nan
    made = [torch.empty(ALL.size, dtype=torch.bfloat16, device=kernel_inputs.DEVICE) for _ in range(4)]
    values_kernel[(16,)](*map(tensor, (ALL, up, grad)), *made, BLOCK=4096)
    wanted = f8.numerics.silu_mul(ALL, up)
    for found, expected in zip(made, (wanted, *f8.numerics.silu_mul_backward(grad, ALL, up), wanted), strict=True):
        assert_same_bits(found, expected)


def inputs(shape, dtype, apart, *, wild=True):
    """Return gate and up, as kernels get them, and both apart."""
    both = planted((shape[0], 2 * shape[1]), dtype, "e4m3") if wild else calm((shape[0], 2 * shape[1]), dtype)
    halves = [np.ascontiguousarray(half) for half in np.split(both, 2, axis=1)]
    return [tensor(half) for half in halves] if apart else [tensor(both), None], halves


@pytest.mark.matrix(
    dtype=list(DTYPES), shape=[(ROWS, 80), (5, 517), (3, 2048)], apart=[False, True], fmt=["e4m3", "e5m2"]
)
def test_rows_of_the_activation_are_cast(dtype, shape, apart, fmt):
    given, halves = inputs(shape, dtype, apart)
    codes, scale_inv = gated.gated_rows(*given, f8.formats.get_format(fmt), f8.POWER_OF_2)
    hidden = f8.numerics.silu_mul(*halves)
    want = f8.quantize_rowwise(hidden, fmt, policy=f8.POWER_OF_2)
    assert_same_bits(scale_inv, f8.numerics.reciprocal(want.scale).reshape(-1))
    assert_same_bits(codes, want.data, fmt=fmt, source=hidden)


@pytest.mark.matrix(
    ends=list(ENDS),
    dtype=["bfloat16", "float32"],
    columns=[80, 37, 64],
    apart=[False, True],
    wild=[True, False],
    policy=[f8.POWER_OF_2, f8.CANONICAL],
)
def test_gradients_are_cast_by_rows_and_columns_of_groups(ends, dtype, columns, apart, wild, policy, monkeypatch):
    given, halves = inputs((ROWS, columns), dtype, apart, wild=wild)
    ends = np.array(ENDS[ends])
    grad = calm((ROWS, columns), dtype)
    rows = RowGroups(torch.tensor(ends, dtype=torch.int32, device=kernel_inputs.DEVICE), ROWS)
    folds = [np.exp2(np.random.default_rng(i).integers(-3, 3, (len(ends), columns))).astype(np.float32) for i in (0, 1)]
    fold = [tensor(one) for one in folds] if apart else [tensor(np.concatenate(folds, axis=1)), None]
    launched, run = [], _triton.run
    monkeypatch.setattr(_triton, "run", lambda plan, *_, **named: (launched.append(plan.name), run(plan, *_, **named)))
    index = rows.of_row, rows.source, rows.of_place, rows.padded[1]
    codes, turned, scales = gated.gated_back(*given, tensor(grad), *fold, *index, f8.E4M3, policy)
    assert launched == ["gated_back_amax", "scales", "gated_back_cast"]
    at = gated.scales_of_gradients(ROWS, columns, len(ends), apart=apart)
    of_rows, of_columns, of_hidden = (scales.narrow(0, *at[key]) for key in ("rows", "gradients", "hidden"))
    gradients, hidden = f8.numerics.silu_mul_backward(grad, *halves), f8.numerics.silu_mul(*halves)
    last = ends[-1]
    group = np.searchsorted(ends, np.arange(last), side="right")
    with np.errstate(all="ignore"):
        folded = [one[:last].astype(np.float32) * own[group] for one, own in zip(gradients, folds, strict=True)]
    folded = folded if apart else [np.concatenate(folded, axis=1)]
    for i, one in enumerate(folded):
        want = f8.quantize_rowwise(one, "e4m3", policy=policy)
        own = codes.view(len(folded), ROWS, -1)[i, :last]
        assert_same_bits(of_rows.view(len(folded), -1)[i, :last], f8.numerics.reciprocal(want.scale).reshape(-1))
        assert_same_bits(own, want.data, fmt="e4m3", source=one)
    starts, firsts = [0, *ends[:-1]], rows.padded[0].tolist()
    found = (
        [of_columns.view(2, len(ends), -1)[i] for i in (0, 1)] if apart else of_columns.view(len(ends), -1).chunk(2, 1)
    )
    for part, (x, inverses) in enumerate(
        zip((*gradients, hidden), (*found, of_hidden.view(len(ends), -1)), strict=True)
    ):
        for g, (start, end, first) in enumerate(zip(starts, ends, firsts, strict=True)):
            scale = f8.amax_to_scale(f8.amax(x[start:end], axis=0), "e4m3", policy=policy)
            assert_same_bits(inverses[g].contiguous(), f8.numerics.reciprocal(scale))
            want = f8.quantize(x[start:end], scale, "e4m3")
            size = int(rows.padded[1][g]) - first
            padded = np.zeros((size, columns), np.uint8)
            padded[: end - start] = want.view(np.uint8)
            own = turned[part * columns : (part + 1) * columns, first : first + size].t().contiguous()
            assert_same_bits(own[: end - start], want, fmt="e4m3", source=x[start:end])
            assert not own[end - start :].view(torch.uint8).any(), "filled with zeros"

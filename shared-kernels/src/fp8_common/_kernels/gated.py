"""Kernels for silu(gate) * up and its gradients, stored as FP8 codes.

Neither the activation nor the gradients of gate and up are written to memory in high precision. In the backward, rows
are in consecutive groups, as in `groups`. `fp8_common.numerics.silu_mul` defines the values.

Dims: gate and up are [M, N]. Without `up_ptr` they are the halves of gate_ptr [M, 2 N]: folds and codes of gradients
then have 2 N columns, and a row of both gradients has one scale. With `up_ptr`, the folds of gate and up have separate
pointers, and both gradients have separate codes and row scales.
"""

import triton
import triton.language as tl

from fp8_common._kernels.device import (
    as_bits,
    as_float,
    multiple_of_16,
    narrow_key,
    product,
    reciprocal,
    scale_of_key,
    scaled,
    store_reciprocal,
    to_fp8,
    widen_key,
)
from fp8_common._kernels.groups import groups_of_rows, places_of_tile
from fp8_common._kernels.launch import (
    Launch,
    Out,
    codes,
    input_dtype,
    matrix_sizes,
    next_power_of_2,
    plan,
    scale_constants,
    tile_count,
)
from fp8_common._kernels.rows import LONGEST_ROW
from fp8_common._reference import activations
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format
from fp8_common.hardware import ALIGNMENT
from fp8_common.policy import CANONICAL, ScalePolicy

LOWEST = tl.constexpr(activations.LOWEST)
HIGHEST = tl.constexpr(activations.HIGHEST)
LOG2E = tl.constexpr(activations.LOG2E)
LOG2_HIGH = tl.constexpr(activations.LOG2_HIGH)
LOG2_LOW = tl.constexpr(activations.LOG2_LOW)
ROUND = tl.constexpr(activations.ROUND)
EXPONENT = tl.constexpr(126 - activations.ROUND_BITS)
C5, C4, C3, C2, C1, C0 = (tl.constexpr(c) for c in activations.POLYNOMIAL)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of float32 x.

    See `fp8_common._reference.activations`.
    """
    # comparisons, because a floating point minimum drops NaN
    v = tl.where(x < LOWEST, -LOWEST, -x)
    v = tl.where(x > HIGHEST, -HIGHEST, v)
    shifted = product(v, LOG2E) + ROUND
    whole = shifted - ROUND
    # exact multiplications: fusing them with sums makes no difference
    rest = (v - whole * LOG2_HIGH) - whole * LOG2_LOW
    exp = product(rest, C5) + C4
    exp = product(exp, rest) + C3
    exp = product(exp, rest) + C2
    exp = product(exp, rest) + C1
    exp = product(exp, rest) + C0
    return reciprocal(product(exp, as_float((as_bits(shifted) + EXPONENT) << 23)) + 1.0)


@triton.jit
def silu_mul(gate, up):
    """Return silu(gate) * up, rounded like `fp8_common.numerics.silu_mul`."""
    x = gate.to(tl.float32)
    silu = (x * sigmoid(x)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def silu_mul_backward(grad, gate, up):
    """Return the gradients of gate and up, and silu(gate) * up."""
    DTYPE: tl.constexpr = gate.dtype
    dy, x, u = grad.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
    s = sigmoid(x)
    silu = (x * s).to(DTYPE).to(tl.float32)
    of_silu = (dy * u).to(DTYPE).to(tl.float32)
    of_gate = (of_silu * s) * (product(x, 1.0 - s) + 1.0)
    return of_gate.to(DTYPE), (dy * silu).to(DTYPE), (silu * u).to(DTYPE)


@triton.jit
def load_gate_up(gate_ptr, up_ptr, r, c, N, mask):
    """Load gate and up at rows r and columns c."""
    if up_ptr is None:
        at = r.to(tl.int64) * (2 * N) + c
        return tl.load(gate_ptr + at, mask=mask, other=0.0), tl.load(gate_ptr + at + N, mask=mask, other=0.0)
    else:
        at = r.to(tl.int64) * N + c
        return tl.load(gate_ptr + at, mask=mask, other=0.0), tl.load(up_ptr + at, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["M", "N"])
def gated_rows_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    scale_inv_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Cast silu(gate) * up with row scales; BN >= N.

    `scale_inv` is float32 [M].
    """
    if ALIGNED:
        N = multiple_of_16(N)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BN)[None, :]
    mask = (r[:, None] < M) & (c < N)
    gate, up = load_gate_up(gate_ptr, up_ptr, r[:, None], c, N, mask)
    hidden = silu_mul(gate, up)
    scale = scale_of_key(widen_key(tl.max(narrow_key(hidden), axis=1), hidden.dtype), 1.0, FMAX, RULE)
    at = r[:, None].to(tl.int64) * N + c
    tl.store(y_ptr + at, to_fp8(scaled(hidden, scale[:, None]), y_ptr.dtype.element_ty), mask=mask)
    store_reciprocal(scale_inv_ptr, r, scale, r < M)


@triton.jit
def gradients_of_tile(gate_ptr, up_ptr, grad_ptr, r, c, N, mask):
    """Return both gradients and silu(gate) * up of a tile."""
    gate, up = load_gate_up(gate_ptr, up_ptr, r, c, N, mask)
    return silu_mul_backward(tl.load(grad_ptr + r.to(tl.int64) * N + c, mask=mask, other=0.0), gate, up)


@triton.jit
def folds_of_group(fold_ptr, up_fold_ptr, g, c, N):
    """Load the folds of columns c in group g, of both gradients."""
    if up_fold_ptr is None:
        at = 2 * g * N.to(tl.int64) + c
        return tl.load(fold_ptr + at, mask=c < N, other=1.0), tl.load(fold_ptr + at + N, mask=c < N, other=1.0)
    else:
        at = g * N.to(tl.int64) + c
        return tl.load(fold_ptr + at, mask=c < N, other=1.0), tl.load(up_fold_ptr + at, mask=c < N, other=1.0)


# This function and the next have no pointer arguments: torch assumes that a pointer passed to a function that returns
# offsets for stores is written to.
@triton.jit
def columns_of_group(g, columns, M, N, COUNT, APART: tl.constexpr):
    """Return the places of the columns' amax and scales in group g.

    The three results are for the gradients of gate and up, and for the activation. See `scales_of_gradients` in
    `fp8_common._reference.activations`.
    """
    width = N.to(tl.int64)
    if APART:
        base = (2 * M.to(tl.int64) + 31) // 32 * 32
        at = base + g * width + columns
        return at, at + COUNT * width, at + 2 * COUNT * width
    else:
        base = (M.to(tl.int64) + 31) // 32 * 32
        at = base + g * (2 * width) + columns
        return at, at + width, base + 2 * COUNT * width + g * width + columns


@triton.jit
def rows_of_gradients(r, c, M, N, APART: tl.constexpr):
    """Return the offsets of the codes of both gradients.

    They are the halves of one matrix [M, 2 N], or with `APART` two matrices [M, N], one after the other.
    """
    if APART:
        at = r.to(tl.int64) * N + c
        return at, at + M.to(tl.int64) * N
    else:
        at = r.to(tl.int64) * (2 * N) + c
        return at, at + N


@triton.jit
def folded_keys(of_gate, of_up, fold, up_fold):
    """Return the narrow keys of both gradients times their folds."""
    return narrow_key(of_gate.to(tl.float32) * fold), narrow_key(of_up.to(tl.float32) * up_fold)


@triton.jit
def raise_columns(amax_ptr, at, key, DTYPE: tl.constexpr, inside):
    """Raise the amax of columns to the keys of a tile."""
    tl.atomic_max(amax_ptr + at, widen_key(tl.max(key, axis=0), DTYPE), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["M", "N", "COUNT"])
def gated_back_amax_kernel(
    gate_ptr,
    up_ptr,
    grad_ptr,
    fold_ptr,
    up_fold_ptr,
    group_ptr,
    amax_ptr,
    M: tl.int32,
    N: tl.int32,
    COUNT: tl.int32,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Raise the amax keys of folded rows, and of columns by group.

    The keys are zero before the launch. `columns_of_group` gives the places of columns; rows precede them.
    """
    if ALIGNED:
        N = multiple_of_16(N)
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    APART: tl.constexpr = up_ptr is not None
    rows, columns = places_of_tile(N, BM, BN)
    group_of_row = tl.load(group_ptr + rows, mask=rows < M, other=COUNT)
    group, first, last = groups_of_rows(group_of_row, COUNT)
    c = columns[None, :]
    of_gate, of_up, hidden = gradients_of_tile(
        gate_ptr, up_ptr, grad_ptr, rows[:, None], c, N, (rows < M)[:, None] & (c < N)
    )
    for g in range(first, last + 1):
        inside = group == g
        key, up_key = folded_keys(of_gate, of_up, *folds_of_group(fold_ptr, up_fold_ptr, g, c, N))
        if APART:
            tl.atomic_max(amax_ptr + M + rows, tl.max(up_key, axis=1), mask=group_of_row == g, sem="relaxed")
        else:
            key = tl.maximum(key, up_key)
        tl.atomic_max(amax_ptr + rows, tl.max(key, axis=1), mask=group_of_row == g, sem="relaxed")
        at, up_at, hidden_at = columns_of_group(g, columns, M, N, COUNT, APART)
        raise_columns(amax_ptr, at, tl.where(inside, narrow_key(of_gate), 0), DTYPE, columns < N)
        raise_columns(amax_ptr, up_at, tl.where(inside, narrow_key(of_up), 0), DTYPE, columns < N)
        raise_columns(amax_ptr, hidden_at, tl.where(inside, narrow_key(hidden), 0), DTYPE, columns < N)


@triton.jit
def store_turned(t_ptr, at, x, scale_ptr, scale_at, inside, mask, c, N):
    """Cast a tile by columns and store it transposed.

    Places outside of `inside` become zeros.
    """
    scale = tl.load(scale_ptr + scale_at, mask=c < N, other=1.0)
    # zeros after the group for any scale, also NaN
    q = to_fp8(tl.where(inside, scaled(x, scale), 0.0), t_ptr.dtype.element_ty)
    tl.store(t_ptr + at, q, mask=mask)


@triton.jit(do_not_specialize=["M", "N", "P", "COUNT"])
def gated_back_cast_kernel(
    gate_ptr,
    up_ptr,
    grad_ptr,
    fold_ptr,
    up_fold_ptr,
    source_ptr,
    group_ptr,
    padded_end_ptr,
    scale_ptr,
    y_ptr,
    t_ptr,
    M: tl.int32,
    N: tl.int32,
    P: tl.int32,
    COUNT: tl.int32,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Cast both gradients by folded rows and by columns, and the activation.

    The activation is cast by columns only. Casts by columns are stored transposed. Place p of the padded groups holds
    row `source[p]`, or zeros if that is negative, and belongs to group `group[p]`, which ends before
    `padded_end[group]`.
    """
    P = multiple_of_16(P)
    if ALIGNED:
        N = multiple_of_16(N)
    APART: tl.constexpr = up_ptr is not None
    F8: tl.constexpr = y_ptr.dtype.element_ty
    places, columns = places_of_tile(N, BM, BN)
    _, first, last = groups_of_rows(tl.load(group_ptr + places, mask=places < P, other=COUNT), COUNT)
    source = tl.load(source_ptr + places, mask=places < P, other=-1)
    r, c = source[:, None], columns[None, :]
    filled = (r >= 0) & (c < N)
    of_gate, of_up, hidden = gradients_of_tile(gate_ptr, up_ptr, grad_ptr, r, c, N, filled)
    row_scale = tl.load(scale_ptr + source, mask=source >= 0, other=1.0)[:, None]
    up_row_scale = row_scale
    if APART:
        up_row_scale = tl.load(scale_ptr + M + source, mask=source >= 0, other=1.0)[:, None]
    at, up_at = rows_of_gradients(r, c, M, N, APART)
    to = c.to(tl.int64) * P + places[:, None]
    part = N.to(tl.int64) * P
    for g in range(first, last + 1):
        # A range instead of the group of each place: the compiler must know that 16 places can be stored together.
        begin = multiple_of_16(tl.load(padded_end_ptr + g - 1, mask=g > 0, other=0))
        end = multiple_of_16(tl.load(padded_end_ptr + g))
        stored = (places >= begin)[:, None] & (places < end)[:, None] & (c < N)
        here = stored & (r >= 0)
        fold, up_fold = folds_of_group(fold_ptr, up_fold_ptr, g, c, N)
        tl.store(y_ptr + at, to_fp8(scaled(of_gate.to(tl.float32) * fold, row_scale), F8), mask=here)
        tl.store(y_ptr + up_at, to_fp8(scaled(of_up.to(tl.float32) * up_fold, up_row_scale), F8), mask=here)
        scale_at, up_scale_at, hidden_scale_at = columns_of_group(g, c, M, N, COUNT, APART)
        store_turned(t_ptr, to, of_gate, scale_ptr, scale_at, here, stored, c, N)
        store_turned(t_ptr, to + part, of_up, scale_ptr, up_scale_at, here, stored, c, N)
        store_turned(t_ptr, to + 2 * part, hidden, scale_ptr, hidden_scale_at, here, stored, c, N)


@plan
def gated_rows(
    m: int, n: int, dtype: str, fmt: str | Format, policy: ScalePolicy = CANONICAL, *, apart: bool = False
) -> Launch:
    """Plan codes [m, n] and scales back [m] of silu(gate) * up.

    `gate_ptr` is [m, 2 n] and holds gate and up. If `apart`, `gate_ptr` and `up_ptr` are [m, n] each.

    Raises:
        Fp8Error: If rows are longer than `LONGEST_ROW`.
    """
    if n > LONGEST_ROW:
        raise Fp8Error(f"The kernel supports activations of up to {LONGEST_ROW} columns, got {n}. Use the reference.")
    bn = max(16, next_power_of_2(n))
    tile = {"BM": max(1, 4096 // bn), "BN": bn}
    return Launch(
        kernel=gated_rows_kernel,
        grid=tile_count(m, tile["BM"]) if n else 0,
        inputs={"gate_ptr": input_dtype(dtype), "up_ptr": dtype if apart else None},
        outputs={"y_ptr": codes((m, n), fmt), "scale_inv_ptr": Out((m,), "float32")},
        scalars=matrix_sizes(m, n),
        constants=scale_constants(fmt, policy) | {"ALIGNED": n % 16 == 0} | tile,
        num_warps=max(4, tile["BM"] * tile["BN"] // 1024),
    )


def _gradients(m: int, n: int, groups: int, dtype: str, *, apart: bool) -> tuple[dict[str, str | None], dict[str, int]]:
    """Return the common inputs and the sizes of the gradients' kernels."""
    inputs = {"gate_ptr": input_dtype(dtype), "up_ptr": dtype if apart else None, "grad_ptr": dtype}
    inputs |= {"fold_ptr": "float32", "up_fold_ptr": "float32" if apart else None, "group_ptr": "int32"}
    return inputs, matrix_sizes(2 * m, 2 * n) | {"M": m, "N": n, "COUNT": groups}


@plan
def gated_back_amax(m: int, n: int, groups: int, dtype: str, *, apart: bool = False) -> Launch:
    """Plan the int32 amax keys of both gradients and the activation.

    `scales_of_gradients` gives the place of each key. The inputs are `grad_ptr` [m, n], gate and up as in `gated_rows`,
    the group of each row, int32 `group_ptr` [m], and the folds of the gradients, float32 `fold_ptr` [groups, 2 n], or
    if `apart` `fold_ptr` and `up_fold_ptr` of [groups, n] each. Rows are folded before their amax, columns are not.
    """
    inputs, sizes = _gradients(m, n, groups, dtype, apart=apart)
    start, count = activations.scales_of_gradients(m, n, groups, apart=apart)["hidden"]
    return Launch(
        kernel=gated_back_amax_kernel,
        grid=tile_count(m, 64) * tile_count(n, 32),
        inputs=inputs,
        outputs={"amax_ptr": Out((start + count,), "int32", zeroed=True)},
        scalars=sizes,
        # larger tiles need so many registers that a processor runs too few programs
        constants={"ALIGNED": n % 16 == 0, "BM": 64, "BN": 32},
        num_warps=4,
    )


@plan
def gated_back_cast(
    m: int, n: int, p: int, groups: int, dtype: str, fmt: str | Format, *, apart: bool = False
) -> Launch:
    """Plan the codes of both gradients and of the activation.

    Gradients are cast by folded rows and by columns, silu(gate) * up by columns. The inputs are as in
    `gated_back_amax`, with three changes:

    - float32 `scale_ptr` has the scales at the places of `scales_of_gradients`.
    - int32 `source_ptr` [p] has the row at each place of the padded groups, or -1; `group_ptr` [p] has its group.
    - int32 `padded_end_ptr` [groups] has the ends of the padded groups.

    The outputs are codes [m, 2 n], or if `apart` [2, m, n], and column codes [3 n, p] of gate, up and the activation.

    Raises:
        Fp8Error: If 16 does not divide p.
    """
    if p % ALIGNMENT:
        raise Fp8Error(f"Rows are transposed in multiples of {ALIGNMENT}, got {p}. Use the reference.")
    inputs, sizes = _gradients(m, n, groups, dtype, apart=apart)
    return Launch(
        kernel=gated_back_cast_kernel,
        grid=tile_count(p, 64) * tile_count(n, 32) if m else 0,
        inputs=inputs | {"source_ptr": "int32", "padded_end_ptr": "int32", "scale_ptr": "float32"},
        outputs={"y_ptr": codes((2, m, n) if apart else (m, 2 * n), fmt), "t_ptr": codes((3 * n, p), fmt)},
        scalars=sizes | {"P": matrix_sizes(p, n)["M"]},
        constants={"ALIGNED": n % 16 == 0, "BM": 64, "BN": 32},
        num_warps=4,
    )

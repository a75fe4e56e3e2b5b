"""Tensorwise kernels: amax, cast, and cast with transpose.

Hopper multiplies FP8 matrices in one layout only (both operands contiguous along the contracted dimension), so weights
and gradients are needed in both layouts. Four adjacent rows are converted together and packed into words along the
columns, so that the transpose moves words instead of bytes through shared memory. Dims: x_MN is [M, N]; yt_NM is
[N, M].

With ROUNDED, x is float32 and is rounded to bfloat16 when it is read. Master weights are then cast as their bfloat16
values, without writing these to memory.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fp8_common._kernels.device import (
    INF_KEY,
    NAN_BITS,
    as_bits,
    as_float,
    multiple_of_16,
    narrow_key,
    scale_of_key,
    scaled,
    store_reciprocal,
    to_fp8,
    to_fp8_rows,
    widen_key,
)
from fp8_common._kernels.launch import (
    Launch,
    Out,
    codes,
    input_dtype,
    kernel_format,
    matrix_sizes,
    plan,
    scale_constants,
    tile_count,
)
from fp8_common.formats import Format
from fp8_common.policy import ScalePolicy


@triton.jit
def chunk_key(p, base, n, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ITERS: tl.constexpr):
    """Return the float32 key of max |p[i]| over a chunk.

    The chunk is [base, base + BLOCK * ITERS), cut off at n. Complete chunks are loaded without masks.
    """
    o = tl.arange(0, BLOCK)
    # One key per position of a block, in the width of the input; reduced and widened once, at the end.
    key = narrow_key(tl.zeros((BLOCK,), DTYPE))
    if base + BLOCK * ITERS <= n:
        # Unrolled, so that the loads of all iterations are in flight together.
        for i in tl.static_range(ITERS):
            key = tl.maximum(key, narrow_key(tl.load(p + base + i * BLOCK + o).to(DTYPE)))
    else:
        for i in range(ITERS):
            at = base + i * BLOCK + o
            key = tl.maximum(key, narrow_key(tl.load(p + at, mask=at < n, other=0.0).to(DTYPE)))
    return widen_key(tl.max(key, axis=0), DTYPE)


@triton.jit(do_not_specialize=["n"])
def amax_kernel(x_ptr, amax_ptr, n: tl.int64, ROUNDED: tl.constexpr, BLOCK: tl.constexpr, ITERS: tl.constexpr):
    """Raise amax[0] to the key of max |x|.

    `amax` is int32 [1] and is zero before the launch.
    """
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED else x_ptr.dtype.element_ty
    base = tl.program_id(0).to(tl.int64) * (BLOCK * ITERS)
    key = chunk_key(x_ptr, base, n, DTYPE, BLOCK, ITERS)
    # An integer maximum does not depend on the order of programs, so the result is deterministic. "relaxed" suffices,
    # because no other data are published through this address; the next launch sees the result.
    tl.atomic_max(amax_ptr, key, sem="relaxed")


@triton.jit
def observe(observed_ptr, key):
    """Raise the int32 key `observed` to `key`, unless that is not finite."""
    known = tl.load(observed_ptr)
    tl.store(observed_ptr, tl.where(key >= INF_KEY, known, tl.maximum(known, key)))


@triton.jit
def tensor_scale(
    scale_ptr,
    scale_out_ptr,
    scale_inv_ptr,
    delayed_ptr,
    ready_ptr,
    late_ptr,
    observed_ptr,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Return the scale of x, and store it with its reciprocal.

    Only the first program stores. Without a RULE, `scale_ptr` holds the scale. With a RULE, it holds the int32 key of
    the amax of x, from which the scale is computed. `delayed`, a scale of earlier steps, then replaces it if `ready` is
    set and, with a BOUND, if `delayed` is at most BOUND times and at least half the computed scale. If `late` is set,
    the scale of earlier steps is NaN; without a RULE only the stored one. With a RULE, the key is also recorded in
    `observed`.
    """
    if RULE is None:
        scale = tl.load(scale_ptr)
        stored = scale
        if late_ptr is not None:
            stored = as_float(tl.where(tl.load(late_ptr) != 0, NAN_BITS, as_bits(scale)))
    else:
        # Every program computes the scale: this takes a few instructions, and a separate kernel another launch.
        key = tl.load(scale_ptr)
        scale = scale_of_key(key, 1.0, FMAX, RULE)
        if delayed_ptr is not None:
            earlier, usable = tl.load(delayed_ptr), tl.load(ready_ptr) != 0
            if BOUND is not None:
                usable = usable & (earlier <= BOUND * scale) & (2 * earlier >= scale)
            if late_ptr is not None:
                earlier = as_float(tl.where(tl.load(late_ptr) != 0, NAN_BITS, as_bits(earlier)))
            scale = tl.where(usable, earlier, scale)
        stored = scale
    if tl.program_id(0) == 0:
        if scale_out_ptr is not None:
            tl.store(scale_out_ptr, stored)
        store_reciprocal(scale_inv_ptr, 0, stored, None)
        if RULE is not None and observed_ptr is not None:
            observe(observed_ptr, tl.load(scale_ptr))
    return scale


@triton.jit
def store_key(amax_ptr, observed_ptr, key):
    """Raise `amax` to the key of this program.

    With `observed`, `amax` is [2] and its second element counts finished programs; the last one records the maximum.
    """
    tl.atomic_max(amax_ptr, key, sem="relaxed")
    if observed_ptr is not None:  # noqa: SIM102 (known when it is compiled; the other is not)
        # "acq_rel" makes the maxima of all counted programs visible to the last one.
        if tl.atomic_add(amax_ptr + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            observe(observed_ptr, tl.atomic_max(amax_ptr, 0, sem="relaxed"))


@triton.jit(do_not_specialize=["n"])
def cast_kernel(
    x_ptr,
    scale_ptr,
    y_ptr,
    amax_ptr,
    scale_out_ptr,
    scale_inv_ptr,
    delayed_ptr,
    ready_ptr,
    late_ptr,
    observed_ptr,
    n: tl.int64,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    BOUND: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute y = fp8(x * scale), and optionally the amax.

    `tensor_scale` gives the scale. Unless `amax` is None, it is raised to the key of max |x|; `store_key` explains its
    second element. With a RULE, tiles are processed in reverse order.
    """
    scale = tensor_scale(
        scale_ptr,
        scale_out_ptr,
        scale_inv_ptr,
        delayed_ptr,
        ready_ptr,
        late_ptr,
        observed_ptr,
        FMAX,
        RULE,
        BOUND,
    )
    # With a RULE, the amax kernel has just read x, and the L2 cache still holds the end of x: begin there.
    tile = tl.program_id(0) if RULE is None else tl.num_programs(0) - 1 - tl.program_id(0)
    base = tile.to(tl.int64) * BLOCK
    at = base + tl.arange(0, BLOCK)
    F8: tl.constexpr = y_ptr.dtype.element_ty
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED else x_ptr.dtype.element_ty
    if base + BLOCK <= n:
        x = tl.load(x_ptr + at).to(DTYPE)
        tl.store(y_ptr + at, to_fp8(scaled(x, scale), F8))
    else:
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(DTYPE)
        tl.store(y_ptr + at, to_fp8(scaled(x, scale), F8), mask=at < n)
    if amax_ptr is not None:
        store_key(amax_ptr, observed_ptr, widen_key(tl.max(narrow_key(x), axis=0), DTYPE))


@triton.jit
def max_narrow_key(x):
    """Return the narrow key of max |x| over a 2-D tile."""
    # tl.max promotes int16 to int32. Converting back in between makes the second reduction 16 bits wide, too.
    return tl.max(tl.max(narrow_key(x), axis=1).to(narrow_key(x).dtype), axis=0)


# This function has no pointer arguments: torch assumes that a pointer passed to a function that returns offsets for
# stores is written to.
@triton.jit
def rows_of_four(m0, n0, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Return offsets and mask of every fourth row of a tile.

    Both are [BM / 4, BN]. The tile [BM, BN] begins at (m0, n0) of a matrix [M, N].
    """
    r = m0 + 4 * tl.arange(0, BM // 4)[:, None]
    c = n0 + tl.arange(0, BN)[None, :]
    return r.to(tl.int64) * N + c, (r < M) & (c < N)


@triton.jit
def store_columns(yt_ptr, column, m0, n0, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Store words of four vertical neighbors to the transpose.

    `column` is int32 [BM / 4, BN]; M % 4 == 0.
    """
    # Four vertical neighbors are horizontal ones in the transpose: one int32 store, at a multiple of 4 because M is.
    words = yt_ptr.to(tl.pointer_type(tl.int32))
    c = n0 + tl.arange(0, BN)[:, None]
    r = m0 // 4 + tl.arange(0, BM // 4)[None, :]
    tl.store(words + c.to(tl.int64) * (M // 4) + r, tl.trans(column), mask=(c < N) & (r < M // 4))


@triton.jit
def store_with_transpose(
    y_ptr, yt_ptr, x0, x1, x2, x3, at, mask, scale, m0, n0, M, N, BM: tl.constexpr, BN: tl.constexpr
):
    """Cast four tiles of interleaved rows, and store both layouts.

    x0 to x3 are at `at` and the three rows after it, see `rows_of_four`; M % 4 == 0.
    """
    F8: tl.constexpr = y_ptr.dtype.element_ty
    q0, q1, q2, q3, column = to_fp8_rows(scaled(x0, scale), scaled(x1, scale), scaled(x2, scale), scaled(x3, scale), F8)
    tl.store(y_ptr + at, q0, mask=mask)
    tl.store(y_ptr + at + N, q1, mask=mask)
    tl.store(y_ptr + at + 2 * N, q2, mask=mask)
    tl.store(y_ptr + at + 3 * N, q3, mask=mask)
    store_columns(yt_ptr, column, m0, n0, M, N, BM, BN)


@triton.jit(do_not_specialize=["M", "N"])
def cast_transpose_kernel(
    x_ptr,
    scale_ptr,
    y_ptr,
    yt_ptr,
    amax_ptr,
    scale_out_ptr,
    scale_inv_ptr,
    delayed_ptr,
    ready_ptr,
    late_ptr,
    observed_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    BOUND: tl.constexpr,
    ROUNDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    PACKED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute y = fp8(x * scale) and its transpose yt.

    Scales and amax are as in `cast_kernel`. PACKED requires M % 4 == 0.
    """
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED else x_ptr.dtype.element_ty
    scale = tensor_scale(
        scale_ptr,
        scale_out_ptr,
        scale_inv_ptr,
        delayed_ptr,
        ready_ptr,
        late_ptr,
        observed_ptr,
        FMAX,
        RULE,
        BOUND,
    )
    # In reverse order after a pass for the amax, as in `cast_kernel`.
    tile = tl.program_id(0) if RULE is None else tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    m0, n0 = (tile // tiles_n) * BM, (tile % tiles_n) * BN
    if PACKED:
        at, mask = rows_of_four(m0, n0, M, N, BM, BN)
        x0 = tl.load(x_ptr + at, mask=mask, other=0.0).to(DTYPE)
        x1 = tl.load(x_ptr + at + N, mask=mask, other=0.0).to(DTYPE)
        x2 = tl.load(x_ptr + at + 2 * N, mask=mask, other=0.0).to(DTYPE)
        x3 = tl.load(x_ptr + at + 3 * N, mask=mask, other=0.0).to(DTYPE)
        store_with_transpose(y_ptr, yt_ptr, x0, x1, x2, x3, at, mask, scale, m0, n0, M, N, BM, BN)
        if amax_ptr is not None:
            key = tl.maximum(tl.maximum(narrow_key(x0), narrow_key(x1)), tl.maximum(narrow_key(x2), narrow_key(x3)))
            top = tl.max(tl.max(key, axis=1).to(key.dtype), axis=0)
            store_key(amax_ptr, observed_ptr, widen_key(top, DTYPE))
    else:
        r, c = m0 + tl.arange(0, BM)[:, None], n0 + tl.arange(0, BN)[None, :]
        at, mask = r.to(tl.int64) * N + c, (r < M) & (c < N)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(DTYPE)
        q = to_fp8(scaled(x, scale), y_ptr.dtype.element_ty)
        tl.store(y_ptr + at, q, mask=mask)
        # Stored byte by byte: if 4 does not divide M, rows of the transpose do not start at words.
        tl.store(yt_ptr + c.to(tl.int64) * M + r, q, mask=mask)
        if amax_ptr is not None:
            store_key(amax_ptr, observed_ptr, widen_key(max_narrow_key(x), DTYPE))


@plan
def amax(n: int, dtype: str, *, rounded: bool = False) -> Launch:
    """Plan the int32 key [1] of max |x| over `n` elements.

    With `rounded`, float32 x is read as bfloat16, as in `cast`.
    """
    # Several tiles per program reduce the atomics on the single key, but a small tensor needs more programs.
    block, iters = 4096, 4 if n >= 1 << 22 else 1
    return Launch(
        kernel=amax_kernel,
        grid=tile_count(n, block * iters),
        inputs={"x_ptr": input_dtype(dtype)},
        outputs={"amax_ptr": Out((1,), "int32", zeroed=True)},
        scalars={"n": n},
        constants={"ROUNDED": rounded, "BLOCK": block, "ITERS": iters},
        num_warps=8,
    )


class Delayed(NamedTuple):
    """Delayed-scaling options of a cast.

    Without a policy, `scale_ptr` is the delayed scale. With a policy, the delayed scale is `delayed_ptr`; it replaces
    the policy's scale of the amax if the bool scalar `ready_ptr` is set.

    Attributes:
        fits: Whether the delayed scale must also fit the amax: clip no more than the format rounds, and use at least
            half of the range.
        record: Whether to raise `observed_ptr`, an int32 scalar, to the amax key of x if that is finite.
        check: Whether the delayed scale is NaN if the bool scalar `late_ptr` is set; without a policy, only the stored
            scales are.
    """

    fits: bool
    record: bool
    check: bool


@plan
def cast(
    n: int,
    dtype: str,
    fmt: str | Format,
    *,
    policy: ScalePolicy | None = None,
    with_amax: bool = False,
    delayed: Delayed | None = None,
    rounded: bool = False,
) -> Launch:
    """Plan y = fp8(x * scale) for `n` elements.

    Args:
        n: Number of elements.
        dtype: dtype of x.
        fmt: FP8 format.
        policy: Policy of dynamic scaling, for which `scale_ptr` is the int32 key from `amax` and the scale an output.
            Without a policy, `scale_ptr` is the float32 scale.
        with_amax: Whether the key of max |x| is an output.
        delayed: Options of delayed scaling. The scales into and back from FP8 are then outputs.
        rounded: Whether x is float32 and is rounded to bfloat16 when it is read.
    """
    # 4096 elements in 8 warps are 16 per thread: in bfloat16 two loads of 16 bytes, and one such store.
    return Launch(
        kernel=cast_kernel,
        grid=tile_count(n, 4096),
        # This kernel does the least work per byte: another division, for the scale back, would make it bound by
        # arithmetic.
        **_pointers(dtype, policy, {"y_ptr": codes((n,), fmt)}, with_amax, delayed, inverse=delayed is not None),
        scalars={"n": n},
        constants=_scaling(fmt, policy, delayed) | {"ROUNDED": rounded, "BLOCK": 4096},
        num_warps=8,
    )


@plan
def cast_transpose(
    m: int,
    n: int,
    dtype: str,
    fmt: str | Format,
    *,
    policy: ScalePolicy | None = None,
    with_amax: bool = False,
    with_scale: bool = True,
    delayed: Delayed | None = None,
    rounded: bool = False,
) -> Launch:
    """Plan y = fp8(x * scale) [m, n] and its transpose.

    The transpose is [n, m]. Arguments are as in `cast`. With a policy or `delayed`, the scale back from FP8 is an
    output, too; without `with_scale`, it is the only scale among the outputs.
    """
    packed = m % 4 == 0
    # Four adjacent rows are packed into words. 128 rows are 32 words, so the transpose is written in lines of 128
    # bytes. Without packing, a square tile treats both layouts equally.
    bm, bn = (128, 64) if packed else (64, 64)
    written = {"y_ptr": codes((m, n), fmt), "yt_ptr": codes((n, m), fmt)}
    return Launch(
        kernel=cast_transpose_kernel,
        grid=tile_count(m, bm) * tile_count(n, bn),
        **_pointers(dtype, policy, written, with_amax, delayed, inverse=True, scale=with_scale),
        scalars=matrix_sizes(m, n),
        constants=_scaling(fmt, policy, delayed)
        | {"ROUNDED": rounded, "ALIGNED": m % 16 == n % 16 == 0, "PACKED": packed, "BM": bm, "BN": bn},
        num_warps=4,
    )


def _pointers(
    dtype: str,
    policy: ScalePolicy | None,
    written: dict[str, Out],
    with_amax: bool,
    delayed: Delayed | None,
    *,
    inverse: bool,
    scale: bool = True,
) -> dict[str, Any]:
    """Return the inputs, outputs and updated outputs of a cast."""
    inputs = {"x_ptr": input_dtype(dtype), "scale_ptr": "int32" if policy else "float32"}
    outputs = written | ({"amax_ptr": Out((1,), "int32", zeroed=True)} if with_amax else {})
    if policy or delayed:
        outputs |= dict.fromkeys(("scale_out_ptr",) * scale + ("scale_inv_ptr",) * inverse, Out((1,), "float32"))
    if delayed:
        inputs |= {"delayed_ptr": "float32", "ready_ptr": "bool"} if policy else {}
        inputs |= {"late_ptr": "bool"} if delayed.check else {}
        outputs |= {"observed_ptr": Out((), "int32")} if delayed.record else {}
        if delayed.record and not policy:  # the second element counts finished programs
            outputs["amax_ptr"] = Out((2,), "int32", zeroed=True)
    return {"inputs": inputs, "outputs": outputs, "updated": tuple({"observed_ptr"} & outputs.keys())}


def _scaling(fmt: str | Format, policy: ScalePolicy | None, delayed: Delayed | None) -> dict[str, object]:
    """Return the constants FMAX, RULE and BOUND of a cast."""
    # half a unit in the last place
    bound = 1 + 2.0 ** -(kernel_format(fmt).mantissa_bits + 1) if delayed and delayed.fits else None
    return scale_constants(fmt, policy) | {"BOUND": bound}

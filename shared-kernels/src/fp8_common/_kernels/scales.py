"""Kernels that compute scales from amax or delayed-scaling histories.

They equal `fp8_common.amax_to_scale`, after `fp8_common.numerics.update_history` for histories. Dims: history_LT is
[L, T], all others are [T].
"""

import triton
import triton.language as tl

from fp8_common._kernels.device import INF_KEY, KEY_MASK, as_bits, as_float, reciprocal, scale_of_key
from fp8_common._kernels.launch import Launch, Out, next_power_of_2, plan, scale_constants, scale_rule, tile_count
from fp8_common.formats import E4M3, Format
from fp8_common.policy import ScalePolicy


@triton.jit(do_not_specialize=["n"])
def scales_kernel(
    amax_ptr, scale_ptr, scale_inv_ptr, n: tl.int64, FMAX: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute float32 scales and their reciprocals from amax [n]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = as_bits(tl.load(amax_ptr + at, mask=at < n, other=0.0)) & KEY_MASK
    scale = scale_of_key(key, 1.0, FMAX, RULE)
    tl.store(scale_ptr + at, scale, mask=at < n)
    tl.store(scale_inv_ptr + at, reciprocal(scale), mask=at < n)


@triton.jit(do_not_specialize=["T", "L"])
def delayed_update_kernel(
    history_ptr,
    amax_ptr,
    scale_ptr,
    fmax_ptr,
    new_history_ptr,
    new_scale_ptr,
    scale_inv_ptr,
    T: tl.int32,
    L: tl.int32,
    ALGO: tl.constexpr,
    RULE: tl.constexpr,
    BL: tl.constexpr,
    BT: tl.constexpr,
):
    """Roll histories, record amax, and compute the next scales.

    A history is rolled by -1, and slot 0 is set to the amax; a history whose amax is not finite does not change. `fmax`
    [T] is the largest value of each tensor's format, margin included. Outputs may be the memory of the inputs.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    slot = tl.arange(0, BL)[:, None]
    inside = (slot < L) & (t < T)[None, :]
    # Roll by -1 over L of the BL slots: the last slot gets slot 0. The old and the rolled history are both loaded,
    # because Triton cannot shift a tile in registers; the second read is served by the cache.
    source = tl.where(slot == L - 1, 0, slot + 1)
    old = tl.load(history_ptr + slot.to(tl.int64) * T + t[None, :], mask=inside, other=0.0)
    rolled = tl.load(history_ptr + source.to(tl.int64) * T + t[None, :], mask=inside, other=0.0)
    observed = as_bits(tl.load(amax_ptr + t, mask=t < T, other=0.0)) & KEY_MASK
    prev = tl.load(scale_ptr + t, mask=t < T, other=1.0)
    fmax = tl.load(fmax_ptr + t, mask=t < T, other=1.0)
    new = tl.where(slot == 0, as_float(observed)[None, :], rolled)
    new = tl.where((observed >= INF_KEY)[None, :], old, new)
    counted = (slot < L) if ALGO == "max" else (slot == 0)
    key = tl.max(tl.where(counted, as_bits(new) & KEY_MASK, 0), axis=0)
    scale = scale_of_key(key, prev, fmax, RULE)
    # In place, a slot may be written only after all threads have read it; `debug_barrier` is __syncthreads.
    tl.debug_barrier()
    tl.store(new_history_ptr + slot.to(tl.int64) * T + t[None, :], new, mask=inside)
    tl.store(new_scale_ptr + t, scale, mask=t < T)
    tl.store(scale_inv_ptr + t, reciprocal(scale), mask=t < T)


@plan
def scales_of_amax(n: int, fmt: str | Format, policy: ScalePolicy) -> Launch:
    """Plan float32 scales [n] into and back from FP8, from amax.

    `amax_ptr` is float32 [n].
    """
    return Launch(
        kernel=scales_kernel,
        grid=tile_count(n, 256),
        inputs={"amax_ptr": "float32"},
        outputs=dict.fromkeys(("scale_ptr", "scale_inv_ptr"), Out((n,), "float32")),
        scalars={"n": n},
        constants=scale_constants(fmt, policy) | {"BLOCK": 256},
        num_warps=4,
    )


@plan
def delayed_update(tensors: int, length: int, policy: ScalePolicy) -> Launch:
    """Plan one delayed-scaling step of all tensors.

    Histories are float32 [length, tensors]. `fmax_ptr` [tensors] has the numerator of each tensor's format, from
    `scale_rule`. The policy must not be stable.
    """
    # A program holds the whole history of its tensors, padded to a power of two, in at most 4096 elements.
    rows = next_power_of_2(length)
    columns = max(1, min(32, 4096 // rows))
    vector = Out((tensors,), "float32")
    return Launch(
        kernel=delayed_update_kernel,
        grid=tile_count(tensors, columns),
        inputs=dict.fromkeys(("history_ptr", "amax_ptr", "scale_ptr", "fmax_ptr"), "float32"),
        outputs={
            "new_history_ptr": Out((length, tensors), "float32"),
            "new_scale_ptr": vector,
            "scale_inv_ptr": vector,
        },
        scalars={"T": tensors, "L": length},
        # The rule does not depend on the format, because delayed scaling has no stable policies.
        constants={"ALGO": policy.algo, "RULE": scale_rule(E4M3, policy)[1], "BL": rows, "BT": columns},
        num_warps=4,
    )

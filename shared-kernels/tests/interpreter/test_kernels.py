"""Every kernel equals the NumPy definition bit for bit: input dtypes, formats, shapes, planted special values."""

import ml_dtypes
import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common import random_bits
from fp8_common._adamw import AdamWStep, adamw_step
from fp8_common._gradient_compression import MessageRows, round_gradients, sum_rounded
from fp8_common._remainder import join_lower_bytes, lower_bytes
from fp8_common.presets import deepgemm, flax, msamp, te_current, te_delayed, torchao
from fp8_common.testing import adversarial, adversarial_amax, all_bfloat16, all_float16, assert_same_bits
from fp8_common.testing.arrays import as_numpy
from fp8_common.torch import _foreach as foreach
from fp8_common.torch import _gradients as gradients
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch import _triton_groups as triton_groups
from fp8_common.torch import _triton_masters as triton_masters
from fp8_common.torch._quantize import Cast

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FORMATS = ["e4m3", "e5m2"]
SHAPES = [(1, 1), (1, 7), (300, 517), (6, 256), (128, 160), (0, 8), (8, 0)]
SEED = 4
DEVICE = "cpu"
"""Where the kernels run; the tests on a GPU replace it."""


def tensor(x):
    """Return a tensor with the bits of a NumPy array."""
    carrier = {1: np.uint8, 2: np.int16, 4: np.int32}[x.dtype.itemsize]
    bits = torch.from_numpy(np.ascontiguousarray(x).view(carrier).copy())
    return bits.view(getattr(torch, x.dtype.name)).to(DEVICE)


def number(value):
    """Return a float32 scalar tensor."""
    return torch.tensor(float(value), device=DEVICE)


def planted(shape, dtype, fmt):
    """Random values over many binades with NaN, infinity, -0, subnormals and rounding ties among them."""
    rng = np.random.default_rng(SEED)
    with np.errstate(all="ignore"):
        x = (rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, size=shape))).astype(DTYPES[dtype])
    special = adversarial(fmt, DTYPES[dtype])
    flat = x.reshape(-1)
    if flat.size >= 1000:
        rows = np.arange(min(special.size, flat.size // 40)) * 37
        flat[rows] = special[: rows.size]
        flat[-40:] = special[-40:]
    elif 1 < flat.size < 10:
        flat[:] = np.resize(
            [1.0625, np.nan, -np.inf, -0.0, ml_dtypes.finfo(x.dtype).smallest_subnormal, np.inf, -3e-3], flat.size
        )
    return flat.reshape(shape)


def calm(shape, dtype):
    """The same without infinity and NaN, so that amax gives a scale."""
    rng = np.random.default_rng(SEED)
    return (rng.normal(size=shape) * 3).astype(DTYPES[dtype])


every_input = pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=SHAPES)


@every_input
def test_amax(dtype, fmt, shape):
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        assert_same_bits(triton_backend.amax_all(tensor(x)), f8.amax(x), source=None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [0, 4095, 4096, 9999])
def test_amax_keeps_a_nan_wherever_it_is(dtype, where):
    x = np.ones(10000, DTYPES[dtype])
    x[5], x[where] = np.inf, np.nan
    assert np.isnan(triton_backend.amax_all(tensor(x)).item())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_on_either_of_two_ranks_reaches_the_common_amax(rank):
    shards = [np.ones(300, np.float32), np.full(300, 2, np.float32)]
    shards[rank][7] = np.nan
    keys = [triton_backend.amax_key(tensor(shard)) for shard in shards]
    assert torch.maximum(*keys).view(torch.float32).isnan().all()


@every_input
def test_cast(dtype, fmt, shape):
    x, scale = planted(shape, dtype, fmt), np.float32(11.3)
    got = triton_backend.quantize(tensor(x), number(scale), f8.get_format(fmt))
    assert_same_bits(got, f8.quantize(x, scale, fmt), fmt=fmt, source=x)


@every_input
def test_cast_with_amax(dtype, fmt, shape):
    x, scale = planted(shape, dtype, fmt), np.float32(0.37)
    got, amax = triton_backend.quantize_with_amax(tensor(x), number(scale), f8.get_format(fmt))
    assert_same_bits(got, f8.quantize(x, scale, fmt), fmt=fmt, source=x)
    assert_same_bits(amax, f8.amax(x))


@every_input
def test_dynamic_tensorwise_in_two_launches(dtype, fmt, shape):
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        got, scale = triton_backend.quantize_tensorwise(tensor(x), f8.get_format(fmt), f8.CANONICAL)
        want = f8.amax_to_scale(f8.amax(x), fmt) if x.size else np.float32(1)
        assert_same_bits(scale, want)
        assert_same_bits(got, f8.quantize(x, want, fmt), fmt=fmt, source=x)


@every_input
def test_dynamic_casts_that_write_both_ways_and_the_scale_back(dtype, fmt, shape):
    form = f8.get_format(fmt)
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        want = f8.amax_to_scale(f8.amax(x), fmt) if x.size else np.float32(1)
        codes = f8.quantize(x, want, fmt)
        for made in (
            triton_backend.cast_tensorwise(tensor(x), form, f8.CANONICAL, both=True),
            Cast(
                *(
                    triton_backend.cast_by_amax(tensor(x), number(f8.amax(x)), form, f8.CANONICAL)[i]
                    for i in (0, 2, 3, 1)
                )
            ),
        ):
            assert_same_bits(made.scale, want)
            assert_same_bits(made.scale_inv, f8.reciprocal(want))
            assert_same_bits(made.codes, codes, fmt=fmt, source=x)
            assert_same_bits(made.turned, codes.T, fmt=fmt, source=x.T)


@every_input
def test_a_given_scale_both_ways_and_the_amax(dtype, fmt, shape):
    x, scale = planted(shape, dtype, fmt), np.float32(0.37)
    got, amax, turned = triton_backend.cast_with_amax(tensor(x), number(scale), f8.get_format(fmt), both=True)
    want = f8.quantize(x, scale, fmt)
    assert_same_bits(amax, f8.amax(x))
    assert_same_bits(got, want, fmt=fmt, source=x)
    assert_same_bits(turned, want.T, fmt=fmt, source=x.T)


@pytest.mark.parametrize("block", [None, (1, 128), (128, 128)])
@pytest.mark.parametrize("columns", [517, 17000])
def test_scales_back_of_rows_and_blocks(block, columns):
    x = calm((130, columns) if block else (3, columns), "bfloat16")
    if block is None:
        made = triton_backend.cast_rowwise(tensor(x), None, f8.E4M3, f8.CANONICAL)
    else:
        made = triton_backend.cast_blockwise(tensor(x), f8.E4M3, block, f8.CANONICAL)
    assert_same_bits(made.scale_inv, f8.reciprocal(as_numpy(made.scale)))


@pytest.mark.parametrize("policy", [f8.CANONICAL, te_delayed(), te_current(), torchao(), flax(), msamp(), deepgemm()])
def test_scales_of_amax(policy):
    amax = adversarial_amax()
    scale, inverse = triton_backend.scales_of_amax(tensor(amax), f8.E4M3, policy)
    want = f8.amax_to_scale(amax, "e4m3", policy)
    assert_same_bits(scale, want, source=amax)
    assert_same_bits(inverse, f8.reciprocal(want), source=amax)


@every_input
def test_cast_and_transpose(dtype, fmt, shape):
    x, scale = planted(shape, dtype, fmt), np.float32(5.0)
    got, transposed = triton_backend.quantize_transposed(tensor(x), number(scale), f8.get_format(fmt))
    want = f8.quantize(x, scale, fmt)
    assert_same_bits(got, want, fmt=fmt, source=x)
    assert_same_bits(transposed, want.T, fmt=fmt, source=x.T)


@every_input
def test_rowwise(dtype, fmt, shape):
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        got = triton_backend.quantize_rowwise(tensor(x), f8.get_format(fmt), -1, f8.CANONICAL)
        want = f8.quantize_rowwise(x, fmt)
        assert_same_bits(got[1], want.scale)
        assert_same_bits(got[0], want.data, fmt=fmt, source=x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16384, 20001])
def test_long_rows(dtype, columns):
    x = planted((3, columns), dtype, "e4m3")
    x[1:] = calm((2, columns), dtype)
    got = triton_backend.quantize_rowwise(tensor(x), f8.E4M3, -1, f8.CANONICAL)
    want = f8.quantize_rowwise(x, "e4m3")
    assert_same_bits(got[1], want.scale)
    assert_same_bits(got[0], want.data, fmt="e4m3", source=x)


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=[(5, 7), (300, 517), (3, 17000)])
def test_rows_folded_into_the_gradient(dtype, fmt, shape):
    x, fold = calm(shape, dtype), np.exp2(np.random.default_rng(1).uniform(-9, 9, shape[1])).astype(np.float32)
    got = triton_backend.quantize_folded(tensor(x), tensor(fold), f8.get_format(fmt), f8.CANONICAL)
    want = f8.quantize_rowwise(x.astype(np.float32) * fold, fmt)
    assert_same_bits(got[1], want.scale)
    assert_same_bits(got[0], want.data, fmt=fmt, source=x)


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=[(4, 7), (300, 517), (128, 160)], folded=[False, True])
def test_rows_and_columns_from_two_reads(dtype, fmt, shape, folded):
    fold = np.exp2(np.random.default_rng(1).uniform(-9, 9, shape[1])).astype(np.float32) if folded else None
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        made = triton_backend.cast_both(
            tensor(x), None if fold is None else tensor(fold), f8.get_format(fmt), f8.CANONICAL
        )
        rows = x if fold is None else x.astype(np.float32) * fold
        for got, source in zip(made, (rows, np.ascontiguousarray(x.T)), strict=True):
            want = f8.quantize_rowwise(source, fmt)
            assert_same_bits(got.scale, want.scale)
            assert_same_bits(got.scale_inv, f8.reciprocal(want.scale))
            assert_same_bits(got.codes, want.data, fmt=fmt, source=source)


@pytest.mark.parametrize("amax", [0.0, 3.0, 7.0, np.inf, np.nan])
@pytest.mark.parametrize("late", [None, False, True])
@pytest.mark.parametrize("known", [None, -1, 5.0])
def test_a_delayed_scale_in_use(amax, late, known):
    own = None if known is None else tensor(np.int32(-1) if known == -1 else np.float32(known).view(np.int32))
    scale = number(11.3)
    flag = None if late is None else torch.tensor(late, device=DEVICE)
    current, inverse = triton_backend.delayed_current(scale, flag, own, number(amax))
    want = np.float32(np.nan if late else 11.3)
    assert_same_bits(current, want)
    assert_same_bits(inverse, f8.reciprocal(want))
    assert current.data_ptr() != scale.data_ptr(), "the scale changes with the next step"
    if own is not None:
        observed = [np.float32(x).view(np.int32) for x in (known, amax) if x >= 0 and np.isfinite(x)]
        assert own.item() == max([-1, *observed])


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=SHAPES, rows=[1, 128])
def test_blocks_and_the_way_back(dtype, fmt, shape, rows):
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        form, block = f8.get_format(fmt), (rows, 128)
        got = triton_backend.quantize_blockwise(tensor(x), form, block, f8.CANONICAL)
        want = f8.quantize_blockwise(x, fmt, block)
        assert_same_bits(got[1], want.scale)
        assert_same_bits(got[0], want.data, fmt=fmt, source=x)
        back = triton_backend.dequantize_blockwise(*got, form, block, getattr(torch, dtype))
        assert_same_bits(back, f8.dequantize_blockwise(*want, fmt, block, DTYPES[dtype]))


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=[(4, 7), (300, 517), (132, 160)])
def test_blocks_with_transpose(dtype, fmt, shape):
    x = calm(shape, dtype)
    data, transposed, scale = triton_backend.quantize_block_transposed(tensor(x), f8.get_format(fmt), f8.POWER_OF_2)
    want = f8.quantize_blockwise(x, fmt, (128, 128), f8.POWER_OF_2)
    assert_same_bits(scale, want.scale)
    assert_same_bits(data, want.data, fmt=fmt, source=x)
    assert_same_bits(transposed, want.data.T, fmt=fmt, source=x.T)


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=SHAPES, mode=["floor", "ceil", "even", "rceil"])
def test_mx_and_the_way_back(dtype, fmt, shape, mode):
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        data, codes = triton_backend.quantize_mx(tensor(x), f8.get_format(fmt), mode)
        want = f8.quantize_mx(x, fmt, mode)
        assert_same_bits(codes, want.scale, fmt="e8m0")
        assert_same_bits(data, want.data, fmt=fmt, source=x)
        back = triton_backend.dequantize_mx(data, codes, f8.get_format(fmt), getattr(torch, dtype))
        assert_same_bits(back, f8.dequantize_mx(*want, fmt, DTYPES[dtype]))


@pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_mx_codes_of_every_kind_of_amax(fmt, mode):
    x = np.repeat(adversarial_amax(), 32).reshape(-1, 32)
    data, codes = triton_backend.quantize_mx(tensor(x), f8.get_format(fmt), mode)
    want = f8.quantize_mx(x, fmt, mode)
    assert_same_bits(codes, want.scale, fmt="e8m0")
    assert_same_bits(data, want.data, fmt=fmt, source=x)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("x", [all_bfloat16(), all_float16()], ids=["bfloat16", "float16"])
def test_every_16_bit_value_there_and_every_code_back(fmt, x):
    got = triton_backend.quantize(tensor(x), number(1.0), f8.get_format(fmt))
    assert_same_bits(got, f8.quantize(x, np.float32(1), fmt), fmt=fmt, source=x)
    codes = np.arange(256, dtype=np.uint8)
    back = triton_backend.dequantize(tensor(codes), number(3.0), f8.get_format(fmt), torch.float32)
    assert_same_bits(back, f8.dequantize(codes, np.float32(3), fmt))


@pytest.mark.parametrize("policy", [
    f8.CANONICAL, f8.POWER_OF_2, te_delayed(), te_delayed(margin=2), te_current(), te_current(True, 1e-6),
    torchao(), torchao(True), flax(), flax(margin=3), msamp(), msamp(margin=1), deepgemm(), deepgemm(True),
], ids=lambda policy: f"{policy.name}-{policy.margin}-{policy.power_of_2}")  # fmt: skip
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_policy_on_every_kind_of_amax(fmt, policy):
    x = adversarial_amax()[:, None]
    got = triton_backend.quantize_rowwise(tensor(x), f8.get_format(fmt), -1, policy)
    want = f8.quantize_rowwise(x, fmt, policy=policy)
    assert_same_bits(got[1], want.scale, source=x)
    assert_same_bits(got[0], want.data, fmt=fmt, source=x)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3, 16])
def test_delayed_update_of_all_tensors_at_once(algo, length):
    rng = np.random.default_rng(SEED)
    policy, kinds = te_delayed(algo=algo), [f8.E4M3, f8.E5M2]
    history = (rng.random((length, 37)) * 10).astype(np.float32)
    observed = (rng.random(37) * 10).astype(np.float32)
    history[:, 3], observed[3:8] = 0, [0, np.inf, np.nan, 1e-40, 1e30]
    scale = (rng.random(37) + 0.5).astype(np.float32)
    fmax = np.array([kinds[i % 2].max for i in range(37)], np.float32)
    new_history, new_scale, inverse = triton_backend.delayed_update(
        tensor(history), tensor(observed), tensor(scale), tensor(fmax), policy
    )
    want_history, amax = f8.update_history(history, observed, algo)
    want = np.array([f8.amax_to_scale(a, kinds[i % 2], policy, scale[i]) for i, a in enumerate(amax)])
    assert_same_bits(new_history, want_history)
    assert_same_bits(new_scale, want)
    assert_same_bits(inverse, f8.reciprocal(want))


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=SHAPES, seed=[0, 0x123456789ABCDEF])
def test_stochastic_rounding_draws_the_documented_bits(dtype, fmt, shape, seed):
    x, scale = planted(shape, dtype, fmt), np.float32(7.0)
    got = triton_backend.quantize_stochastic(tensor(x), number(scale), f8.get_format(fmt), seed, 2**33)
    want = f8.quantize_stochastic(x, scale, fmt, random_bits(seed, shape, 2**33))
    assert_same_bits(got, want, fmt=fmt, source=x, seed=seed)


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS)
def test_foreach_takes_odd_and_empty_tensors(dtype, fmt):
    sizes = [0, 1, 7, 16384, 16385, 0, 300 * 517]
    shards = [planted((size,), dtype, fmt) for size in sizes]
    tensors = [tensor(x) for x in shards]
    keys = foreach.amax_keys(tensors)
    assert_same_bits(keys.view(torch.float32), np.array([f8.amax(x) for x in shards], np.float32))
    scales = np.linspace(0.5, 40, len(sizes)).astype(np.float32)
    for got, x, scale in zip(foreach.cast(tensors, tensor(scales), f8.get_format(fmt)), shards, scales, strict=True):
        assert_same_bits(got, f8.quantize(x, scale, fmt), fmt=fmt, source=x)


def test_foreach_takes_unaligned_tensors():
    whole = tensor(calm((5000,), "bfloat16"))
    parts = [whole[1:100], whole[100:4001], whole[4001:]]
    keys = foreach.amax_keys(parts)
    assert [key.view(torch.float32).item() for key in keys] == [part.abs().max().item() for part in parts]


def test_a_new_output_needs_no_new_table(monkeypatch):
    tensors = [tensor(calm((size,), dtype)) for size, dtype in ((33, "bfloat16"), (70, "float32"), (5, "bfloat16"))]
    scales, sent = tensor(np.array([1, 2, 4], np.float32)), []
    made = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: (sent.append(a), made(*a, **k))[1])
    outputs = [foreach.cast(tensors, scales, f8.E4M3) for _ in range(3)]
    assert len({parts[0].data_ptr() for parts in outputs}) == 3
    assert len(sent) == 4, "two transfers for each dtype, once"
    for i, x in enumerate(tensors):
        want = f8.quantize(x.float().cpu().numpy(), np.float32(2.0**i), "e4m3")
        for parts in outputs:
            assert_same_bits(parts[i], want, fmt="e4m3")


GRADIENT_ROWS = [(1, 1), (2, 7), (3, 128), (2, 8192), (3, 8192 + 517), (2, 2048 + 144)]
WAYS = {
    "nearest": (False, None),
    "feedback": (True, None),
    "stochastic": (False, (0x123456789ABCDEF, 2**33)),
    "stochastic, feedback": (True, (7, 0)),
}


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=GRADIENT_ROWS, way=WAYS)
def test_gradients_are_packed_as_defined(dtype, fmt, shape, way):
    config = f8.GradientCompression(format=fmt)
    feedback, random = WAYS[way]
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        kept = calm(shape, "bfloat16") if feedback else None
        wide = calm((shape[0], 3), dtype)
        residual = None if kept is None else tensor(kept)
        # rows that lie apart, as the parts of a larger buffer do
        apart = torch.cat([tensor(x), tensor(x)], dim=1)[:, : shape[1]]
        message = gradients.pack_gradients(apart, tensor(wide), f8.get_format(fmt), 128, residual, random)
        want = round_gradients(x, config, residual=kept, random=random)
        rows = MessageRows(compressed=shape[1], wide_bytes=3 * wide.itemsize, block=128)
        assert message.shape == (shape[0], rows.nbytes)
        assert_same_bits(message[:, : shape[1]].contiguous(), want.codes, fmt=fmt, source=x)
        scales = message[:, rows.scales_at :][:, : 4 * rows.scales].contiguous().view(torch.float32)
        assert_same_bits(scales, want.scales)
        sent = message[:, rows.wide_at :][:, : rows.wide_bytes].contiguous()
        assert torch.equal(sent, tensor(wide).view(torch.uint8))
        assert not any(message[:, a:b].any() for a, b in rows.gaps)
        if residual is not None:
            assert_same_bits(residual, want.lost.astype(ml_dtypes.bfloat16))


@pytest.mark.matrix(fmt=FORMATS, shape=GRADIENT_ROWS, divisor=[1, 3, 8], kind=["planted", "calm", "huge"])
def test_gradients_are_added_in_the_order_of_ranks(fmt, shape, divisor, kind):
    config = f8.GradientCompression(format=fmt)
    x = planted(shape, "float32", fmt) if kind == "planted" else calm(shape, "float32")
    if kind == "huge":
        # codes of the first rank stand for 2^128, which a product fused with the sum would not turn into infinity
        x[0], x[1:] = np.float32(3.4e38), np.float32(-1e38)
    want = round_gradients(x, config)
    message = gradients.pack_gradients(tensor(x), tensor(x[:, :2]), f8.get_format(fmt), 128)
    total, wide = gradients.sum_gradients(
        message, shape[1], min(2, shape[1]), torch.float32, f8.get_format(fmt), 128, divisor
    )
    assert_same_bits(total, sum_rounded(want.codes, want.scales, config, divisor))
    expected = x[0, :2].copy()
    with np.errstate(all="ignore"):
        for row in x[1:]:
            expected += row[:2]
        assert_same_bits(wide, expected / np.float32(divisor))


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, n=[16, 2048, 4096 + 48])
def test_masters_are_stepped_and_cast_in_their_bytes(dtype, fmt, n):
    x, form = calm(n, "float32"), f8.get_format(fmt)
    x[:4] = [0.0, -0.0, 1e-30, 3e38]
    scale, numbers = np.float32(form.max / 20), AdamWStep.of(3, lr=0.02, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    gradient, first = calm(n, dtype) * DTYPES[dtype](0.01), calm(n, "float32") * np.float32(0.01)
    gradient[5] = 0
    second = np.square(calm(n, "float32")) * np.float32(1e-4)
    second[5:7] = [0, 1e-40]
    codes, lower = f8.quantize(x, scale, fmt), lower_bytes(x)
    inverse, held = f8.reciprocal(scale), [tensor(a) for a in (codes.view(np.uint8), lower, first, second)]
    key = triton_masters.step_masters(
        held[0], number(inverse), held[1], tensor(gradient), tuple(held[2:]), tensor(np.float32(numbers)), form
    )
    # what three bytes cannot give back is stepped from what they do give
    given = join_lower_bytes(codes, scale, lower, fmt)
    after, *moments = adamw_step(given, gradient.astype(np.float32), first, second, numbers)
    assert_same_bits(held[1], lower_bytes(after))
    assert_same_bits(held[0], (after.view(np.uint32) >> 24).astype(np.uint8))
    for got, want in zip(held[2:], moments, strict=True):
        assert_same_bits(got, want)
    assert_same_bits(key.view(torch.float32), np.abs(after).max(keepdims=True))
    triton_masters.cast_masters(held[0], number(scale), held[1], form)
    assert_same_bits(held[0], f8.quantize(after, scale, fmt).view(np.uint8))


# rows of the groups: empty ones at the start, in the middle and at the end, several in a tile, and rows of no group
GROUPS = {"many": [0, 5, 5, 130, 131, 260, 290, 290], "one": [300], "none": [0, 0], "short": [7, 300]}


def group_of_rows(name, rows):
    """Return the ends of groups within so many rows, and the group of each row."""
    ends = np.minimum(GROUPS[name], rows)
    return ends, np.searchsorted(ends, np.arange(rows), side="right").astype(np.int32)


@pytest.mark.matrix(
    dtype=list(DTYPES),
    fmt=FORMATS,
    shape=[(300, 517), (128, 160), (300, 16)],
    name=list(GROUPS),
    columns=[False, True],
)
def test_groups_of_rows_are_cast_with_scales_of_their_own(dtype, fmt, shape, name, columns):
    x, (ends, group) = planted(shape, dtype, fmt), group_of_rows(name, shape[0])
    found = triton_groups.group_amax(tensor(x), tensor(group), len(ends), columns=columns)
    starts, axis = [0, *ends[:-1]], 0 if columns else None
    expected = np.stack([f8.amax(x[start:end], axis=axis) for start, end in zip(starts, ends, strict=True)])
    assert_same_bits(found, expected)
    scale, inside = f8.amax_to_scale(expected, fmt), x[: ends[-1]]  # other rows are not written
    codes = triton_groups.group_cast(tensor(x), tensor(group), tensor(scale), f8.get_format(fmt))
    of_rows = scale[group[: ends[-1]]]
    expected = f8.quantize(inside, of_rows if columns else of_rows[:, None], fmt)
    assert_same_bits(codes[: ends[-1]], expected, fmt=fmt, source=inside)


@pytest.mark.matrix(dtype=list(DTYPES), shape=[(300, 517), (128, 160), (9, 16384 + 8)], name=list(GROUPS))
def test_rows_are_cast_with_the_fold_of_their_group(dtype, shape, name):
    x, (ends, group) = planted(shape, dtype, "e4m3"), group_of_rows(name, shape[0])
    folds = np.abs(calm((len(ends) + 1, shape[1]), "float32")) + np.float32(0.1)
    made = triton_backend.cast_rowwise(tensor(x), tensor(folds), f8.E4M3, f8.CANONICAL, tensor(group))
    with np.errstate(all="ignore"):
        want = f8.quantize_rowwise(x.astype(np.float32) * folds[group], "e4m3")
    assert_same_bits(made.scale, want.scale)
    assert_same_bits(made.scale_inv, f8.reciprocal(want.scale))
    assert_same_bits(made.codes, want.data, fmt="e4m3", source=x)


@pytest.mark.matrix(shape=[(300, 517), (128, 160), (5, 16)], p=[16, 272])
def test_rows_are_turned_in_the_order_of_an_index(shape, p):
    rng = np.random.default_rng(SEED)
    q = rng.integers(0, 256, shape, dtype=np.uint8)
    source = rng.integers(-1, shape[0], p, dtype=np.int32)
    expected = np.where(source[:, None] >= 0, q[source], 0).T
    assert_same_bits(triton_groups.turn_rows(tensor(q), tensor(source)), np.ascontiguousarray(expected))


@pytest.mark.matrix(dtype=list(DTYPES), shape=[(300, 517), (7, 3, 5), (4, 1, 1024)])
def test_rows_that_are_not_kept_become_zero(dtype, shape):
    y, keep = planted(shape, dtype, "e4m3"), np.random.default_rng(SEED).random(shape[0]) < 0.5
    expected = y.copy()
    expected[~keep] = 0
    cleared = triton_groups.clear_rows(tensor(y), torch.from_numpy(keep).to(DEVICE))
    assert_same_bits(cleared, expected)

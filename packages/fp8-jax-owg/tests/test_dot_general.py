"""FP8 products: equal to the product of what the NumPy definition casts, forward and backward, in every dtype."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_common
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_jax_owg import CurrentScaling, DelayedScaling, assert_fp8_dots, fp8_dot_general, init_meta, next_state
from fp8_jax_owg.dots.dot import Contraction

SHAPES = {
    "mk,kn->mn": ((4, 8), (8, 5), (((1,), (0,)), ((), ()))),
    "km,nk->mn": ((8, 4), (5, 8), (((0,), (1,)), ((), ()))),
    "bmk,bkn->bmn": ((2, 4, 8), (2, 8, 5), (((2,), (1,)), ((0,), (0,)))),
    "mkbl,lnbk->bmn": ((4, 3, 2, 5), (5, 6, 2, 3), (((1, 3), (3, 0)), ((2,), (2,)))),
}
ULP = {"float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-7}
HISTORY = {"input": [3.0, 1.0, 0.0], "kernel": [0.5, 0.0, 2.0], "output_grad": [0.0, 0.0, 7.0]}
MATMUL = (((1,), (0,)), ((), ()))


def some(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def meta_of(scaling):
    meta = init_meta(scaling)
    return meta | {f"{name}_amax_history": jnp.float32(values) for name, values in HISTORY.items()}


def scale_of(tensor, scaling, fmt):
    _, amax = fp8_common.update_history(np.float32(HISTORY[tensor]), np.float32(np.inf), scaling.amax_compute_algo)
    return fp8_common.amax_to_scale(amax, fmt, scaling.policy)


def as_cast(x, scale, fmt):
    """What the definition makes of an array: float64, so that sums of a few are exact enough."""
    codes = fp8_common.quantize(np.asarray(x), scale, fmt)
    return fp8_common.decode(codes, fmt).astype(np.float64) * np.float64(fp8_common.reciprocal(scale))


@pytest.mark.matrix(
    "each",
    equation=list(SHAPES),
    dtype=list(ULP),
    jit=[True, False],
    scaling=[
        DelayedScaling(amax_history_length=3),
        DelayedScaling(amax_history_length=3, fp8_format="E4M3", margin=1),
        DelayedScaling(amax_history_length=3, amax_compute_algo="most_recent"),
    ],
)
def test_products_are_those_of_the_definition(equation, dtype, jit, scaling):
    shape_lhs, shape_rhs, dims = SHAPES[equation]
    lhs, rhs, meta = some(shape_lhs, dtype), some(shape_rhs, dtype, 1), meta_of(scaling)

    def run(lhs, rhs, meta, g):
        out, pull = jax.vjp(lambda *x: fp8_dot_general(*x[:2], dims, meta=x[2], scaling=scaling), lhs, rhs, meta)
        return out, *pull(g)

    g = some(jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, dims), lhs, rhs).shape, dtype, 2)
    out, d_lhs, d_rhs, next_meta = (jax.jit(run) if jit else run)(lhs, rhs, meta, g)

    backward = "e5m2" if scaling.fp8_format == "HYBRID" else "e4m3"
    a = as_cast(lhs, scale_of("input", scaling, "e4m3"), "e4m3")
    b = as_cast(rhs, scale_of("kernel", scaling, "e4m3"), "e4m3")
    c = as_cast(g, scale_of("output_grad", scaling, backward), backward)
    left, right, result = equation.replace("->", ",").split(",")
    for found, left_side, values in (
        (out, equation, (a, b)),
        (d_lhs, f"{result},{right}->{left}", (c, b)),
        (d_rhs, f"{left},{result}->{right}", (a, c)),
    ):
        expected = np.einsum(left_side, *values)
        scale = np.abs(expected).max()
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=ULP[dtype], atol=ULP[dtype] * scale)
    for name, x, fmt in (("input", lhs, "e4m3"), ("kernel", rhs, "e4m3"), ("output_grad", g, backward)):
        history = np.asarray(next_state(meta, next_meta)[f"{name}_amax_history"])
        expected, _ = fp8_common.update_history(
            np.float32(HISTORY[name]), fp8_common.amax(np.asarray(x)), scaling.amax_compute_algo
        )
        np.testing.assert_array_equal(history, expected)
        if scale_of(name, scaling, fmt) != 1:
            inverse = fp8_common.reciprocal(scale_of(name, scaling, fmt))
            assert next_meta[f"{name}_scale"] == inverse


def test_products_of_small_integers_are_exact():
    random = np.random.default_rng(3)
    x, w = (jnp.float32(random.integers(-4, 5, shape)) for shape in ((8, 16), (16, 8)))
    meta = init_meta(DelayedScaling(amax_history_length=1))
    np.testing.assert_array_equal(fp8_dot_general(x, w, MATMUL, meta=meta), x @ w)


@pytest.mark.parametrize("scaling", [CurrentScaling(), CurrentScaling(granularity="row")], ids=["tensor", "row"])
def test_current_scaling_keeps_small_rows_only_by_row(scaling):
    x = some((6, 64)) * jnp.float32([[1], [1e-7], [1e5], [1], [1], [1]])
    w = some((64, 16), seed=1)
    out, pull = jax.vjp(lambda x, w: fp8_dot_general(x, w, MATMUL, scaling=scaling), x, w)
    exact, exact_pull = jax.vjp(jnp.matmul, x, w)
    errors = np.linalg.norm(out - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert (errors[1] < 0.09) == (scaling.granularity == "row")
    assert errors[2] < 0.09
    for found, wanted in zip(pull(jnp.ones_like(out)), exact_pull(jnp.ones_like(out)), strict=True):
        assert np.linalg.norm(found - wanted) < 0.09 * np.linalg.norm(wanted)


@pytest.mark.parametrize("scaling", [DelayedScaling(), CurrentScaling(), CurrentScaling(granularity="row")])
def test_all_three_products_have_fp8_operands(scaling):
    meta = init_meta(scaling) if isinstance(scaling, DelayedScaling) else None

    def gradients(x, w):
        return jax.grad(lambda *a: fp8_dot_general(*a, MATMUL, meta=meta, scaling=scaling).sum(), (0, 1))(x, w)

    dots = assert_fp8_dots(gradients, some((4, 8)), some((8, 5)))
    pairs = sorted(tuple(dtype.name for dtype in dot.operands) for dot in dots)
    e4, e5 = "float8_e4m3fn", "float8_e5m2"
    assert pairs == [(e4, e4), (e4, e5), (e5, e4)]
    assert {dot.result.name for dot in dots} == {"float32"}


@pytest.mark.parametrize("scaling", [DelayedScaling(amax_history_length=3), CurrentScaling()])
def test_a_scale_is_computed_once_and_not_for_every_element(scaling):
    """XLA on CPUs likes to fuse the scale, about a hundred scalar operations, into each loop over elements."""
    meta = init_meta(scaling) if isinstance(scaling, DelayedScaling) else None
    x = some((48, 48))

    def step(x, w, meta):
        def loss(*a):
            return (fp8_dot_general(*a[:2], MATMUL, meta=a[2], scaling=scaling) ** 2).sum()

        return jax.grad(loss, (0, 1))(x, w, meta)

    program = jax.jit(step).lower(x, x, meta).compile().as_text()
    parts = [part.strip() for part in program.split("\n}")]
    fused = [part for part in parts if part.startswith("%fused_computation") and "[48,48]" in part]
    assert len(fused) >= 4
    for part in fused:
        scalars = [line for line in part.splitlines() if re.search(r"= \w+\[1?\]\S* (?!parameter|constant)", line)]
        assert len(scalars) < 24, "\n".join(scalars)


def test_operands_may_differ_in_dtype_and_the_activations_decide():
    out = fp8_dot_general(some((4, 8), "bfloat16"), some((8, 5)), MATMUL)
    assert out.dtype == jnp.bfloat16
    assert fp8_dot_general(some((4, 8)), some((8, 5)), MATMUL, None, jnp.float16).dtype == jnp.float16


def test_scales_far_apart_do_not_overflow_in_between():
    x, w = jnp.full((1, 1), 1e37, jnp.float32), jnp.full((1, 1), 1e-27, jnp.float32)
    np.testing.assert_allclose(fp8_dot_general(x, w, MATMUL), [[1e10]], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["input", "kernel", "output_grad"])
def test_what_is_not_finite_is_not_recorded(where, bad):
    scaling = DelayedScaling(amax_history_length=3)
    meta = meta_of(scaling)
    x, w, g = some((4, 8)), some((8, 5)), some((4, 5))
    spoiled = {"input": x, "kernel": w, "output_grad": g}
    spoiled[where] = spoiled[where].at[0, 0].set(bad)
    _, pull = jax.vjp(lambda m: fp8_dot_general(spoiled["input"], spoiled["kernel"], MATMUL, meta=m), meta)
    after = next_state(meta, pull(spoiled["output_grad"])[0])
    assert all(np.isfinite(leaf).all() for leaf in after.values())
    np.testing.assert_array_equal(after[f"{where}_amax_history"], meta[f"{where}_amax_history"])
    for other in {"input", "kernel", "output_grad"} - {where}:
        assert after[f"{other}_amax_history"][0] == np.abs(spoiled[other]).max()


@pytest.mark.parametrize("outer", [jax.grad, jax.hessian], ids=["grad", "hessian"])
def test_second_derivatives_are_refused(outer):
    def loss(x):
        return (fp8_dot_general(x, some((8, 5)), MATMUL) ** 2).sum()

    inner = (lambda x: jax.grad(loss)(x).sum()) if outer is jax.grad else loss
    with pytest.raises(Fp8UnsupportedError, match="first derivatives only"):
        jax.jit(outer(inner))(some((4, 8)))


def test_debug_nans_stops_at_nothing_of_ours():
    meta = init_meta(DelayedScaling(amax_history_length=2))
    with jax.debug_nans(True):
        step = jax.jit(
            jax.value_and_grad(lambda m: fp8_dot_general(jnp.zeros((2, 4)), some((4, 3)), MATMUL, meta=m).sum())
        )
        assert step(meta)[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: {}, "lacks input_scale"),
        (lambda meta: meta | {"kernel_scale": jnp.ones((1,), jnp.bfloat16)}, "must be float32, got bfloat16"),
        (lambda meta: meta | {"input_amax_history": jnp.zeros((2, 3))}, r"vmap for stacked layers"),
        (lambda meta: None, "needs its state"),
    ],
)
def test_bad_state_is_refused(change, message):
    meta = change(init_meta(DelayedScaling(amax_history_length=2)))
    with pytest.raises(Fp8Error, match=message):
        fp8_dot_general(some((4, 8)), some((8, 5)), MATMUL, meta=meta, scaling=DelayedScaling())


def test_other_bad_arguments_are_refused():
    with pytest.raises(Fp8Error, match="lhs must be float16, bfloat16 or float32, got int32"):
        fp8_dot_general(jnp.ones((4, 8), jnp.int32), some((8, 5)), MATMUL)
    with pytest.raises(Fp8Error, match="CurrentScaling has no state"):
        fp8_dot_general(some((4, 8)), some((8, 5)), MATMUL, meta=init_meta(), scaling=CurrentScaling())
    with pytest.raises(Fp8Error, match="from 1 on, got 0"):
        DelayedScaling(amax_history_length=0)
    with pytest.raises(Fp8Error, match="amax_compute_algo must be one of"):
        DelayedScaling(amax_compute_algo="mean")
    with pytest.raises(Fp8Error, match="margin must be an integer"):
        DelayedScaling(margin=0.5)


def test_a_contraction_names_what_is_summed():
    how = Contraction.from_dimension_numbers(MATMUL, 2, 2)
    assert (how.lhs, how.rhs, how.out, how.summed) == ("ba", "ac", "bc", "a")
    assert how.for_lhs == Contraction("bc", "ac", "ba")
    assert how.for_lhs.summed == "c"


@pytest.mark.parametrize("scaling", [DelayedScaling(), CurrentScaling(), CurrentScaling(granularity="row")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_gradient_of_a_kernel_can_be_summed_in_its_own_dtype(scaling, dtype):
    x, kernel = some((64, 32), dtype), some((32, 16), dtype, 1)
    weights = some((64, 16), dtype, 2)
    meta = init_meta(scaling) if isinstance(scaling, DelayedScaling) else None

    def gradients(how):
        def loss(x, kernel):
            return (fp8_dot_general(x, kernel, MATMUL, meta=meta, scaling=how) * weights).astype(jnp.float32).sum()

        step = jax.value_and_grad(loss, argnums=(0, 1))
        dots = [line for line in str(jax.make_jaxpr(step)(x, kernel)).splitlines() if "dot_general[" in line]
        return step(x, kernel), [line.split(":")[1].partition("[")[0] for line in dots]

    (y, (d_x, d_kernel)), plain = gradients(dataclasses.replace(scaling, kernel_gradient="float32"))
    (y_own, (d_x_own, d_kernel_own)), own = gradients(scaling)
    assert plain == ["f32"] * 3
    # sums of codes overflow float16
    assert own == ["f32", "f32", "bf16" if dtype == "bfloat16" else "f32"]
    assert (y_own, d_kernel_own.dtype) == (y, d_kernel.dtype)
    assert jnp.array_equal(d_x_own, d_x)
    if dtype == "bfloat16":
        error = jnp.abs(d_kernel_own.astype(jnp.float32) - d_kernel.astype(jnp.float32))
        assert (error <= 2 * 2.0**-8 * jnp.abs(d_kernel.astype(jnp.float32))).all(), "two roundings in place of one"
        # the scales of the first delayed step are 1, and nothing is rounded by them
        assert bool(error.any()) is not isinstance(scaling, DelayedScaling)
    else:
        assert jnp.array_equal(d_kernel_own, d_kernel)

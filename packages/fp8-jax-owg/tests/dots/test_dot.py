"""FP8 products: equal to the product of what the NumPy definition casts, forward and backward, in every dtype."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_common
import fp8_jax_owg as owg
from fp8_common import Fp8Error, Fp8UnsupportedError
from jax_layers import MATMUL, casts, convolution, distance, dot, meta_of, normal, ragged, transposed

SHAPES = {
    "mk,kn->mn": ((4, 8), (8, 5), MATMUL),
    "km,nk->mn": ((8, 4), (5, 8), (((0,), (1,)), ((), ()))),
    "bmk,bkn->bmn": ((2, 4, 8), (2, 8, 5), (((2,), (1,)), ((0,), (0,)))),
    "mkbl,lnbk->bmn": ((4, 3, 2, 5), (5, 6, 2, 3), (((1, 3), (3, 0)), ((2,), (2,)))),
}
ULP = {"float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-7}
HISTORY = {"input": [3.0, 1.0, 0.0], "kernel": [0.5, 0.0, 2.0], "output_grad": [0.0, 0.0, 7.0]}
FORMATS = {
    "HYBRID": ("e4m3", "e5m2"),
    "E4M3": ("e4m3", "e4m3"),
    "HYBRID_FNUZ": ("e4m3fnuz", "e5m2fnuz"),
    "E4M3_FNUZ": ("e4m3fnuz", "e4m3fnuz"),
}
SHORT = owg.DelayedScaling(amax_history_length=3)
ROWS = owg.CurrentScaling(granularity="row")
SCALINGS = {"delayed": SHORT, "tensor": owg.CurrentScaling(), "row": ROWS}


def scale_of(tensor, scaling, fmt):
    _, amax = fp8_common.numerics.update_history(
        np.float32(HISTORY[tensor]), np.float32(np.inf), scaling.amax_compute_algo
    )
    return fp8_common.amax_to_scale(amax, fmt, scaling.policy)


def as_cast(x, scale, fmt):
    """What the definition makes of an array: float64, so that sums of a few are exact enough."""
    codes = fp8_common.quantize(np.asarray(x), scale, fmt)
    return fp8_common.numerics.decode(codes, fmt).astype(np.float64) * np.float64(fp8_common.numerics.reciprocal(scale))


@pytest.mark.matrix(
    "each",
    equation=list(SHAPES),
    dtype=list(ULP),
    scaling=[
        SHORT,
        dataclasses.replace(SHORT, fp8_format="E4M3", margin=1),
        dataclasses.replace(SHORT, amax_compute_algo="most_recent"),
        dataclasses.replace(SHORT, fp8_format="HYBRID_FNUZ"),
        dataclasses.replace(SHORT, fp8_format="E4M3_FNUZ"),
    ],
)
def test_matmuls_are_those_of_the_definition(equation, dtype, scaling):
    shape_lhs, shape_rhs, dims = SHAPES[equation]
    lhs, rhs, meta = (
        normal(*shape_lhs, dtype=dtype),
        normal(*shape_rhs, dtype=dtype, seed=1),
        meta_of(scaling, **HISTORY),
    )

    @jax.jit
    def run(lhs, rhs, meta, g):
        out, pull = jax.vjp(lambda *x: owg.fp8_dot_general(*x[:2], dims, meta=x[2], scaling=scaling), lhs, rhs, meta)
        return out, *pull(g)

    g = normal(*jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, dims), lhs, rhs).shape, dtype=dtype, seed=2)
    out, d_lhs, d_rhs, next_meta = run(lhs, rhs, meta, g)
    forward, backward = FORMATS[scaling.fp8_format]
    a = as_cast(lhs, scale_of("input", scaling, forward), forward)
    b = as_cast(rhs, scale_of("kernel", scaling, forward), forward)
    c = as_cast(g, scale_of("output_grad", scaling, backward), backward)
    left, right, result = equation.replace("->", ",").split(",")
    for found, side, values in (
        (out, equation, (a, b)),
        (d_lhs, f"{result},{right}->{left}", (c, b)),
        (d_rhs, f"{left},{result}->{right}", (a, c)),
    ):
        expected = np.einsum(side, *values)
        atol = ULP[dtype] * np.abs(expected).max()
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=ULP[dtype], atol=atol)
    for name, x, fmt in (("input", lhs, forward), ("kernel", rhs, forward), ("output_grad", g, backward)):
        window, amax = np.float32(HISTORY[name]), fp8_common.amax(np.asarray(x))
        expected, _ = fp8_common.numerics.update_history(window, amax, scaling.amax_compute_algo)
        np.testing.assert_array_equal(owg.tree.next_state(meta, next_meta)[f"{name}_amax_history"], expected)
        if (scale := scale_of(name, scaling, fmt)) != 1:
            assert next_meta[f"{name}_scale"] == fp8_common.numerics.reciprocal(scale)


@pytest.mark.parametrize("scaling", [owg.CurrentScaling(), ROWS], ids=["tensor", "row"])
def test_current_scaling_keeps_small_rows_only_by_row(scaling):
    x, w = normal(6, 64) * jnp.float32([[1], [1e-7], [1e5], [1], [1], [1]]), normal(64, 16, seed=1)
    out, pull = jax.vjp(lambda x, w: owg.fp8_dot_general(x, w, MATMUL, scaling=scaling), x, w)
    exact, exact_pull = jax.vjp(jnp.matmul, x, w)
    assert (distance(out[1], exact[1]) < 0.09) == (scaling.granularity == "row")
    assert distance(out[2], exact[2]) < 0.09
    for found, wanted in zip(pull(jnp.ones_like(out)), exact_pull(jnp.ones_like(out)), strict=True):
        assert distance(found, wanted) < 0.09


EQUATIONS = {
    "bsd,de->bse": ((2, 3, 4), (4, 5)),
    "...d,de->...e": ((2, 3, 4), (4, 5)),
    "bhqd,bhkd->bhqk": ((2, 2, 4, 5), (2, 2, 6, 5)),
    "ebd,edf->fbe": ((2, 3, 4), (2, 4, 5)),
    "...ij,...jk->...ik": ((2, 1, 3, 4), (6, 4, 5)),
    "nta,hab->nthb": ((2, 3, 4), (2, 4, 5)),
    "ij,jk": ((2, 3), (3, 4)),
    "...a,a": ((2, 3), (3,)),
    "ii,ij->j": ((3, 3), (3, 4)),
    "ij,k->k": ((2, 3), (4,)),
    "ab,b->": ((2, 3), (3,)),
    "a,b->ba": ((3,), (4,)),
}


@pytest.mark.matrix("each", equation=list(EQUATIONS), dtype=list(ULP), scaling=list(SCALINGS.values()))
def test_every_equation_is_nearly_that_of_numpy(equation, dtype, scaling):
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.uniform(0.5, 1.5, shape), dtype) for shape in EQUATIONS[equation])

    def run(product):
        def loss(a, b):
            out = product(a, b)
            return out.astype(jnp.float32).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(a, b)

    (_, out), found = run(lambda a, b: owg.fp8_einsum(equation, a, b, meta=meta_of(scaling), scaling=scaling))
    (_, exact), wanted = run(lambda a, b: jnp.einsum(equation, a, b))
    assert (out.shape, out.dtype) == (exact.shape, exact.dtype)
    assert all(distance(*pair) <= 0.07 for pair in zip((out, *found), (exact, *wanted), strict=True))


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 0]], ids=str)
def test_ragged_matmuls_skip_empty_groups_and_foreign_rows(sizes):
    x, w, g = normal(8, 16), normal(3, 16, 5, seed=1), normal(8, 5, seed=2)
    used = sum(sizes)
    x, g, meta = x.at[used:].set(jnp.nan), g.at[used:].set(jnp.inf), owg.init_meta(SHORT)

    @jax.jit
    def run(sizes, x, w, meta, g):
        out, pull = jax.vjp(lambda x, w, m: owg.fp8_ragged_dot(x, w, sizes, meta=m, scaling=SHORT), x, w, meta)
        d_x, d_w, observed = pull(g)
        return out, d_x, d_w, owg.tree.next_state(meta, observed)

    out, d_x, d_w, after = run(jnp.int32(sizes), x, w, meta, g)
    np.testing.assert_array_equal(out[used:], 0)
    np.testing.assert_array_equal(d_x[used:], 0)
    for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        rows = slice(end - size, end)
        assert distance(out[rows], x[rows] @ w[group]) < 0.08
        assert distance(d_x[rows], g[rows] @ w[group].T) < 0.08
        assert distance(d_w[group], x[rows].T @ g[rows]) < 0.08
    assert after["input_amax_history"][0] == np.abs(x[:used]).max(initial=0)
    assert after["output_grad_amax_history"][0] == np.abs(g[:used]).max(initial=0)


E4, E5 = "float8_e4m3fn", "float8_e5m2"
ALL_THREE = [(E4, E4), (E4, E5), (E5, E4)]


@pytest.mark.parametrize(
    ("product", "name"), [*((dot, name) for name in SCALINGS), (transposed, "delayed"), (ragged, "delayed")]
)
def test_all_three_matmuls_have_fp8_operands(product, name):
    def gradients(x, w):
        return jax.grad(lambda x, w: product(x, w, meta_of(SCALINGS[name]), SCALINGS[name]).sum(), (0, 1))(x, w)

    dots = owg.testing.assert_fp8_dots(gradients, normal(4, 8), normal(8, 5))
    assert sorted(sorted(dtype.name for dtype in one.operands) for one in dots) == sorted(map(sorted, ALL_THREE))
    assert {one.result.name for one in dots} == {"float32"}


def test_batch_dimensions_stay_in_one_matmul():
    a, b = normal(2, 2, 4, 5), normal(2, 2, 6, 5)
    dots = owg.testing.assert_fp8_dots(jax.grad(lambda a: owg.fp8_einsum("bhqd,bhkd->bhqk", a, b).sum()), a)
    assert {one.shapes[0][:2] for one in dots} == {(2, 2)}


@pytest.mark.parametrize("scaling", [SHORT, owg.CurrentScaling()])
def test_a_scale_is_computed_once_and_not_for_every_element(scaling):
    """XLA on CPUs likes to fuse the scale, about a hundred scalar operations, into each loop over elements."""

    def step(x, w, meta):
        return jax.grad(lambda *a: (dot(*a, scaling) ** 2).sum(), (0, 1))(x, w, meta)

    program = jax.jit(step).lower(normal(48, 48), normal(48, 48), meta_of(scaling)).compile().as_text()
    parts = [part.strip() for part in program.split("\n}")]
    fused = [part for part in parts if part.startswith("%fused_computation") and "[48,48]" in part]
    assert len(fused) >= 4
    for part in fused:
        scalars = [line for line in part.splitlines() if re.search(r"= \w+\[1?\]\S* (?!parameter|constant)", line)]
        assert len(scalars) < 24, "\n".join(scalars)


def test_operands_may_differ_in_dtype_and_the_activations_decide():
    assert owg.fp8_dot_general(normal(4, 8, dtype=jnp.bfloat16), normal(8, 5), MATMUL).dtype == jnp.bfloat16
    assert owg.fp8_dot_general(normal(4, 8), normal(8, 5), MATMUL, None, jnp.float16).dtype == jnp.float16


def test_scales_far_apart_do_not_overflow_in_between():
    x, w = jnp.full((1, 1), 1e37, jnp.float32), jnp.full((1, 1), 1e-27, jnp.float32)
    np.testing.assert_allclose(owg.fp8_dot_general(x, w, MATMUL), [[1e10]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_a_kernel_can_be_summed_in_its_own_dtype(dtype):
    scaling = owg.CurrentScaling()
    x, kernel, weights = (normal(*s, dtype=dtype, seed=i) for i, s in enumerate(((64, 32), (32, 16), (64, 16))))

    def gradients(how):
        def loss(x, kernel):
            return (dot(x, kernel, meta_of(scaling), how) * weights).astype(jnp.float32).sum()

        step = jax.value_and_grad(loss, argnums=(0, 1))
        dots = [line for line in str(jax.make_jaxpr(step)(x, kernel)).splitlines() if "dot_general[" in line]
        return jax.jit(step)(x, kernel), [line.split(":")[1].partition("[")[0] for line in dots]

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
        assert error.any()
    else:
        assert jnp.array_equal(d_kernel_own, d_kernel)


# ---------------------------------------------------------------- what is not finite

LAUNDERED = [
    *((dot, name) for name in SCALINGS),
    *((product, "delayed") for product in (transposed, ragged, convolution, casts)),
    (ragged, "tensor"),
]
UNOBSERVED = {casts: "kernel", convolution: "output_grad"}
STEADY = {name: [2, 3, 1] for name in ("input", "kernel", "output_grad")}


@pytest.mark.parametrize(("product", "name"), LAUNDERED, ids=lambda one: getattr(one, "__name__", one))
def test_nothing_that_is_not_finite_is_laundered_nor_recorded(product, name):
    x, w, g, meta = normal(4, 8), normal(8, 5, seed=1), normal(4, 5, seed=2), meta_of(SCALINGS[name], **STEADY)

    @jax.jit
    def run(x, w, g):
        out, pull = jax.vjp(lambda x, w, m: product(x, w, m, SCALINGS[name]), x, w, meta)
        d_x, d_w, observed = pull(g)
        return out, d_x, d_w, meta and owg.tree.next_state(meta, observed)

    def recorded(after, **spoiled):
        """A tensor that is not finite leaves its history, the others are observed."""
        for tensor, array in ({"input": x, "kernel": w, "output_grad": g} | spoiled).items():
            if after and tensor != UNOBSERVED.get(product):
                wanted = [np.abs(array).max(), 1, 2] if np.isfinite(array).all() else STEADY[tensor]
                np.testing.assert_array_equal(after[f"{tensor}_amax_history"], wanted)
                assert np.isfinite(after[f"{tensor}_scale"]).all()

    *values, after = run(x, w, g)
    assert all(np.isfinite(one).all() for one in values)
    recorded(after)
    for bad in (np.inf, -np.inf, np.nan):
        out, _, d_w, after = run(x.at[1, 2].set(bad), w, g)
        assert not np.isfinite(out[1]).any(), "an input"
        assert not np.isfinite(d_w[2]).all(), "an input"
        recorded(after, input=x.at[1, 2].set(bad))
        if product is not casts:
            out, d_x, _, after = run(x, w.at[3, 1].set(bad), g)
            assert not np.isfinite(out[:, 1]).any(), "a kernel"
            assert not np.isfinite(d_x[:, 3]).all(), "a kernel"
            recorded(after, kernel=w.at[3, 1].set(bad))
        if product is not convolution or np.isnan(bad):
            _, d_x, d_w, after = run(x, w, g.at[2, 4].set(bad))
            assert not np.isfinite(d_x[2]).all(), "an output gradient"
            assert not np.isfinite(d_w[:, 4]).all(), "an output gradient"
            recorded(after, output_grad=g.at[2, 4].set(bad))


def test_one_example_does_not_spoil_those_that_share_its_state():
    x, w = normal(3, 4, 8).at[1, 0, 0].set(jnp.inf), normal(8, 5, seed=1)
    out = jax.vmap(lambda x: dot(x, w, meta_of(SHORT, **STEADY), SHORT))(x)
    np.testing.assert_array_equal([np.isfinite(one).all() for one in out], [True, False, True])


# ---------------------------------------------------------------- what is refused

X, W = np.ones((4, 8), np.float32), np.ones((8, 5), np.float32)


def with_state(**changes):
    """A product whose state was changed."""
    kept = {name: leaf for name, leaf in owg.init_meta(SHORT).items() if changes}
    return lambda: dot(X, W, kept | changes, owg.DelayedScaling())


def of_ones(equation, *ndims):
    return lambda: owg.fp8_einsum(equation, *(jnp.ones((3,) * ndim) for ndim in ndims))


def hessian(product):
    return lambda: jax.jit(jax.hessian(lambda x: (product(x) ** 2).sum()))(jnp.ones((4, 8)))


REFUSED = {
    "a state without leaves": (with_state(), "lacks input_scale"),
    "a state of another dtype": (with_state(kernel_scale=np.ones(1, jnp.bfloat16)), "must be float32, got bfloat16"),
    "a stacked state": (with_state(input_amax_history=np.zeros((2, 3), np.float32)), "vmap for stacked layers"),
    "no state": (lambda: dot(X, W, None, owg.DelayedScaling()), "needs its state"),
    "a state for current scaling": (lambda: dot(X, W, owg.init_meta(), ROWS), "CurrentScaling has no state"),
    "integers": (lambda: dot(np.int32(X), W, None, None), "lhs must be float16, bfloat16 or float32, got int32"),
    "a history without entries": (lambda: owg.DelayedScaling(amax_history_length=0), "from 1 on, got 0"),
    "another rule": (lambda: owg.DelayedScaling(amax_compute_algo="mean"), "amax_compute_algo must be one of"),
    "a broken margin": (lambda: owg.DelayedScaling(margin=0.5), "margin must be an integer"),
    "other groups than experts": (lambda: owg.fp8_ragged_dot(X, W[None], jnp.int32([1, 3])), r"needs lhs \[M, K\]"),
    "rows of a ragged product": (lambda: ragged(X, W, None, ROWS), "one scale per tensor"),
    "rows of a convolution": (lambda: convolution(X, W, None, ROWS), "one scale per tensor"),
    "three operands": (of_ones("ij,jk,kl->il", 2, 2), "not an einsum equation for two operands"),
    "one operand": (of_ones("ij->i", 2, 2), "not an einsum equation for two operands"),
    "a name twice in a result": (of_ones("ij,jk->ii", 2, 2), "is not an einsum equation"),
    "a name from nowhere": (of_ones("ij,jk->iz", 2, 2), "is not an einsum equation"),
    "two dots": (of_ones("i..,jk->ik", 2, 2), "is not an einsum equation"),
    "other dimensions": (of_ones("ij,jk->ik", 3, 2), r"shapes \(3, 3, 3\) and \(3, 3\)"),
    "other sizes": (lambda: owg.fp8_einsum("ij,jk->ik", X, W.T), r"shapes \(4, 8\) and \(5, 8\): Size of label \'j\'"),
    "a product that is not FP8": (
        lambda: owg.testing.assert_fp8_dots(jnp.dot, X, W),
        r"dot_general of float32\(4, 8\) and float32\(8, 5\)",
    ),
    "a function without products": (lambda: owg.testing.assert_fp8_dots(jnp.sin, jnp.ones(3)), "Of 0 matmuls"),
    "a second derivative": (hessian(lambda x: owg.fp8_dot_general(x, W, MATMUL)), "only first derivatives"),
    "a second derivative of a cast": (
        hessian(lambda x: owg.flax_casts.in_qdq(x, jnp.ones(1), jnp.ones(3))),
        "only first derivatives",
    ),
}


@pytest.mark.parametrize(("run", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_raises(run, message):
    with pytest.raises(Fp8Error, match=message) as caught:
        run()
    assert ("derivative" in message) == isinstance(caught.value, Fp8UnsupportedError)

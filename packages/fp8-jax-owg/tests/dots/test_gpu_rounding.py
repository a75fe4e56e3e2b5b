"""Results in bfloat16 on NVIDIA GPUs, rounded before and after the scale: the bound of the definition, in NumPy."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import dtypes
from flax.nnx.nn import dtypes as nnx_dtypes
from jax.ad_checkpoint import print_saved_residuals
from jax.interpreters import partial_eval

import fp8_jax_owg as owg
from fp8_common.formats import get_format
from fp8_common.jax import _kernels as kernels
from fp8_common.jax import casts
from fp8_jax_owg import linen
from fp8_jax_owg import nnx as own
from fp8_jax_owg.dots.operands import Master

U = 2.0**-8 / (1 + 2.0**-8)
BOUND = 2 * U + U**2 + 2.0**-23


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def sums():
    """Float32 sums at and near the ties of bfloat16, and random ones, in [1, 2)."""
    ties = (np.arange(128, 256) + 0.5) * 2.0**-7
    near = [ties * (1 + step * 2.0**-23) for step in (-2, -1, 0, 1, 2)]
    return np.concatenate([*near, np.random.default_rng(0).uniform(1, 2, 4096)]).astype(np.float32)


def test_rounding_twice_stays_within_its_bound_and_one_step():
    y = sums()
    steps = 2.0 ** -np.arange(1, 24)
    factors = [1 + np.random.default_rng(1).uniform(0, 1, 2000), 1 + np.arange(256) / 256, 2 - steps, 1 + steps]
    worst = 0.0
    for factor in np.concatenate(factors).astype(np.float32):
        once, twice = rounded(y * factor), rounded(rounded(y) * factor)
        exact = y.astype(np.float64) * np.float64(factor)
        worst = max(worst, float(np.max(np.abs(twice - exact) / exact)))
        keys = [x.astype(ml_dtypes.bfloat16).view(np.int16).astype(np.int32) for x in (once, twice)]
        assert np.abs(keys[0] - keys[1]).max() <= 1
    print(f"{worst:.6f} of {BOUND:.6f}")
    assert U < worst <= BOUND  # it is more than one rounding


def test_powers_of_two_change_nothing():
    y = sums()
    for exponent in range(-120, 110):
        factor = np.float32(2.0**exponent)
        np.testing.assert_array_equal(rounded(y * factor), rounded(rounded(y) * factor))


# ---------------------------------------------------------------- programs that are traced for a GPU

SCALING = owg.DelayedScaling(amax_history_length=4)


@pytest.fixture
def as_on_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "_obstacle", lambda: None)
    monkeypatch.setattr(kernels, "_gpu_capability", lambda: 90)
    jax.clear_caches()
    yield
    jax.clear_caches()


def dot(x, w):
    return owg.fp8_dot_general(x, w, (((1,), (0,)), ((), ())), meta=owg.init_meta(SCALING), scaling=SCALING)


@pytest.mark.own_trace
def test_dots_saveable_saves_the_result_of_one_platform(as_on_gpu, capsys):
    saveable = jax.checkpoint(
        lambda x, w: jnp.sin(dot(x, w).astype(jnp.float32)).sum(), policy=jax.checkpoint_policies.dots_saveable
    )
    print_saved_residuals(saveable, jnp.ones((64, 32), jnp.bfloat16), jnp.ones((32, 48), jnp.bfloat16))
    assert re.findall(r"(\w+)\[64,48\]", capsys.readouterr().out) == ["bf16"]


@pytest.mark.own_trace
@pytest.mark.parametrize(
    ("used", "name"),
    [
        ((True, True, True), "fp8_cast_transpose_with_amax"),
        ((True, True, False), "fp8_cast_transpose"),
        ((True, False, True), "fp8_cast_with_amax"),
        ((True, False, False), "fp8_cast"),
        ((False, False, True), "fp8_amax_key"),
    ],
)
def test_what_nobody_uses_is_not_computed(as_on_gpu, used, name):
    def cast(x):
        results = casts.cast_transpose_with_amax(x, jnp.float32(2), get_format("e4m3"), 1)
        return [result for result, is_used in zip(results, used, strict=True) if is_used]

    x = jnp.arange(64, dtype=jnp.float32).reshape(4, 16)
    closed = jax.make_jaxpr(cast)(x)
    alone, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * sum(used))
    assert [eqn.primitive.name for eqn in alone.eqns if eqn.primitive.name.startswith("fp8_")] == [name]
    found = jax.core.eval_jaxpr(alone, closed.consts, x)
    for one, wanted in zip(found, cast(x), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(wanted))


def of_linen(promote):
    layer = nn.Dense(48, dtype=jnp.bfloat16, dot_general_cls=linen.Fp8DotGeneralOp, **promote)
    return layer, lambda variables, x: layer.apply(variables, x)


def converted(promote):
    layer = linen.convert_to_fp8(nn.Dense(48, dtype=jnp.bfloat16, **promote))
    return layer, lambda variables, x: layer.apply(variables, x)


@pytest.mark.own_trace
@pytest.mark.parametrize("kind", [of_linen, converted])
def test_float32_kernels_of_linen_are_cast_unchanged_with_the_bits_of_bfloat16(as_on_gpu, kind):
    ours = {} if kind is converted else {"promote_dtype": linen.promote_dtype}
    plain = {"promote_dtype": lambda *args, **options: dtypes.promote_dtype(*args, **options)}
    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 24)), jnp.bfloat16)
    layer, _ = kind(plain)
    variables = layer.init(jax.random.key(0), x)
    results, programs = [], []
    for promote in (ours, plain):
        run = kind(promote)[1]
        step = owg.value_and_grad(lambda v, x, run=run: (run(v, x).astype(jnp.float32) ** 2).mean())
        results.append(jax.jit(step)(variables, x))
        programs.append(str(jax.make_jaxpr(step)(variables, x)))
    assert [len(re.findall(r"rounded=True", one)) > 0 for one in programs] == [True, False]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *results)


@pytest.mark.own_trace
@pytest.mark.parametrize("scaling", [owg.DelayedScaling(), owg.CurrentScaling()])
def test_float32_kernels_of_nnx_are_cast_unchanged_with_the_bits_of_bfloat16(as_on_gpu, scaling):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 24)), jnp.bfloat16)
    results = []
    for changed in (True, False):
        layer = nnx.Linear(24, 48, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        if not changed:
            layer.promote_dtype = lambda args, **options: nnx_dtypes.promote_dtype(args, **options)
        own.convert_to_fp8(layer, scaling=scaling)
        graph, state = nnx.split(layer)
        step = own.value_and_grad(lambda layer: (layer(x).astype(jnp.float32) ** 2).mean())
        assert ("rounded=True" in str(jax.make_jaxpr(lambda s, g=graph: nnx.merge(g, s)(x))(state))) == changed
        loss, grads = nnx.jit(step)(layer)
        results.append((loss, nnx.to_pure_dict(grads)))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *results)


@pytest.mark.own_trace
def test_a_master_that_no_kernel_reads_is_rounded_first(as_on_gpu):
    x, w = jnp.ones((4, 6), jnp.bfloat16), jnp.full((6, 8), 1 + 2.0**-12)
    for scaling in (owg.CurrentScaling(granularity="row"), owg.CurrentScaling()):
        for dims in ((((1,), (0,)), ((), ())), (((0,), (1,)), ((), ()))):
            a = x if dims[0][0] == (1,) else jnp.ones((8, 4), jnp.bfloat16)
            run = lambda w, a=a, dims=dims, scaling=scaling: owg.fp8_dot_general(a, w, dims, scaling=scaling)  # noqa: E731
            found = run(Master(w))
            np.testing.assert_array_equal(np.asarray(found), np.asarray(run(w.astype(jnp.bfloat16))))


def by_row(x, w):
    scaling = owg.CurrentScaling(granularity="row")
    return owg.fp8_dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), scaling=scaling)


@pytest.mark.own_trace
@pytest.mark.parametrize(("lhs", "rhs"), [((16, 24), (24, 8)), ((2, 8, 24), (24, 2, 4)), ((2, 3, 5), (5, 7))])
def test_rows_and_columns_are_cast_together_and_saved_as_codes(as_on_gpu, monkeypatch, capsys, lhs, rhs):
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in (lhs, rhs))

    def step(x, w):
        y, pull = jax.vjp(by_row, x, w)
        return y, *pull(y)

    program = str(jax.make_jaxpr(step)(x, w))
    assert program.count("fp8_rowwise") == 0
    # a jitted function that two casts of one shape share is printed once
    assert program.count("= fp8_amax_both") in (2, 3)
    print_saved_residuals(by_row, x, w)
    assert "bf16" not in capsys.readouterr().out
    found = jax.jit(step)(x, w)
    monkeypatch.setattr(kernels, "_obstacle", lambda: "there is no GPU")
    monkeypatch.setattr(kernels, "_gpu_capability", lambda: None)
    jax.clear_caches()
    for one, wanted in zip(found, jax.jit(step)(x, w), strict=True):
        assert one.dtype == wanted.dtype
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(wanted, np.float32), rtol=2**-7, atol=1e-5)

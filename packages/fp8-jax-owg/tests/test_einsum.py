"""`fp8_einsum`: every kind of equation gives the shape, and nearly the numbers, of `jnp.einsum`; also its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8_common import Fp8Error
from fp8_jax_owg import CurrentScaling, DelayedScaling, assert_fp8_dots, fp8_einsum, init_meta

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


def arrays(equation, dtype="float32"):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.uniform(0.5, 1.5, shape), dtype) for shape in EQUATIONS[equation]]


@pytest.mark.matrix(
    "each",
    equation=list(EQUATIONS),
    dtype=["float32", "bfloat16", "float16"],
    scaling=[DelayedScaling(amax_history_length=2), CurrentScaling(), CurrentScaling(granularity="row")],
)
def test_every_equation_is_that_of_numpy(equation, dtype, scaling):
    a, b = arrays(equation, dtype)
    meta = init_meta(scaling) if isinstance(scaling, DelayedScaling) else None

    def run(product):
        def loss(a, b):
            out = product(a, b)
            return out.astype(jnp.float32).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(a, b)

    (_, out), found = run(lambda a, b: fp8_einsum(equation, a, b, meta=meta, scaling=scaling))
    (_, exact), wanted = run(lambda a, b: jnp.einsum(equation, a, b))
    assert (out.shape, out.dtype) == (exact.shape, exact.dtype)
    for one, other in zip((out, *found), (exact, *wanted), strict=True):
        difference = np.linalg.norm(np.float32(one) - np.float32(other))
        assert difference <= 0.07 * np.linalg.norm(np.float32(other))


def test_batch_dimensions_stay_in_one_product():
    a, b = arrays("bhqd,bhkd->bhqk")
    dots = assert_fp8_dots(jax.grad(lambda a: fp8_einsum("bhqd,bhkd->bhqk", a, b).sum()), a)
    assert {dot.shapes[0][:2] for dot in dots} == {(2, 2)}


@pytest.mark.parametrize(
    ("equation", "ndims", "message"),
    [
        ("ij,jk,kl->il", (2, 2), "multiplies two operands, got 3"),
        ("ij->i", (2, 2), "got 1"),
        ("ij,jk->ii", (2, 2), "is no equation of einsum"),
        ("ij,jk->iz", (2, 2), "is no equation of einsum"),
        ("i..,jk->ik", (2, 2), "is no equation of einsum"),
        ("ij,jk->ik", (3, 2), "of 2 and 2 dimensions, got 3 and 2"),
    ],
)
def test_what_is_no_equation_of_two_operands_is_refused(equation, ndims, message):
    with pytest.raises(Fp8Error, match=message):
        fp8_einsum(equation, *(jnp.ones((3,) * ndim) for ndim in ndims))


def test_sizes_that_differ_are_refused():
    with pytest.raises(Fp8Error, match="'j' has size 3 in lhs and 4 in rhs"):
        fp8_einsum("ij,jk->ik", jnp.ones((2, 3)), jnp.ones((4, 5)))

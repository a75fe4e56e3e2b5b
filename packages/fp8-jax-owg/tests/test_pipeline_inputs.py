"""What a pipeline takes and gives besides activations: broadcast inputs, batches, sown losses, options of praxis."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fp8_jax_owg as owg
import jax_layers
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from fp8_jax_owg import pipeline
from jax_layers import COLLECTION, SCALING, T, normal

WIDTH, ROWS = 8, 4
LOSSES = ("losses", "aux")


def stage(dense, h, mask, bias, factor):
    """One FP8 layer whose result a mask, a bias of this microbatch and a factor of all change."""
    return jnp.where(mask[:, None], jnp.tanh(dense(h)), h) * factor * (1 + bias["b"])


class LinenStage(nn.Module):
    @nn.compact
    def __call__(self, h, mask, bias, *, factor=1.0):
        y = stage(jax_layers.dense(WIDTH, scaling=SCALING, name="fc"), h, mask, bias, factor)
        self.sow(*LOSSES, (y**2).mean())
        return y


class NnxStage(nnx.Module):
    def __init__(self, rngs):
        self.fc = jax_layers.linear(WIDTH, WIDTH, scaling=SCALING, rngs=rngs)

    def __call__(self, h, mask, bias, *, factor=1.0):
        return stage(self.fc, h, mask, bias, factor)


def inputs(count, rows=(ROWS,)):
    """Activations, a mask and a bias with leading lengths [count, *rows]."""
    lead = (count, *rows)
    mask = np.random.default_rng(3).random(lead) < 0.6
    sizes = np.resize([1.0, 3.0, 2.0, 0.5], (count, *[1] * len(rows), 1))
    return normal(*lead, WIDTH) * sizes, jnp.asarray(mask), {"b": normal(*lead, WIDTH, seed=2)}


def linen_pipe(stages, microbatches, rounds=1, body=None, **options):
    return owg_linen.LayerwiseShardablePipelined(
        body=body or LinenStage(),
        num_stages=stages,
        num_microbatches=microbatches,
        circular_repeat=rounds,
        **options,
    )


def made(stages, microbatches, rounds, kind):
    """Variables, the pipeline, and one stage as functions of variables and inputs."""
    if kind == "linen":
        model = linen_pipe(stages, microbatches, rounds)
        variables = jax.jit(model.init)(jax.random.key(0), *inputs(microbatches))
        run = lambda v, *args, **kwargs: model.apply(v, *args, **kwargs)  # noqa: E731
        one = lambda v, *args, **kwargs: LinenStage().apply(T(lambda x: x, body(v)), *args, **kwargs)  # noqa: E731
        return variables, run, one
    model = owg_nnx.LayerwiseShardablePipelined(
        NnxStage, stages, microbatches, circular_repeat=rounds, rngs=nnx.Rngs(0)
    )
    graph, variables = nnx.split(model)
    definition = nnx.graphdef(model.stages)
    run = lambda v, *args, **kwargs: nnx.merge(graph, v)(*args, **kwargs)  # noqa: E731
    one = lambda v, *args, **kwargs: nnx.merge(definition, v["stages"])(*args, **kwargs)  # noqa: E731
    return variables, run, one


def body(variables):
    return {name: tree["body"] for name, tree in variables.items()}


def unrolled(one, variables, x, mask, bias, *, places, **kwargs):
    """Each microbatch through one stage after the other."""
    layers = [T(lambda a: a[place], variables) for place in places]  # noqa: B023
    results = []
    for m in range(x.shape[0]):
        h = x[m]
        for layer in layers:
            h = one(layer, h, mask[m], {"b": bias["b"][m]}, **kwargs)
        results.append(h)
    return jnp.stack(results)


def places_of(stages, rounds):
    return [s if rounds == 1 else (r, s) for r in range(rounds) for s in range(stages)]


def assert_close(found, wanted):
    T(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), found, wanted)


@pytest.mark.parametrize(
    ("kind", "stages", "rounds", "bubble"),
    [("linen", 2, 1, 0.0), ("linen", 2, 2, np.nan), ("nnx", 3, 1, np.nan), ("nnx", 2, 2, 0.0)],
)
def test_every_stage_gets_the_broadcast_inputs_of_its_microbatch(kind, stages, rounds, bubble, monkeypatch):
    """Their gradients too equal those of the unrolled twin, and nothing comes of what bubbles compute with them."""
    monkeypatch.setattr(pipeline, "BUBBLE", bubble)
    variables, run, one = made(stages, 3, rounds, kind)
    x, mask, bias = inputs(3)

    def loss(run, variables, x, bias):
        return (run(variables, x, mask, bias, factor=0.5) ** 2).sum()

    both = jax.jit(owg.value_and_grad(partial(loss, run), (0, 1, 2)))(variables, x, bias)
    twin = partial(unrolled, one, places=places_of(stages, rounds))
    wanted = jax.jit(owg.value_and_grad(partial(loss, twin), (0, 1, 2)))(variables, x, bias)
    assert_close(both, wanted)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(both))


@pytest.mark.parametrize(("rounds", "remat"), [(1, True), (2, False)])
def test_a_loss_that_stages_sow_is_that_of_every_stage_and_microbatch(rounds, remat, monkeypatch):
    """Also its gradient; bubbles, whose losses are NaN here, are left out."""
    monkeypatch.setattr(pipeline, "BUBBLE", np.nan)
    stages, count = 2, 3
    model, (x, mask, bias) = linen_pipe(stages, count, rounds, remat=remat), inputs(count)
    variables = jax.jit(model.init)(jax.random.key(0), x, mask, bias)
    assert set(variables) == {"params", COLLECTION}, "init makes no sown values"

    def loss(variables):
        y, sown = model.apply(variables, x, mask, bias, mutable=["losses"])
        return (y**2).sum() + sown["losses"]["body"]["aux"][0].sum(), sown

    def twin(variables):
        total, found = 0.0, np.zeros((rounds, stages, count)).tolist()
        place = lambda r, s: s if rounds == 1 else (r, s)  # noqa: E731
        layers = {(r, s): T(lambda a: a[place(r, s)], body(variables)) for r, s in np.ndindex(rounds, stages)}  # noqa: B023
        for m in range(count):
            h = x[m]
            for r, s in np.ndindex(rounds, stages):
                h, sown = LinenStage().apply(layers[r, s], h, mask[m], {"b": bias["b"][m]}, mutable=["losses"])
                found[r][s][m] = sown["losses"]["aux"][0]
                total += found[r][s][m]
            total += (h**2).sum()
        return total, jnp.asarray(found)

    (value, sown), gradients = jax.jit(owg.value_and_grad(loss, has_aux=True))(variables)
    (wanted, losses), wanted_gradients = jax.jit(owg.value_and_grad(twin, has_aux=True))(variables)
    assert list(sown) == ["losses"]
    assert_close(sown["losses"]["body"]["aux"], (losses if rounds > 1 else losses[0],))
    assert_close((value, gradients), (wanted, wanted_gradients))
    # values of an earlier call, which apply may be given again, are not input
    again = model.apply(variables | sown, x, mask, bias, mutable=["losses"])[1]
    assert_close(again, sown)
    assert model.apply(variables, x, mask, bias).shape == x.shape


def test_what_is_sown_elsewhere_raises_and_not_dropped():
    class Elsewhere(nn.Module):
        @nn.compact
        def __call__(self, h):
            self.sow("router", "aux", h.mean(), reduce_fn=jnp.add, init_fn=lambda: 0.0)
            return nn.Dense(4)(h)

    x = jnp.ones((3, 2, 4))
    model = linen_pipe(2, 3, body=Elsewhere(), sown_collections=("router",))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    _, sown = model.apply(variables, x, mutable=True)
    assert sown["router"]["body"]["aux"].shape == (2, 3)
    unnamed = model.clone(sown_collections=())
    with pytest.raises(
        Fp8UnsupportedError, match=r"here \['router'\]\['aux'\].*name its collection in sown_collections"
    ):
        unnamed.apply(variables, x, mutable=["router"])
    with pytest.raises(Fp8UnsupportedError, match="sown_collections"):
        unnamed.init(jax.random.key(0), x)
    assert unnamed.apply(variables, x).shape == x.shape


# ---------------------------------------------------------------- batches

DIVIDED = {
    "by number": {"num_microbatches": 4},
    "by size": {"microbatch_size": 3},
    "by both": {"num_microbatches": 4, "microbatch_size": 3},
}


@pytest.mark.parametrize(("how", "kind"), [("by number", "linen"), ("by both", "linen"), ("by size", "nnx")])
def test_a_batch_is_divided_and_comes_back_in_its_order(how, kind):
    """Of a batch of 12 rows, microbatch m has the rows m, m + 4 and m + 8, as in praxis; so has each observation."""
    x, mask, bias = inputs(12, rows=())
    divided = T(lambda a: jnp.stack([a[m::4] for m in range(4)]), (x, mask, bias))
    if kind == "linen":
        model = owg_linen.LayerwiseShardablePipelined(LinenStage(), num_stages=2, **DIVIDED[how])
        variables = jax.jit(model.init)(jax.random.key(0), x, mask, bias)
        run, split = model.apply, model.clone(num_microbatches=None, microbatch_size=None).apply
    else:
        make = partial(owg_nnx.LayerwiseShardablePipelined, NnxStage, 2)
        model = make(**DIVIDED[how], rngs=nnx.Rngs(0))
        graph, variables = nnx.split(model)
        other = nnx.graphdef(make(rngs=nnx.Rngs(0)))
        run = lambda v, *args: nnx.merge(graph, v)(*args)  # noqa: E731
        split = lambda v, *args: nnx.merge(other, v)(*args)  # noqa: E731

    def loss(run, v, args):
        y = run(v, *args)
        return (y**2).sum(), y

    (value, y), gradients = jax.jit(owg.value_and_grad(partial(loss, run), has_aux=True))(variables, (x, mask, bias))
    (wanted, each), others = jax.jit(owg.value_and_grad(partial(loss, split), has_aux=True))(variables, divided)
    assert y.shape == x.shape
    assert_close(jnp.stack([y[m::4] for m in range(4)]), each)
    assert_close((value, gradients), (wanted, others))


def test_as_many_rows_as_microbatches_are_divided_already_unless_their_size_is_given():
    class Ranked(nn.Module):
        rank: int

        def __call__(self, h):
            assert h.ndim == self.rank
            return h

    x = jnp.ones((4, 8))
    assert linen_pipe(2, 4, body=Ranked(1)).apply({}, x).shape == x.shape
    assert linen_pipe(2, 4, body=Ranked(2), microbatch_size=1).apply({}, x).shape == x.shape


# ---------------------------------------------------------------- sums of bfloat16


@pytest.mark.parametrize("rounds", [1, 2])
def test_gradients_of_bfloat16_are_added_in_float32_where_that_is_asked_for(rounds):
    """Nine of them, 256 and eight times 1, which a backward loop begins with: bfloat16 has no 257."""

    class Shift(nn.Module):
        @nn.compact
        def __call__(self, h):
            return h + self.param("b", nn.initializers.zeros, (), jnp.bfloat16).astype(jnp.float32)

    weights = jnp.float32([1] * 8 + [256])[:, None]
    x = jnp.zeros((9, 1))

    def gradient(model):
        variables = model.init(jax.random.key(0), x)
        return jax.jit(jax.grad(lambda v: (model.apply(v, x) * weights).sum()))(variables)["params"]["body"]["b"]

    model = linen_pipe(2, 9, rounds, body=Shift())
    exact = gradient(model.clone(bf16_accum_in_fp32=True))
    assert exact.dtype == jnp.bfloat16
    assert (exact == 264).all()
    assert (gradient(model) != 264).any()


# ---------------------------------------------------------------- options of praxis, and what does not fit


def test_the_stage_has_the_name_of_praxis_too():
    x = jnp.ones((3, 2, 4))
    model = owg_linen.LayerwiseShardablePipelined(num_stages=2, single_stage_body=nn.Dense(4), num_microbatches=3)
    assert model == owg_linen.LayerwiseShardablePipelined(nn.Dense(4), 2, 3)
    assert jax.eval_shape(model.init, jax.random.key(0), x)["params"]["body"]["kernel"].shape == (2, 4, 4)
    for stages in ({}, {"body": nn.Dense(4), "single_stage_body": nn.Dense(4)}):
        with pytest.raises(Fp8Error, match="needs one module as body, or as single_stage_body"):
            owg_linen.LayerwiseShardablePipelined(num_stages=2, **stages)


def pipe_of(x, *args, body=None, **options):
    model = owg_linen.LayerwiseShardablePipelined(body or nn.Dense(4), num_stages=2, **options)
    return jax.eval_shape(model.init, jax.random.key(0), x, *args)


class Narrowing(nn.Module):
    def __call__(self, h):
        return h.astype(jnp.bfloat16)


X = np.ones((6, 2, 4), np.float32)
REFUSED = {
    "stream_io": (lambda: pipe_of(X, stream_io=True), "no option 'stream_io' of praxis"),
    "checkpoint_policy": (lambda: pipe_of(X, checkpoint_policy=None), "praxis: use remat and remat_policy"),
    "a size that does not divide": (lambda: pipe_of(X, microbatch_size=4), "batch of 6 does not divide.*size=4"),
    "numbers that do not agree": (
        lambda: pipe_of(X, microbatch_size=2, num_microbatches=2),
        "batch of 6 does not divide into microbatches with microbatch_size=2 and num_microbatches=2",
    ),
    "another number": (lambda: pipe_of(X, num_microbatches=4), r"Activations .* with \(4,\), got \(6, 2, 4\)"),
    "a mask of another length": (
        lambda: pipe_of(X, np.ones((1, 2), bool), num_microbatches=6, body=LinenStage()),
        r"Broadcast inputs .* with \(6,\), got \(1, 2\)",
    ),
    "a mask of another batch": (
        lambda: pipe_of(X, np.ones((5, 2), bool), microbatch_size=2, body=LinenStage()),
        r"batch that divides into 3 microbatches, got \(5, 2\)",
    ),
    "another width": (
        lambda: pipe_of(X, body=nn.Dense(8)),
        r"must return activations of the shapes and dtypes that it gets.*float32\[2, 4\] and returns float32\[2, 8\]",
    ),
    "another dtype": (lambda: pipe_of(X, body=Narrowing()), r"gets float32\[2, 4\] and returns bfloat16\[2, 4\]"),
    "no activations": (lambda: pipe_of({}), "needs activations"),
}


@pytest.mark.parametrize(("run", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_raises_in_a_sentence(run, message):
    with pytest.raises(Fp8Error, match=message):
        run()

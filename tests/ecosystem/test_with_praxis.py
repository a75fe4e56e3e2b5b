"""`examples/praxis_fp8.py`: real layers and pipelines of praxis, `nox -s praxis -- CHECKOUT`."""

import functools

import pytest

REASON = "no praxis can be imported: `nox -s praxis -- CHECKOUT` takes one that you have"
pytest.importorskip("praxis.layers.pipeline", reason=REASON, exc_type=ImportError)

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from praxis import base_layer, pax_fiddle
from praxis.layers import linears, pipeline, repeats
from praxis.layers.injection import fp8_nvidia_gpu

import fp8_jax_owg as owg
import jax_losses
from examples import praxis_fp8
from fp8_common import Fp8Error
from fp8_jax_owg import linen as owg_linen
from jax_operations import REFUSED, RIGHT, floating

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future
X = praxis_fp8.batch()
STOCK = fp8_nvidia_gpu.Fp8EinsumOp


def made(circular=False, **options):
    """A model and its variables."""
    model = praxis_fp8.build(circular=circular, **options)
    try:
        return model, praxis_fp8.init(model, X)
    except AssertionError as error:
        if circular and not options and "remove_axis" in "".join(error.__notes__):
            pytest.skip(praxis_fp8.FAULT)
        raise


def loss_of(model):
    return lambda variables: (model.apply(variables, X) ** 2).mean()


def newest(tree, tensor="input"):
    return np.asarray(tree["params"]["body"]["einsum"][f"{tensor}_amax_history"])[..., 0].ravel().tolist()


def parameters(tree):
    return tree["params"]["body"]["w"]


@pytest.mark.parametrize("circular", [False, True])
def test_two_steps_equal_those_of_the_layers_one_by_one(circular):
    model, variables = made(circular)
    log, after = praxis_fp8.train(model.apply, variables, X, steps=2)
    wanted, twin = praxis_fp8.train(praxis_fp8.twin, variables, X, steps=2)
    assert log[0][1] == ([5, 5, 5, 5] if circular else [5, 5])
    assert [loss for loss, _ in log] == pytest.approx([loss for loss, _ in wanted], rel=1e-6)
    for tensor in ("input", "kernel", "output_grad"):
        np.testing.assert_allclose(newest(after, tensor), newest(twin, tensor), rtol=1e-6)
    np.testing.assert_allclose(parameters(after), parameters(twin), rtol=1e-6)
    assert not np.array_equal(parameters(after), parameters(variables))


# Each of them changes how praxis runs the loop, or what it runs on while a stage has no work.
OPTIONS = {
    "rows of a micro-batch": {"microbatch_size": 2, "num_microbatches": None},
    "sums in float32": {"bf16_accum_in_fp32": True},
    "streamed inputs": {"stream_io": True},
    "NaN in stages without work": {"polluting_bubbles_with_nan": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_pipeline_change_no_observation(name):
    model, variables = made(**OPTIONS[name])
    wanted = jax.jit(owg.grad(loss_of(made()[0])))(variables)
    got = jax.jit(owg.grad(loss_of(model)))(variables)
    assert newest(got) == newest(wanted) == [5, 5]
    np.testing.assert_allclose(parameters(got), parameters(wanted), rtol=1e-6)


def test_the_mask_of_hparams_is_that_of_the_variables_and_marks_are_as_good_as_names():
    model, variables = made()
    mask = owg.tree.mask_from_hparams(model.abstract_init_with_metadata(X))
    assert mask == owg.tree.owg_mask(variables)
    assert sum(jax.tree.leaves(mask)) == 6
    marked = jax.jit(owg.grad(lambda marked: loss_of(model)(owg.tree.unmark(marked))))(owg.tree.mark(variables, mask))
    named = jax.jit(owg.grad(loss_of(model)))(variables)
    jax.tree.map(np.testing.assert_array_equal, owg.tree.unmark(marked), named)


def test_the_mask_that_the_layer_computes_is_enough_for_a_stock_gradient(monkeypatch):
    """praxis computes a mask from its `WeightHParams` inside of the layer, and shares what it names."""
    model, variables = made()
    gradient = lambda: jax.jit(jax.grad(loss_of(model)))(variables)  # noqa: E731 (traced anew)
    assert newest(gradient()) == [5, 5]
    monkeypatch.setattr(pipeline.LayerwiseShardablePipelined, "get_to_fm32_converter", lambda self, mask: lambda v: v)
    assert newest(gradient()) == [11, 11]  # 1 + 5 + 3 + 2
    assert newest(jax.jit(owg.grad(loss_of(model)))(variables)) == [5, 5]


def test_layers_that_repeat_have_a_state_each():
    op = pax_fiddle.Config(praxis_fp8.Fp8Einsum, name="einsum", amax_history_length=3)
    layer = pax_fiddle.Config(linears.Linear, name="layer", einsum_tpl=op, input_dims=4, output_dims=4)
    model = base_layer.instantiate(pax_fiddle.Config(repeats.Repeat, name="repeat", sub_tpl=layer, x_times=3))
    variables = jax.jit(model.init)(jax.random.key(0), X)
    inner = variables["params"]["sub"]
    inner["w"] = 2 * jnp.broadcast_to(jnp.eye(4), inner["w"].shape)
    after = owg.tree.next_state(variables, jax.jit(owg.grad(loss_of(model)))(variables))["params"]["sub"]
    assert after["einsum"]["input_amax_history"][:, 0].tolist() == [5, 10, 20]


def test_the_einsum_of_praxis_raises_in_one_sentence():
    model, variables = made(einsum=STOCK)
    with pytest.raises(Fp8Error, match="flax's own FP8 operations"):
        jax.make_jaxpr(owg.grad(loss_of(model)))(variables)


# ---------------------------------------------------------------- operations on all variables


@functools.cache
def linear():
    """A layer of praxis with two features."""
    op = pax_fiddle.Config(praxis_fp8.Fp8Einsum, name="einsum", amax_history_length=3)
    model = base_layer.instantiate(
        pax_fiddle.Config(linears.Linear, name="layer", einsum_tpl=op, input_dims=2, output_dims=2)
    )
    return jax_losses.Framework(
        lambda: jax.jit(model.init)(jax.random.key(0), jax_losses.X), lambda x, v: model.apply(v, x)
    )


@pytest.mark.parametrize("name", jax_losses.ROWS)
def test_operations_on_variables(name):
    jax_losses.check(linear(), name)


# Leaves of a pipeline have a dimension of stages.
def on_all(model, function):
    return owg.value_and_grad(lambda variables: loss_of(model)(jax.tree.map(function, variables)))


@pytest.mark.parametrize("name", ["stack [1]", "gather", "noise, floating only", "custom_vjp identity"])
def test_moving_all_variables_of_a_pipeline(name):
    model, variables = made()
    got = jax.jit(on_all(model, RIGHT[name]))(variables)
    alone = lambda p: RIGHT[name](p) if floating(p) and p.ndim == 3 else p  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(on_all(model, alone))(variables))


@pytest.mark.parametrize("name", ["p * 1.0", "clip(p, -1e3, 1e3)", "astype f32", "where(True, p, 0)"])
def test_computing_with_all_variables_of_a_pipeline_raises(name):
    model, variables = made()
    with pytest.raises(Fp8Error, match="parameters alone"):
        jax.make_jaxpr(on_all(model, REFUSED[name]))(variables)


# ---------------------------------------------------------------- the pipeline of this package


class Linear(nn.Module):
    """The layer of praxis in Linen."""

    @nn.compact
    def __call__(self, x):
        state = owg.init_meta(praxis_fp8.SCALING)
        meta = {name: self.param(f"einsum_{name}", lambda _, leaf=leaf: leaf) for name, leaf in state.items()}
        w = self.param("w", lambda _: jnp.eye(4))
        return owg.fp8_einsum("bi,io->bo", x, w, meta=meta, scaling=praxis_fp8.SCALING)


def in_linen(tree):
    body = tree["params"]["body"]
    return {"params": {"body": {"w": body["w"], **{f"einsum_{name}": leaf for name, leaf in body["einsum"].items()}}}}


@pytest.mark.parametrize("circular", [False, True])
def test_our_pipeline_computes_what_that_of_praxis_does(circular):
    options = {"single_stage_body": Linear(), "num_stages": praxis_fp8.STAGES, "num_microbatches": len(praxis_fp8.AMAX)}
    ours = owg_linen.LayerwiseShardablePipelined(**options, circular_repeat=praxis_fp8.ROUNDS if circular else 1)
    model, variables = made(circular)
    loss, gradients = jax.jit(owg.value_and_grad(loss_of(model)))(variables)
    got = jax.jit(owg.value_and_grad(lambda v: (ours.apply(v, X) ** 2).mean()))(in_linen(variables))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, (loss, in_linen(gradients)))

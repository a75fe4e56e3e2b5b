"""`examples/maxtext_fp8.py` in MaxText's own training loop, and its hook in MaxText's own dense layers and pipelines.

It needs Python 3.12. Session `ecosystem` installs it: the groups `maxtext` and `maxtext-alone` of pyproject.toml.
"""

import pytest

REASON = "MaxText is not installed: it needs Python 3.12, and session `ecosystem` installs it"
pytest.importorskip("maxtext.layers.pipeline", reason=REASON, exc_type=ImportError)

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import linen as nn
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.layers import linears, pipeline, quantizations
from maxtext.trainers.pre_train import train

import fp8_jax_owg as owg
from examples import maxtext_fp8
from fp8_jax_owg.nnx import OverwriteWithGradient

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future
SCALING = owg.DelayedScaling(amax_history_length=16)
WIDTH, STAGES = 16, 2


@pytest.fixture
def example(monkeypatch):
    """The example, whose changes of MaxText are taken back."""
    for name in ("dot_general_cls", "einsum"):
        monkeypatch.setattr(quantizations.Fp8Quantization, name, getattr(quantizations.Fp8Quantization, name))
    monkeypatch.setattr(train, "jax", train.jax)
    return maxtext_fp8


class Stage(nnx.Module):
    """A stage with MaxText's dense layer."""

    def __init__(self, quant, rngs):
        self.dense = linears.DenseGeneral(WIDTH, WIDTH, quant=quant, kernel_axes=("embed", "mlp"), rngs=rngs)

    def __call__(self, x, segment_ids=None, positions=None, deterministic=True, model_mode="train"):
        return jnp.tanh(self.dense(x)) * 2 + x, None


def pipeline_of(quant, repeats):
    """Return a loss of (parameters, FP8 state) and input, and both."""
    settings = {"base_emb_dim": WIDTH, "max_target_length": 4, "per_device_batch_size": 4, "quantization": "fp8"}
    settings |= {"ici_pipeline_parallelism": STAGES, "num_pipeline_microbatches": 4, "num_layers_per_pipeline_stage": 1}
    settings |= {"base_num_decoder_layers": STAGES * repeats, "dtype": "float32"}
    quiet = {"enable_checkpointing": False, "log_config": False, "skip_jax_distributed_system": True}
    config = pyconfig.initialize(["", f"{maxtext.__path__[0]}/configs/base.yml"], run_name="test", **settings, **quiet)
    sizes = [STAGES if axis == "stage" else 1 for axis in config.mesh_axes]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:STAGES]).reshape(sizes), config.mesh_axes)
    rules = config.logical_axis_rules
    with mesh, nn.logical_axis_rules(rules):
        model = pipeline.create_nnx_pipeline(config, lambda rngs: Stage(quant, rngs), mesh, rngs=nnx.Rngs(0))
    graph, params, state, rest = nnx.split(model, nnx.Param, OverwriteWithGradient, ...)

    def loss(both, x):
        with mesh, nn.logical_axis_rules(rules):
            y = nnx.merge(graph, *both, rest, copy=True)(x, None, None, True, "train")
        return jnp.square(y).mean()

    x = jax.random.normal(jax.random.key(1), (config.micro_batch_size_to_train_on, 4, WIDTH))
    return loss, (params, state), x


def leaf(state, name):
    """Return the leaf of this name, of all stages."""
    return next(np.asarray(variable[...]) for path, variable in nnx.to_flat_state(state) if path[-1] == name)


@pytest.mark.parametrize("repeats", [1, 2], ids=["plain", "circular"])
def test_a_pipeline_sees_what_its_stages_see_in_turn(repeats, example):
    example.install(SCALING)
    loss, (params, state), x = pipeline_of(quantizations.Fp8Quantization(), repeats)
    _, after = jax.jit(lambda both, x: owg.tree.next_state(both, owg.grad(loss)(both, x)))((params, state), x)
    kernels = leaf(params, "kernel").reshape(-1, WIDTH, WIDTH)
    seen = []
    for kernel in kernels:
        seen.append(np.abs(x).max())
        # scales are 1 in the first step
        y = owg.fp8_einsum("...i,io->...o", x, kernel, meta=owg.init_meta(SCALING), scaling=SCALING)
        x = jnp.tanh(y) * 2 + x
    if repeats > 1:
        # Behind the last round MaxText's first stage runs on, on what the last stage made, and nobody takes its result.
        first_of_last_round = len(kernels) - STAGES
        seen[first_of_last_round] = max(seen[first_of_last_round], np.abs(x).max())
    newest = [leaf(after, f"{name}_amax_history")[..., 0].reshape(-1) for name in ("input", "kernel")]
    np.testing.assert_allclose(newest[0], seen, rtol=1e-6)
    np.testing.assert_array_equal(newest[1], np.abs(kernels).max((1, 2)))


# ---------------------------------------------------------------- the training loop

MODEL = {"base_emb_dim": 32, "base_mlp_dim": 64, "base_num_query_heads": 2, "base_num_kv_heads": 2, "head_dim": 16}
MODEL |= {"base_num_decoder_layers": 2, "vocab_size": 256, "max_target_length": 16, "per_device_batch_size": 4}
RUN = {"run_name": "test", "quantization": "fp8", "steps": 3, "dataset_type": "synthetic", "attention": "dot_product"}
RUN |= {"enable_checkpointing": False, "log_config": False, "skip_jax_distributed_system": True}
RUN |= {"enable_goodput_recording": False}
KINDS = {
    "scanned": {"scan_layers": True},
    "plain": {"scan_layers": False},
    "pipelined": {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 4, "num_layers_per_pipeline_stage": 1},
}


def trained(kind, tmp_path):
    """The scales of the inputs after three steps of MaxText's loop, and those that their histories call for."""
    settings = {**MODEL, **RUN, **KINDS[kind], "base_output_directory": tmp_path}
    arguments = [f"{name}={value}" for name, value in settings.items()]
    with jax.numpy_dtype_promotion("standard"):
        config, recorder = train.initialize(["", f"{maxtext.__path__[0]}/configs/base.yml", *arguments])
        state = nnx.state(train.train_loop(config, recorder).model)
    flat = {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(state) if str(path[-1]).startswith("input_")}
    scales = {path: leaf for path, leaf in flat.items() if path[-1] == "input_scale"}
    # that of the last step comes from what the steps before it have seen
    wanted = [flat[*path[:-1], "input_amax_history"][..., 1:].max(-1, keepdims=True) / 448 for path in scales]
    return np.concatenate([one.ravel() for one in scales.values()]), np.concatenate([one.ravel() for one in wanted])


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_trains_with_the_scales_that_its_histories_call_for(kind, example, tmp_path):
    example.install(SCALING)
    scales, wanted = trained(kind, tmp_path)
    print(f"{kind}: {scales.min():.3g} to {scales.max():.3g}")
    np.testing.assert_allclose(scales, wanted, rtol=1e-6)


def test_the_scales_of_maxtext_itself_grow_in_its_pipeline(tmp_path):
    scales, _ = trained("pipelined", tmp_path)
    print(f"MaxText alone, pipelined: {scales.min():.3g} to {scales.max():.3g}")
    assert (scales > 0.5).all()  # where an amax of 4 calls for 0.009

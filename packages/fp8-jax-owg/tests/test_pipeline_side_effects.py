"""What a stage would change while it runs is refused by name, in both libraries; nothing is lost without a word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from flax import linen as nn

from fp8_common import Fp8UnsupportedError
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from tests.helpers import jax_layers


class Normed(nn.Module):
    fixed: bool = False

    @nn.compact
    def __call__(self, h):
        return nn.BatchNorm(use_running_average=self.fixed)(nn.Dense(4)(h))


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, h):
        self.sow("intermediates", "seen", h)
        return nn.Dense(4)(h)


def linen_pipeline(body, **options):
    model = owg_linen.LayerwiseShardablePipelined(body=body, num_stages=2, num_microbatches=3, **options)
    x = jnp.ones((3, 2, 4))
    return model, jax.jit(model.init)(jax.random.key(0), x), x


@pytest.mark.parametrize("options", [{}, {"circular_repeat": 2}], ids=["plain", "circular"])
def test_batch_statistics_in_linen(options):
    with pytest.raises(Fp8UnsupportedError, match=r"sow, here \['batch_stats'\].*\['mean'\].*Move the layer"):
        linen_pipeline(Normed(), **options)
    model, variables, x = linen_pipeline(Normed(fixed=True), **options)
    normed, after = model.apply(variables, x, mutable=["batch_stats"])
    assert normed.shape == x.shape
    jax.tree.map(np.testing.assert_array_equal, after["batch_stats"], variables["batch_stats"])
    changing = model.clone(body=Normed())
    with pytest.raises(Fp8UnsupportedError, match="batch_stats"):
        changing.apply(variables, x, mutable=["batch_stats"])
    with pytest.raises(errors.ModifyScopeVariableError, match="batch_stats"):
        changing.apply(variables, x)


@pytest.mark.parametrize("mutable", [["intermediates"], True])
def test_sown_values_in_linen(mutable):
    model, variables, x = linen_pipeline(Sowing())
    plain = model.apply({"params": variables["params"]}, x)
    with pytest.raises(Fp8UnsupportedError, match=r"here \['intermediates'\]"):
        model.apply({"params": variables["params"]}, x, mutable=mutable)
    assert plain.shape == x.shape


def test_mutable_collections_that_nothing_changes_are_fine():
    model, variables, x = linen_pipeline(jax_layers.dense(4))
    y, changed = model.apply(variables, x, mutable=["batch_stats", "intermediates"])
    assert not changed
    np.testing.assert_array_equal(y, model.apply(variables, x))


class Stage(nnx.Module):
    def __init__(self, rngs, kind):
        self.fc = jax_layers.linear(4, 4, rngs=rngs)
        self.kind = kind
        self.norm = nnx.BatchNorm(4, rngs=rngs) if kind == "norm" else None
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if kind == "dropout" else None

    def __call__(self, h):
        h = self.fc(h)
        if self.kind == "sow":
            self.sow(nnx.Intermediate, "seen", h)
        return self.norm(h) if self.norm else self.dropout(h) if self.dropout else h


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(("kind", "names"), [("norm", r"norm.*mean"), ("dropout", "dropout.*count"), ("sow", "seen")])
def test_stages_that_change_in_nnx(kind, names):
    pipe = owg_nnx.LayerwiseShardablePipelined(lambda rngs: Stage(rngs, kind), 2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(Fp8UnsupportedError, match=rf"does not keep what its stages change or sow, .*{names}"):
        pipe(jnp.ones((3, 2, 4)))


def test_stages_that_only_read_run_in_nnx():
    pipe = owg_nnx.LayerwiseShardablePipelined(lambda rngs: Stage(rngs, "plain"), 2, 3, rngs=nnx.Rngs(0))
    assert pipe(jnp.ones((3, 2, 4))).shape == (3, 2, 4)

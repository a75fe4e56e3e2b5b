"""What is private in JAX: it is there, one file imports it, and types in `shard_map` keep their axes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import fp8_common.jax
from fp8_common import E4M3, Fp8UnsupportedError
from fp8_common import jax as f8j
from fp8_common.jax import _kernels as kernels
from fp8_common.jax import arrays, casts, compat

SCALE = jnp.float32(3)
OPERATIONS = {
    "amax": f8j.amax,
    "quantize": lambda x: f8j.quantize(x, SCALE, "e4m3"),
    "with amax": lambda x: casts.cast_with_amax(x, SCALE, E4M3),
    "rowwise": lambda x: f8j.quantize_rowwise(x, "e4m3"),
    "128x128": lambda x: f8j.quantize_blockwise(x, "e4m3", (128, 128)),
    "mx": lambda x: f8j.quantize_mx(x, "e4m3"),
}
AXES = ("data", "model")


def sharded(function, given):
    """Return `function` on shards, of which only types are made: no devices are needed."""
    mesh = AbstractMesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=P())


def test_this_jax_has_what_is_needed():
    assert compat.PROBLEM is None, f"{compat.PROBLEM}. Adapt fp8_common/jax/compat.py to this JAX."


def test_one_file_imports_private_names():
    folder = Path(fp8_common.jax.__file__).parent
    assert [path.name for path in folder.rglob("*.py") if "import jax._src" in (text := path.read_text())
            or "from jax._src" in text] == ["compat.py"]  # fmt: skip


@pytest.fixture(params=["kernels", "reference"])
def selected(request, monkeypatch):
    """Both what programs for a GPU hold, and jnp code."""
    monkeypatch.setattr(kernels, "_obstacle", lambda: None if request.param == "kernels" else "none is wanted")


@pytest.mark.usefixtures("selected")
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("spec", [P("data"), P("data", "model")], ids=str)
def test_results_vary_along_the_axes_of_their_operand(name, spec):
    found = []

    def function(x):
        found.extend(jax.tree.leaves(OPERATIONS[name](x)))
        axes = [arrays.varying_axes(leaf) for leaf in found]
        assert axes == [arrays.varying_axes(x)] * len(axes)
        assert all(axis in axes[0] for axis in spec)
        return jnp.float32(0)

    jax.eval_shape(sharded(function, spec), jnp.ones((512, 512)))
    assert found


@pytest.mark.usefixtures("selected")
def test_an_operand_of_its_own_on_each_device_makes_the_result_its_own():
    def function(x, scale):
        codes = f8j.quantize(x, scale[0], "e4m3")
        assert arrays.varying_axes(codes) == {"data"}
        return jnp.float32(0)

    jax.eval_shape(sharded(function, (P(), P("data"))), jnp.ones((8, 256)), jnp.ones(2))


@pytest.mark.usefixtures("selected")
def test_jax_refuses_to_call_the_amax_of_one_shard_that_of_all():
    amax_of_shard = sharded(f8j.amax, P("data"))
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(amax_of_shard, jnp.ones((8, 256)))


def test_types_that_tell_nothing_are_refused_in_shard_map(monkeypatch):
    class Renamed:
        """A type of which a newer JAX has renamed the attribute."""

    assert arrays.varying_axes(jnp.ones(3)) == frozenset()
    monkeypatch.setattr(compat.jax, "typeof", lambda x: Renamed())

    def function(x):
        with pytest.raises(Fp8UnsupportedError, match="cannot run in shard_map"):
            arrays.varying_axes(object())
        return jnp.float32(0)

    jax.eval_shape(sharded(function, P()), jnp.ones(4))


def test_what_is_missing_keeps_kernels_out(monkeypatch):
    monkeypatch.setattr(compat, "PROBLEM", "jax 9 has moved a private name: x")
    monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
    with pytest.raises(Fp8UnsupportedError, match="FP8_COMMON_BACKEND=triton, but jax 9 has moved"):
        kernels.selects_kernels()

"""FP8 products of JAX on a GPU: the numbers of the CPU, and FP8 operands in what XLA compiled.

Each test also runs on a CPU, where it proves its own program and nothing about a GPU.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
from jax_layers import dot, meta_of

SCALINGS = {
    "delayed": owg.DelayedScaling(),
    "tensor": owg.CurrentScaling(),
    "power of 2": owg.CurrentScaling(power_of_2=True),
    "row": owg.CurrentScaling(granularity="row"),
}
SHAPES = [(16, 16, 16), (128, 512, 256), (256, 1024, 512), (100, 64, 32)]
PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def step_on(platform, scaling, shape, dtype):
    """Return the compiled text of a product with its gradients on a platform, and its results as float32."""
    devices = [device for device in jax.devices() if device.platform == platform] or jax.devices(platform)
    m, k, n = shape
    random = np.random.default_rng(0)
    x, kernel, weights = (random.normal(size=size).astype(np.float32) for size in ((m, k), (k, n), (m, n)))

    def loss(x, kernel, weights):
        y = dot(x, kernel, meta_of(scaling), scaling)
        return (y * weights).astype(jnp.float32).sum(), y

    with jax.default_device(devices[0]):
        arguments = [jnp.asarray(array, dtype) for array in (x, kernel, weights)]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True)).lower(*arguments).compile()
        (d_x, d_kernel), y = compiled(*arguments)
    return compiled.as_text(), [np.asarray(array, np.float32) for array in (y, d_x, d_kernel)]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.matrix("each", name=list(SCALINGS), shape=SHAPES, dtype=["bfloat16", "float32"])
def test_matmuls_are_those_of_the_cpu(name, shape, dtype, platform):
    _, results = step_on(platform, SCALINGS[name], shape, dtype)
    _, expected = step_on("cpu", SCALINGS[name], shape, dtype)
    share = 2.0**-7 if dtype == "bfloat16" else 2.0**-9
    for got, want in zip(results, expected, strict=True):
        assert np.abs(got - want).max() <= 2 * share * np.abs(want).max()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCALINGS)
def test_a_gpu_multiplies_codes(name):
    text, _ = step_on("gpu", SCALINGS[name], (128, 512, 256), "bfloat16")
    products = re.findall(r"[^\n]*(?: dot\(|cublas\$lt\$matmul)[^\n]*", text)
    assert products
    assert "f8e4m3fn" in text
    assert "f8e5m2" in text

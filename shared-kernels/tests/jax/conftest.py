"""Eight CPU devices for JAX, so that sharding is tested on every machine."""

import os

import pytest

DEVICES = 8
# XLA reads this when its first array is made, after all tests were collected.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"


@pytest.fixture(scope="session")
def mesh():
    """Eight CPU devices along "data"."""
    import jax

    devices = jax.devices("cpu")
    assert len(devices) == DEVICES, "something used JAX while tests were being collected: make arrays in tests only"
    return jax.make_mesh((DEVICES,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)

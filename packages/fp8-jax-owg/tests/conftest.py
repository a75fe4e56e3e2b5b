"""Decides that JAX sees eight CPU devices and that tests run in both modes."""

import os

import pytest

DEVICES = 8
# XLA reads this when its first array is made, after all tests were collected.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

MODES = ["extended", "fan_out"]


@pytest.fixture(scope="session")
def devices():
    """Eight CPU devices."""
    import jax

    found = jax.devices("cpu")
    assert len(found) == DEVICES, "something used JAX while tests were being collected: make arrays in tests only"
    return found


@pytest.fixture(params=MODES)
def mode(request):
    """Run the test in both modes."""
    from fp8_jax_owg import use_mode

    with use_mode(request.param):
        yield request.param

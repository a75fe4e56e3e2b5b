"""Eight CPU devices for JAX, and results rounded where programs say so."""

import os

import pytest

DEVICES = 8
# XLA reads this when its first array is made, after all tests were collected.
FLAGS = {
    "xla_force_host_platform_device_count": str(DEVICES),
    # bfloat16 results are rounded wherever the program says so, or two programs of one meaning differ in bits
    "xla_allow_excess_precision": "false",
    # these tests compile more than they compute
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
}
for name, value in FLAGS.items():
    if name not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{name}={value}"


@pytest.fixture(scope="session")
def devices():
    """Eight CPU devices."""
    import jax

    found = jax.devices("cpu")
    assert len(found) == DEVICES, "something used JAX while tests were being collected: make arrays in tests only"
    return found

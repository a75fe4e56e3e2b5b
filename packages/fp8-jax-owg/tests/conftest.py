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


TRACED_AS_FOR_GPU = ("test_dots_on_devices", "test_operands")
"""Files whose tests run a second time, traced as on a GPU; under `--full` all are. Lowered for CPUs, kernels are their
jnp code: the numbers must stay."""
CAPABILITY = 90


def pytest_generate_tests(metafunc):
    """Run tests as they are, and traced as on a GPU."""
    if metafunc.definition.get_closest_marker("own_trace") or "aot" in metafunc.definition.path.parts:
        return
    if metafunc.config.getoption("full") or metafunc.module.__name__.endswith(TRACED_AS_FOR_GPU):
        ids = ["as here", "as for a GPU"]
        metafunc.parametrize("_traced_for", [None, CAPABILITY], indirect=True, scope="module", ids=ids)


@pytest.fixture(scope="module", autouse=True)
def _traced_for(request):
    """Select kernels when tracing, without a GPU or Triton; a fixture of the module, which sorts its tests by it."""
    if getattr(request, "param", None) is None:
        yield
        return
    import jax

    from fp8_common.jax import _kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernels, "_obstacle", lambda: None)
        patch.setattr(_kernels, "_gpu_capability", lambda: request.param)
        jax.clear_caches()
        yield
    jax.clear_caches()

"""What JAX is given of a kernel, without a GPU and JAX's CUDA plugin: on a double of jaxlib's Triton support."""

import re
import types

import jax
import jax.numpy as jnp
import pytest

import fp8_common.jax as fp8
from fp8_common.jax import compat
from fp8_common.jax._kernels import lowering_for

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize(("capability", "newest"), [(89, 8.1), (90, 8.1), (100, 8.6)])
def test_xla_can_assemble_what_triton_wrote(monkeypatch, capability, newest):
    """XLA brings a ptxas of its own: that of CUDA 12.8 takes PTX 8.7, while Triton 3.9 writes 9.4 unless told."""
    written = []

    def kernel(name, warps, ctas, shared, ptx, ttir, own_capability):
        written.append(ptx)
        assert own_capability == capability

    double = types.SimpleNamespace(
        TritonKernel=kernel,
        create_array_parameter=lambda *_: None,
        create_scalar_parameter=lambda *_: None,
        TritonKernelCall=lambda *_: types.SimpleNamespace(to_proto=lambda *_: b""),
    )
    monkeypatch.setattr(compat, "gpu_triton", lambda: double)
    with lowering_for(capability):
        cast = jax.jit(lambda x: fp8.quantize_rowwise(x, "e4m3")).trace(jnp.ones((64, 256), jnp.bfloat16))
        assert "triton_kernel_call" in cast.lower(lowering_platforms=("cuda",)).as_text()
    assert written
    for ptx in written:
        assert float(re.search(r"\.version (\S+)", ptx)[1]) <= newest

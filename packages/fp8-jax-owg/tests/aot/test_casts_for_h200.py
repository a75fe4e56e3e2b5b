"""A decoder of width 4096 compiled for an H200, never run: casts, transposes, results, launches, bytes and temporaries.

The decoder is that of `benchmarks.jax_step`. Matmuls go to cuBLASLt, which XLA took when it could time candidates.
"""

import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fp8_jax_owg as owg
import hlo
from benchmarks import jax_step
from fp8_common.jax._kernels import CALL_TARGET, lowering_for

LAYERS, BATCH, TOKENS, WIDTH = 4, 2, 2048, 4096
DOTS = 4
CODES = {"f8e4m3fn", "f8e5m2", "u8"}


@cache
def compiled(remat):
    """The optimized HLO of the gradients, and the bytes of its temporaries."""
    description = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="gpu", target_config=description, topology="1x1x1"
    )
    place = NamedSharding(Mesh(np.array(topology.devices).reshape(1), ("data",)), PartitionSpec())
    model = jax_step.Stack(
        jax_step.Fp8DotGeneralOp, jax_step.Case("decoder", LAYERS, "bfloat16", "remat" if remat else "")
    )
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.bfloat16, sharding=place)
    gradient = owg.grad(lambda variables, x: jnp.square(model.apply(variables, x).astype(jnp.float32)).mean())
    jax.clear_caches()
    with lowering_for(90), jax.numpy_dtype_promotion("standard"):
        variables = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place),
            jax.eval_shape(model.init, jax.random.key(1), x),
        )
        program = jax.jit(gradient).lower(variables, x).compile({"xla_gpu_enable_triton_gemm": False})
    return program.as_text(), program.memory_analysis().temp_size_in_bytes


def bodies(remat=False):
    """The launches of the forward and of the backward loop."""
    found = [one for one in hlo.launches(compiled(remat)[0]) if one.times == LAYERS]
    forward, backward = ([one for one in found if one.body == body] for body in dict.fromkeys(x.body for x in found))
    return forward, backward


def casts(launches):
    return [one for one in launches if one.target == CALL_TARGET]


def test_every_matmul_takes_fp8_and_returns_bfloat16():
    forward, backward = bodies()
    products = [[one.product for one in body if CODES & {*one.product[:2]}] for body in (forward, backward)]
    assert products[0] == [("f8e4m3fn", "f8e4m3fn", "bf16")] * DOTS
    of_lhs, of_rhs = ("f8e5m2", "f8e4m3fn", "bf16"), ("f8e4m3fn", "f8e5m2", "bf16")
    assert sorted(products[1]) == sorted([of_lhs, of_rhs] * DOTS)


def test_each_tensor_is_cast_once_and_no_codes_are_transposed():
    forward, backward = bodies()
    assert (len(casts(forward)), len(casts(backward))) == (2 * DOTS, DOTS)
    for body in (forward, backward):
        assert len({one.operands for one in casts(body)}) == len(casts(body))
        turned = [
            one
            for one in body
            if re.search("transpose|copy", one.name) and {x for x, _ in hlo.arrays(one.shape)} & CODES
        ]
        assert [one.name for one in turned if one not in casts(body)] == []


# launches of both bodies, small ones among them, gigabytes beside matmuls, of temporaries
LIMITS = {False: ((60, 64), (17, 21), 108.5, 13.8), True: ((32, 79), (7, 23), 70.5, 3.0)}


@pytest.mark.parametrize("remat", LIMITS)
def test_launches_bytes_and_temporaries(remat):
    launches, small, beside, temporaries = LIMITS[remat]
    found, every = bodies(remat), list(hlo.launches(compiled(remat)[0]))
    counted = [len(body) for body in found], [sum(one.is_small for one in body) for body in found]
    moved = sum((one.read + one.written) * one.times for one in every if not one.product) / 1e9
    allocated = compiled(remat)[1] / 1e9
    print(
        f"remat {remat}: launches {counted[0]}, small {counted[1]}, {moved:.1f} GB, {allocated:.2f} GB of temporaries"
    )
    assert all(a <= b for a, b in zip(counted[0] + counted[1], launches + small, strict=True))
    assert moved <= beside
    assert allocated <= temporaries


def test_a_forward_that_is_computed_again_writes_no_transpose_of_activations():
    """Under remat the first forward needs activations in one layout, kernels in the other."""
    forward, backward = bodies(remat=True)
    both = [one for one in casts(forward) if sum(dtype in CODES for dtype, _ in hlo.arrays(one.shape)) == 2]
    assert (len(casts(forward)), len(both)) == (2 * DOTS, DOTS)
    assert len(casts(backward)) == 3 * DOTS

"""What XLA makes of a scanned FP8 decoder for H200, beside flax's operation in the same run: launches and collectives.

Compiled ahead of time and never run. A launch is small if its result is below 256 KiB and it reads and writes less than
4 MiB: of those a step has hundreds, and each costs microseconds whatever it computes.
"""

import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fp8_jax_owg as owg
from fp8_common.jax._kernels import lowering_for

SCALING = owg.DelayedScaling(amax_history_length=1024)
WIDTH, TOKENS, LAYERS = 2048, (16, 1024), 4
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "o": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "s16": 2, "f16": 2, "s32": 4, "u32": 4}
BYTES["f32"] = 4
LAUNCHED = {"fusion", "custom-call", "copy", "transpose", "convert", "reduce", "dynamic-slice", "concatenate", "sort"}
LAUNCHED |= {"dynamic-update-slice", "broadcast", "slice", "select", "multiply", "add", "pad", "iota", "compare"}
SMALL_RESULT, SMALL_TRAFFIC = 1 << 18, 1 << 22


def ours(x, w, meta):
    return owg.fp8_dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), meta=meta, scaling=SCALING)


def flax_direct(x, w, meta):
    names = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
    state = {f"{a}_{leaf}": meta[f"{b}_{leaf}"] for a, b in names.items() for leaf in ("scale", "amax_history")}
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return fp8_ops.fp8_scaled_dot_general(x, w, dims, preferred_element_type=x.dtype, **state)


def block(matmul, x, layer):
    w, state = layer
    q, k, v = jnp.split(matmul(x, w["qkv"], state["qkv"]), 3, -1)
    # the output of attention comes transposed, whose cast must not be split
    h = jnp.swapaxes(jnp.swapaxes(jnp.tanh(q * k) * v, 0, 1), 0, 1)
    x = x + matmul(h, w["o"], state["o"])
    return x + matmul(jax.nn.gelu(matmul(x, w["up"], state["up"])), w["down"], state["down"])


def step(who, remat):
    body = partial(block, {"ours": ours, "flax": flax_direct}[who])
    body = jax.checkpoint(body, prevent_cse=False) if remat else body

    def loss(tree, x):
        y = lax.scan(lambda c, layer: (body(c, layer), None), x, (tree["w"], tree["fp8"]))[0]
        return (y.astype(jnp.float32) ** 2).mean()

    return owg.value_and_grad(loss) if who == "ours" else jax.value_and_grad(loss)


@cache
def compiled(who, devices, remat):
    """The optimized HLO of loss and gradients; kernels are sharded over the devices."""
    description = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="gpu", target_config=description, topology=f"1x1x{devices}"
    )
    mesh = Mesh(np.array(topology.devices).reshape(devices), ("data",))

    def like(shape, dtype, *axes):
        axes = axes if devices > 1 else ()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    state = {
        name: {leaf: like((LAYERS, *v.shape), v.dtype) for leaf, v in owg.init_meta(SCALING).items()} for name in SHAPES
    }
    kernels = {name: like((LAYERS, *shape), jnp.bfloat16, None, None, "data") for name, shape in SHAPES.items()}
    x = like((*TOKENS, WIDTH), jnp.bfloat16, "data")
    # flax's operation divides bfloat16 by float32
    with lowering_for(90), jax.numpy_dtype_promotion("standard"):
        return jax.jit(step(who, remat)).lower({"w": kernels, "fp8": state}, x).compile().as_text()


def size(shape):
    found = re.findall(r"(\w+)\[([\d,]*)\]", re.sub(r"/\*.*?\*/", "", shape))
    return sum(BYTES.get(dtype, 0) * int(np.prod([int(n) for n in dims.split(",") if n])) for dtype, dims in found)


def bodies(text):
    """Of each loop's body: small launches, gathers as (dtype, dims), dtypes of reductions above a megabyte."""
    blocks = {}
    for one in re.findall(r"^(?:ENTRY )?%\S+ \(.*?^}", text, re.MULTILINE | re.DOTALL):
        blocks[one.removeprefix("ENTRY ").split()[0].lstrip("%")] = one
    for name in re.findall(r"body=%([\w.\-]+)", text):
        sizes, small = {}, 0
        for line in blocks[name].splitlines()[1:]:
            if (match := re.match(r"\s*(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)", line)) is None:
                continue
            result, shape, operation, operands = match.groups()
            sizes[result] = size(shape)
            if operation in LAUNCHED or operation.endswith("-start"):
                read = sum(sizes.get(one, 0) for one in re.findall(r"%([\w.\-]+)", operands))
                traffic = sizes[result] + (0 if operation == "dynamic-update-slice" else read)
                small += sizes[result] < SMALL_RESULT and traffic < SMALL_TRAFFIC
        gathers = [
            found
            for shape in re.findall(r"= (\(.*?\)|\S+) all-gather(?:-start)?\(", blocks[name])
            for found in re.findall(r"(f8\w+|u8|bf16|f32|s32)\[([\d,]*)\]", shape)
        ]
        reduced = re.findall(r"= (\(.*?\)|\S+) (?:reduce-scatter|all-reduce)(?:-start)?\(", blocks[name])
        yield small, gathers, {shape.strip("(").partition("[")[0] for shape in reduced if size(shape) > 1e6}


# small launches of the bodies, forward and backward
LIMITS = {(1, False): (22, 24), (8, True): (10, 50)}


@pytest.mark.parametrize(("devices", "remat"), LIMITS)
def test_small_launches_of_a_loops_body_are_fewer_than_those_of_flax(devices, remat):
    mine, theirs = ([small for small, _, _ in bodies(compiled(who, devices, remat))] for who in ("ours", "flax"))
    print(f"{devices} devices, remat {remat}: small launches {mine}, flax {theirs}")
    assert all(a <= limit for a, limit in zip(mine, LIMITS[devices, remat], strict=True))
    assert all(a < b for a, b in zip(mine, theirs, strict=True))


def test_each_kernel_is_gathered_once_in_fp8_and_its_gradient_reduced_in_bfloat16():
    mine, theirs = (list(bodies(compiled(who, 8, True))) for who in ("ours", "flax"))
    assert [len(gathers) for _, gathers, _ in mine] == [len(gathers) for _, gathers, _ in theirs]
    assert {dtype for _, gathers, _ in mine for dtype, _ in gathers} == {"f8e4m3fn"}
    assert set.union(*(reduced for _, _, reduced in mine)) == {"bf16"}


def test_the_cast_of_a_transposed_operand_is_not_split_into_integers(monkeypatch):
    monkeypatch.setenv("FP8_COMMON_BACKEND", "reference")
    compiled.cache_clear()
    jax.clear_caches()
    assert re.findall(r"transpose_fusion\S* = \(?s32", compiled("ours", 1, False)) == []

"""Runs every operation with a kernel on arrays that are sharded over eight CPU devices, against unsharded ones.

Data may move between devices only where a block of 128 or 32 elements would otherwise be cut.
"""

import math
import os
import re

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_kernel_ops import OPERATIONS, assert_equal

ROWS, COLUMNS, BOTH, ALL_ROWS, ALL_COLUMNS = (
    ("a", None),
    (None, "b"),
    ("a", "b"),
    (("a", "b"), None),
    (None, ("a", "b")),
)
SHARDINGS = (ROWS, COLUMNS, BOTH, ALL_ROWS, ALL_COLUMNS)
# Shards of whole blocks, and shards that cut blocks: 512 = 4 * 128 columns over 8 devices, 192 rows over 2.
ALIGNED, CUTTING = (256, 1024), (192, 512)
CUTS = {
    (ALIGNED, "128x128"): {ALL_ROWS},
    (CUTTING, "128x128"): {ROWS, BOTH, ALL_ROWS, ALL_COLUMNS},
    (CUTTING, "1x128"): {ALL_COLUMNS},
}
MOVE = re.compile(r"= \(?\w+\[([\d,]*)\].*? (?:all-gather|all-to-all|collective-permute)\(")


def largest_move(text):
    """The most elements that a collective other than a reduction hands over; scales may, data may not."""
    return max((math.prod(map(int, dims.split(","))) for dims in MOVE.findall(text) if dims), default=0)


mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
checked = 0
for shape in (ALIGNED, CUTTING):
    x = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    for sharding in SHARDINGS:
        sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*sharding)))
        for name, (operation, definition) in OPERATIONS.items():
            compiled = jax.jit(operation).lower(sharded).compile()
            results = compiled(sharded)
            assert_equal(results, definition(x))
            cuts = sharding in CUTS.get((shape, name), ())
            moved = largest_move(compiled.as_text())
            assert cuts == (moved > x.size // 32), f"{name} of {shape} as {sharding} moves {moved} elements"
            data = jax.tree.leaves(results)[0]
            assert cuts or name == "amax" or not data.sharding.is_fully_replicated, f"{name} replicates {sharding}"
            checked += 1

x = np.random.default_rng(7).normal(size=ALIGNED).astype(np.float32)
spec = PartitionSpec(*ROWS)
for name in ("mx", "rowwise", "quantize"):
    operation, definition = OPERATIONS[name]
    assert_equal(jax.jit(jax.shard_map(operation, mesh=mesh, in_specs=spec, out_specs=spec))(x), definition(x))
print("checked", checked)

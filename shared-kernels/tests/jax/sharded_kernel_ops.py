"""Runs every operation with a kernel on arrays that are sharded over four CPU devices, against unsharded ones."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_kernel_ops import OPERATIONS, X, assert_equal

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
checked = 0
for spec in (PartitionSpec("a", "b"), PartitionSpec(None, "b"), PartitionSpec(("a", "b"), None)):
    sharded = jax.device_put(X, NamedSharding(mesh, spec))
    for name, (operation, definition) in OPERATIONS.items():
        compiled = jax.jit(operation).lower(sharded).compile()
        assert_equal(compiled(sharded), definition(X))
        moved = [word for word in ("all-gather", "all-to-all") if word in compiled.as_text()]
        rows_stay = spec[1] is None and name not in ("transposed", "128x128")
        assert not (rows_stay and moved), f"{name} moves data between devices: {moved}"
        checked += 1
print("checked", checked)

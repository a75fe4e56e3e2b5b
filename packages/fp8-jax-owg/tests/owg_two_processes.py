"""One of two JAX processes, for test_owg_processes.py: a pipelined step over both, printed by the first.

python owg_two_processes.py RANK PORT
"""

import functools
import json
import sys

import jax


def main(rank: int, port: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank, initialization_timeout=120)

    import numpy as np
    from flax import linen as nn
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import fp8_jax_owg as owg
    from fp8_jax_owg import linen as owg_linen

    class Stage(nn.Module):
        @nn.compact
        def __call__(self, h):
            scaling = owg.DelayedScaling(amax_history_length=3)
            op = functools.partial(owg_linen.Fp8DotGeneralOp, scaling=scaling)
            return nn.Dense(8, use_bias=False, dot_general_cls=op, name="fc")(h)

    model = owg_linen.LayerwiseShardablePipelined(body=Stage(), num_stages=2, num_microbatches=3)
    x = np.random.default_rng(0).integers(-4, 5, (3, 8, 8)).astype(np.float32)
    variables = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0), x))
    variables["params"]["body"]["fc"]["kernel"] = np.random.default_rng(1).integers(-2, 3, (2, 8, 8)).astype(np.float32)

    def step(variables, x):
        return owg.grad(lambda v: (model.apply(v, x) ** 2).sum() / x.size)(variables)

    with jax.default_device(jax.local_devices()[0]):
        alone = jax.tree.map(np.asarray, jax.jit(step)(variables, x))

    equal = {}
    for axis in ("stage", "data"):
        mesh = jax.make_mesh((2,), (axis,), (jax.sharding.AxisType.Auto,), devices=jax.devices())

        def place(a, spec, mesh=mesh):
            return jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda index: a[index])

        placed = jax.tree.map(lambda a: place(a, P("stage") if axis == "stage" else P()), variables)  # noqa: B023
        spread = place(x, P() if axis == "stage" else P(None, "data"))
        gather = jax.jit(step, out_shardings=NamedSharding(mesh, P()))
        several = jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), gather(placed, spread))
        equal[axis] = bool(
            jax.tree.reduce(lambda a, b: a and b, jax.tree.map(lambda a, b: bool((a == b).all()), alone, several))
        )

    # a gradient inside shard_map, combined by pmean over both processes
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices())

    def shard(variables, x):
        return owg.pmean(owg.grad(lambda v: (model.apply(v, x) ** 2).sum())(variables), "data")

    run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P(), check_vma=False)
    placed = jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, NamedSharding(mesh, P()), lambda i: a[i]), variables
    )
    spread = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(None, "data")), lambda i: x[i])
    found = jax.jit(run)(placed, spread)["_overwrite_with_gradient"]["body"]["fc"]["Fp8DotGeneralOp_0"]
    seen = np.asarray(found["input_amax_history"].addressable_data(0))[0, 0]
    if rank == 0:
        print(json.dumps({"equal": equal, "seen": float(seen), "wanted": float(np.abs(x).max())}))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

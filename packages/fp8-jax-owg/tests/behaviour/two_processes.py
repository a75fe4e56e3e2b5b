"""One of two JAX processes with two devices each, for test_two_processes.py: the first prints what it found.

python two_processes.py RANK PORT
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

T = jax.tree.map
DIMS = (((1,), (0,)), ((), ()))


def put(tree, mesh, *spec):
    """Arrays that are the same in both processes, on a mesh over both."""
    sharding = NamedSharding(mesh, P(*spec))
    return T(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), tree)


def trained(owg, mesh):
    """Whether steps on a batch over both processes equal that of one device, by `psum` and by the compiler."""
    tree = {"w": np.random.default_rng(1).integers(-2, 3, (16, 8)).astype(np.float32), "fp8": owg.init_meta()}
    x = np.random.default_rng(0).integers(-4, 5, (8, 16)).astype(np.float32)

    def step(tree, x):
        return owg.grad(lambda t: (owg.fp8_dot_general(x, t["w"], DIMS, meta=t["fp8"]) ** 2).sum())(tree)

    specs = (P(), P("fsdp"))
    shard = jax.shard_map(
        lambda *a: owg.psum(step(*a), "fsdp"), mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
    )
    arguments = put(T(np.asarray, tree), mesh), put(x, mesh, "fsdp")
    with jax.default_device(jax.local_devices()[0]):
        alone = T(np.asarray, jax.jit(step)(tree, x))
    several = [jax.jit(run, out_shardings=NamedSharding(mesh, P()))(*arguments) for run in (shard, step)]
    same = [T(lambda a, b: bool((a == np.asarray(b.addressable_data(0))).all()), alone, one) for one in several]
    return {"step": all(jax.tree.leaves(same))}


def gathered(owg, common, mesh):
    """A kernel that is gathered in FP8 over both processes, checked against the NumPy definition."""
    random = np.random.default_rng(0)
    w, x = random.normal(size=(16, 8)).astype(np.float32), random.normal(size=(4, 16)).astype(np.float32)
    w[-1, -1] = 21  # on the other process than rank 0
    sharding, everywhere = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    kernel, inputs = put(w, mesh, "fsdp"), put(x, mesh)

    def loss(w, x, gather):
        return (owg.fp8_dot_general(x, gather(w), DIMS) ** 2).sum()

    def on_shards(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x, lambda w: owg.fp8_all_gather(w, "fsdp"))
        return value, gradient / mesh.size  # every device added the same

    specs = P("fsdp"), P()
    mapped = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=specs[::-1], check_vma=False)
    automatic = jax.value_and_grad(lambda w, x: loss(w, x, lambda w: owg.fp8_all_gather(w, sharding=sharding)))
    wanted, gradient = jax.value_and_grad(loss)(w, x, lambda w: w)
    for step in (mapped, automatic):
        run = jax.jit(step, out_shardings=(everywhere, sharding)).lower(kernel, inputs).compile()
        owg.testing.assert_fp8_collectives(run)
        value, found = run(kernel, inputs)
        np.testing.assert_allclose(np.asarray(value), wanted, rtol=1e-5)
        for shard in found.addressable_shards:
            np.testing.assert_allclose(shard.data, gradient[shard.index], rtol=1e-4, atol=1e-3)
    gather = jax.jit(lambda w: owg.fp8_all_gather(w, sharding=sharding).data, out_shardings=everywhere)
    codes = np.asarray(gather(kernel).addressable_shards[0].data).view(np.uint8)
    return {"codes": bool((codes == common.quantize(w, common.amax_to_scale(np.float32(21), "e4m3"), "e4m3")).all())}


def main(rank, port):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank, initialization_timeout=120)
    import fp8_common
    import fp8_jax_owg as owg

    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    assert mesh.size == 4, mesh
    print(json.dumps(trained(owg, mesh) | gathered(owg, fp8_common, mesh)))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

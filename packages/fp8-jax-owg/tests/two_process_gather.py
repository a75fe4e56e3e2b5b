"""One of two processes: gathers a kernel in FP8 over both, and checks it against the NumPy definition.

python two_process_gather.py RANK PORT
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main() -> None:
    rank, port = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=120)
    import fp8_common
    from fp8_jax_owg import assert_fp8_collectives, fp8_all_gather, fp8_dot_general

    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    assert mesh.size == 4, mesh
    random = np.random.default_rng(0)
    w, x = random.normal(size=(16, 8)).astype(np.float32), random.normal(size=(4, 16)).astype(np.float32)
    w[-1, -1] = 21  # on the other process than rank 0
    sharding, everywhere = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("fsdp",), ()))
    kernel = jax.make_array_from_callback(w.shape, sharding, lambda index: w[index])
    inputs = jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index])

    def loss(w, x, gather):
        return (fp8_dot_general(x, gather(w), (((1,), (0,)), ((), ()))) ** 2).sum()

    def on_shards(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x, lambda w: fp8_all_gather(w, "fsdp"))
        return value, gradient / mesh.size  # every device added the same

    specs = (PartitionSpec("fsdp"), PartitionSpec())
    mapped = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=specs[::-1], check_vma=False)
    automatic = jax.value_and_grad(lambda w, x: loss(w, x, lambda w: fp8_all_gather(w, sharding=sharding)))
    scale = fp8_common.amax_to_scale(np.float32(21), "e4m3")
    expected = fp8_common.quantize(w, scale, "e4m3")
    wanted, gradient = jax.value_and_grad(lambda w: (fp8_dot_general(x, w, (((1,), (0,)), ((), ()))) ** 2).sum())(w)
    for step in (mapped, automatic):
        run = jax.jit(step, out_shardings=(everywhere, sharding))
        assert_fp8_collectives(run.lower(kernel, inputs).compile())
        value, found = run(kernel, inputs)
        np.testing.assert_allclose(np.asarray(value), wanted, rtol=1e-5)
        for shard in found.addressable_shards:
            np.testing.assert_allclose(shard.data, gradient[shard.index], rtol=1e-4, atol=1e-3)
    gather = jax.jit(lambda w: fp8_all_gather(w, sharding=sharding).data, out_shardings=everywhere)
    codes = np.asarray(gather(kernel).addressable_shards[0].data).view(np.uint8)
    np.testing.assert_array_equal(codes, expected)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

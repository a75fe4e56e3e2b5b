"""On a GPU: every test of the interpreter again, every 16-bit value, CUDA graphs, and launches from JAX."""

import importlib.util

import numpy as np
import pytest

import fp8_common as f8
from fp8_common.testing import adversarial, all_bfloat16, all_float16, assert_same_bits

pytestmark = pytest.mark.gpu

if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
    import torch

    import kernel_inputs as inputs
    from fp8_common.presets import te_delayed
    from fp8_common.torch import casts, delayed, foreach
    from tests.helpers.gpu import graph_of

    globals().update(inputs.kernel_tests("test_*kernels.py"))

    @pytest.fixture(autouse=True)
    def kernels_on_gpu(monkeypatch):
        monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
        # for these tests alone: what the interpreter runs in the same process stays on the CPU
        monkeypatch.setattr(inputs, "DEVICE", "cuda")

    @pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
    @pytest.mark.parametrize("scale", [1.0, 0.7, 448.0, 2.0**100, 2.0**-126])
    def test_adversarial_inputs_at_many_scales(fmt, scale):
        for values in (all_bfloat16(), all_float16(), adversarial(fmt), adversarial(fmt, np.float32, scale)):
            got = casts.quantize(inputs.tensor(values), inputs.number(scale), f8.formats.get_format(fmt))
            assert_same_bits(got, f8.quantize(values, np.float32(scale), fmt), fmt=fmt, source=values)

    @pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
    def test_random_float32_patterns(fmt):
        bits = np.random.default_rng(0).integers(0, 2**32, size=1 << 24, dtype=np.uint32).view(np.float32)
        got = casts.quantize(inputs.tensor(bits), inputs.number(1), f8.formats.get_format(fmt))
        assert_same_bits(got, f8.quantize(bits, np.float32(1), fmt), fmt=fmt, source=bits)

    def test_more_than_two_to_the_31_elements():
        x = torch.ones((1 << 31) + 7, dtype=torch.bfloat16, device="cuda")
        x[-1] = -500
        assert casts.amax(x).item() == 500
        data = casts.quantize(x, inputs.number(2), f8.E4M3)
        assert data[-2:].float().tolist() == [2.0, -448.0]

    def test_cuda_graphs_replay_on_new_data():
        x = inputs.tensor(inputs.calm((256, 512), "bfloat16"))
        shards = [inputs.tensor(inputs.calm((n,), "bfloat16")) for n in (0, 5, 70000)]
        history, scale = torch.zeros(4, 3, device="cuda"), torch.ones(3, device="cuda")
        fmax, results = torch.full((3,), 448.0, device="cuda"), {}

        def work():
            made = casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL)
            results["data"], results["scale"] = made.codes, made.scale
            results["mx"], results["codes"] = casts.quantize_mx(x, f8.E4M3, "rceil")
            results["keys"] = foreach.amax_bits(shards)
            results["parts"] = foreach.quantize(shards, torch.ones(3, device="cuda"), f8.E4M3)
            amax = results["keys"].view(torch.float32)
            results["history"], results["next"], _ = delayed.update_by_kernel(history, amax, scale, fmax, te_delayed())

        graph = graph_of(work)
        for factor in (3.0, 0.1):
            x.mul_(factor)
            shards[2].mul_(factor)
            graph.replay()
            values = x.cpu().float().numpy()
            want = f8.amax_to_scale(f8.amax(values), "e4m3")
            assert_same_bits(results["scale"], want)
            assert_same_bits(results["data"], f8.quantize(values, want, "e4m3"), fmt="e4m3")
            assert_same_bits(results["mx"], f8.quantize_mx(values, "e4m3").data, fmt="e4m3")
            largest = f8.amax(shards[2].cpu().float().numpy())
            assert_same_bits(results["keys"].view(torch.float32)[2], largest)
            assert_same_bits(
                results["parts"][2], f8.quantize(shards[2].cpu().float().numpy(), np.float32(1), "e4m3"), fmt="e4m3"
            )
            assert_same_bits(results["next"][2], f8.amax_to_scale(largest, "e4m3", te_delayed()))

    def test_operators_under_torch_compile_have_the_same_bits():
        from fp8_common import torch as f8t

        x = inputs.tensor(inputs.calm((256, 512), "bfloat16"))
        compiled = torch.compile(lambda x: f8t.quantize_mx(x * 2, "e4m3"), fullgraph=True)
        assert_same_bits(compiled(x).data, f8t.quantize_mx(x * 2, "e4m3").data)

    def test_two_hundred_shards_take_at_most_two_launches():
        shards = [torch.randn(1000 + i, device="cuda") for i in range(200)]
        foreach.amax_bits(shards)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            foreach.amax_bits(shards)
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if "amax" in event.name or "fill" in event.name.lower()]
        assert 0 < len(kernels) <= 2


if importlib.util.find_spec("jax") and importlib.util.find_spec("triton"):
    import jax
    import jax.numpy as jnp

    import fp8_common.jax as f8j
    from fp8_common.jax import casts as jax_casts

    @pytest.fixture
    def gpu_of_jax():
        if not any(device.platform == "gpu" for device in jax.devices()):
            pytest.skip("this JAX sees no GPU")

    @pytest.mark.usefixtures("gpu_of_jax")
    def test_jax_launches_the_kernels(monkeypatch):
        monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
        x = np.random.default_rng(0).normal(size=(300, 544)).astype(np.float32)
        for fmt in ("e4m3", "e5m2"):
            want = f8.amax_to_scale(f8.amax(x), fmt)
            both = jax.jit(lambda a, f=fmt, s=want: jax_casts.cast_with_amax(a, s, f8.formats.get_format(f)))(
                jnp.asarray(x)
            )
            assert_same_bits(np.asarray(both[0]), f8.quantize(x, want, fmt), fmt=fmt)
            assert_same_bits(np.asarray(both[1]), f8.amax(x))
            for operation, definition in (
                (f8j.quantize_rowwise, f8.quantize_rowwise),
                (f8j.quantize_blockwise, f8.quantize_blockwise),
                (f8j.quantize_mx, f8.quantize_mx),
            ):
                got = jax.jit(lambda a, f=fmt, o=operation: o(a, f))(jnp.asarray(x))
                assert_same_bits(np.asarray(got.data), definition(x, fmt).data, fmt=fmt)

    @pytest.mark.usefixtures("gpu_of_jax")
    def test_the_conversion_of_the_gpu_rounds_as_the_definition_does(monkeypatch):
        monkeypatch.setenv("FP8_COMMON_BACKEND", "reference")
        for fmt in (f8.E4M3, f8.E5M2):
            for scale in np.float32([2**-20, 1 / 3, 1, 7.5, 2**40]):
                codes = jax.jit(lambda x, s, f=fmt: jax_casts.cast(x, s, f))(jnp.asarray(all_bfloat16()), scale)
                assert_same_bits(np.asarray(codes), f8.quantize(all_bfloat16(), scale, fmt), fmt=fmt)

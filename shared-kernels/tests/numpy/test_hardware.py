"""The FP8 paths of a device, from facts alone."""

import pytest

from fp8_common import Fp8Error
from fp8_common import _env as env
from fp8_common.hardware import Device, cast_path, matmul_path, native_formats
from fp8_common.recipe import GRANULARITIES

CPU = Device(kind="cpu", name="a processor")
OCP, FNUZ = ("e4m3", "e5m2"), ("e4m3fnuz", "e5m2fnuz")


def nvidia(major, minor, cuda=(13, 0)):
    return Device(kind="nvidia", name=f"GPU {major}.{minor}", capability=(major, minor), cuda=cuda)


def amd(arch):
    return Device(kind="amd", name="GPU", arch=arch)


NATIVE = [
    ("sm_80", nvidia(8, 0), (), ()),
    ("sm_86", nvidia(8, 6), (), ()),
    ("sm_89", nvidia(8, 9), OCP, ("tensorwise", "rowwise")),
    ("sm_90", nvidia(9, 0), OCP, ("tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128")),
    ("sm_100", nvidia(10, 0), OCP, ("tensorwise", "rowwise", "mx")),
    ("sm_120", nvidia(12, 0), OCP, ("tensorwise", "rowwise")),
    ("gfx90a", amd("gfx90a"), (), ()),
    ("gfx942", amd("gfx942"), FNUZ, ()),
    ("gfx950", amd("gfx950"), OCP, ()),
    ("gfx1201", amd("gfx1201"), OCP, ()),
    ("cpu", CPU, (), ()),
    ("tpu", Device(kind="tpu", name="TPU"), (), ()),
]


@pytest.mark.parametrize(("label", "device", "formats", "granularities"), NATIVE, ids=[row[0] for row in NATIVE])
def test_native_formats_of_each_device(label, device, formats, granularities):
    assert device.label == label
    assert native_formats(device) == formats
    paths = [matmul_path(device, granularity) for granularity in GRANULARITIES]
    assert [path.name for path in paths] == list(GRANULARITIES)
    for path in paths:
        assert path.status == ("native" if path.name in granularities else "emulated")
        assert label in path.why
        assert path.why.endswith(".")


@pytest.mark.parametrize("kind", ["nvidia", "amd"])
def test_unknown_capabilities_promise_nothing(kind):
    assert native_formats(Device(kind=kind, name="GPU")) == ()


@pytest.mark.parametrize(
    ("device", "native", "why"),
    [
        (nvidia(9, 0, (12, 9)), True, "cuBLAS of CUDA 12.9 applies"),
        (nvidia(9, 0, (12, 8)), False, "from torch with CUDA 12.9 on, and this is CUDA 12.8."),
        (nvidia(9, 0, None), False, "this is another framework than torch."),
    ],
)
def test_matmuls_with_scales_of_blocks_need_their_cublas(device, native, why):
    path = matmul_path(device, "blockwise_1x128")
    assert (path.status == "native") is native
    assert why in path.why


@pytest.mark.parametrize(
    ("device", "backend", "triton", "status", "why"),
    [
        (nvidia(9, 0), "auto", "3.6.0", "native", "Triton 3.6.0 kernels run on sm_90."),
        (nvidia(9, 0), "triton", "3.6.0", "native", "Triton 3.6.0"),
        (nvidia(9, 0), "reference", "3.6.0", "reference", "FP8_COMMON_BACKEND=reference is set."),
        (nvidia(9, 0), "auto", None, "reference", "Triton is not installed."),
        (nvidia(8, 0), "auto", "3.6.0", "reference", "This device, sm_80, has no FP8 conversion instructions."),
        (nvidia(8, 0), "triton", "3.6.0", "unavailable", "FP8_COMMON_BACKEND=triton, but this device"),
        (CPU, "auto", "3.6.0", "reference", "Triton kernels need an NVIDIA GPU, and this is cpu."),
        (CPU, "triton", None, "unavailable", "need an NVIDIA GPU"),
        (amd("gfx942"), "auto", "3.6.0", "reference", "Triton kernels need an NVIDIA GPU, and this is gfx942."),
        (amd("gfx950"), "triton", "3.6.0", "unavailable", "need an NVIDIA GPU, and this is gfx950"),
    ],
)
def test_how_casts_run(device, backend, triton, status, why):
    path = cast_path(device, backend=backend, triton=triton)
    assert (path.name, path.status) == ("cast", status)
    assert why in path.why


def test_the_backend_variable():
    for value in ("auto", "triton", "reference"):
        assert env.backend({"FP8_COMMON_BACKEND": value}) == value
    assert env.backend({"FP8_COMMON_BACKEND": ""}) == env.backend({}) == "auto"
    with pytest.raises(Fp8Error, match="must be one of auto, triton, reference, got 'Triton'"):
        env.backend({"FP8_COMMON_BACKEND": "Triton"})

"""What each GPU multiplies and which casts are fused for it, by its compute capability and the CUDA of torch."""

import pytest
import torch

from fp8_common._machine import parse_version
from fp8_common.hardware import Device, matmul_path
from fp8_common.torch import _triton
from fp8_common.torch_layers.linear import grouped_matmul, matmul
from fp8_common.torch_layers.linear.config import LinearConfig

# capability, CUDA, ROCm: FP8 products, those of groups, with scales of blocks, with MX scales, fused casts
DEVICES = [
    ((7, 5), "12.9", None, False, "", False, False, False),
    ((8, 0), "12.9", None, False, "bfloat16", False, False, False),
    # Triton converts through float16 there: 0.28 % of E4M3 codes would be others
    ((8, 9), "12.9", None, True, "bfloat16", False, False, False),
    ((9, 0), None, None, True, "fp8", False, False, True),
    ((9, 0), "12.8", None, True, "fp8", False, False, True),
    ((9, 0), "12.9", None, True, "fp8", True, False, True),
    ((9, 0), "13.0", None, True, "fp8", True, False, True),
    ((10, 0), None, None, True, "bfloat16", False, False, True),
    ((10, 0), "12.6", None, True, "bfloat16", False, False, True),
    ((10, 0), "12.8", None, True, "bfloat16", False, True, True),
    ((10, 3), "13.0", None, True, "bfloat16", False, True, True),
    ((12, 0), "13.0", None, True, "bfloat16", False, False, True),
    ((9, 0), None, "6.4", False, "", False, False, None),
]


@pytest.mark.parametrize(("capability", "cuda", "hip", "fp8", "groups", "blocks", "mx", "fused"), DEVICES)
def test_capabilities_of_gpus(monkeypatch, capability, cuda, hip, fp8, groups, blocks, mx, fused):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(matmul, "_look_up", matmul._look_up.__wrapped__)  # without what earlier tests asked
    gpu = torch.device("cuda", 0)
    assert matmul.should_emulate(gpu, LinearConfig().emulate) is not fp8
    assert grouped_matmul.device_multiplies(gpu) == groups
    for scales_of, native in (("blockwise_1x128", blocks), ("mx", mx)):
        assert matmul.multiplies_scaled_blocks(gpu, scales_of == "mx") is native
        if hip is None:
            device = Device(kind="nvidia", name="GPU", capability=capability, cuda=parse_version(cuda))
            assert (matmul_path(device, scales_of).status == "native") is native, "fp8 doctor says what is done"
    assert fused is None or _triton.rounds_once("cuda", 0) is fused


def test_a_cpu_has_none_of_it():
    cpu = torch.device("cpu")
    assert matmul.should_emulate(cpu, "auto")
    assert grouped_matmul.device_multiplies(cpu) == ""
    assert not matmul.multiplies_scaled_blocks(cpu, mx=True)
    assert not _triton.rounds_once("cpu", None)

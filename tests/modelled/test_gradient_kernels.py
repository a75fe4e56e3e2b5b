"""What a compressed reduction moves on a GPU, by the model of `benchmarks.modelled`: no more than 1.15 of the least."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.modelled.prices import GPUS, seconds
from benchmarks.modelled.record import Step, recording
from fp8_common import E4M3
from fp8_common.torch_layers.sharding.gradient_messages import pack_gradients, sum_gradients

RANKS, COLUMNS = 8, 4096 * 1024
SENT = RANKS * (COLUMNS + 4 * COLUMNS // 128)
ALLOWED = 1.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("random", [None, (1, 0)], ids=["nearest", "stochastic"])
def test_each_direction_is_one_launch_of_nearly_the_least_bytes(dtype, random):
    step = Step()
    with FakeTensorMode(), recording(step):
        values = torch.empty(RANKS, COLUMNS, dtype=dtype)
        message = pack_gradients(values, values[:, :0], E4M3, random)
        sum_gradients(message, (COLUMNS, 0), dtype, E4M3, RANKS)
    packing, *rest = step.kernels
    (adding,) = [kernel for kernel in rest if kernel.bytes]
    assert (packing.name, adding.name) == ("fp8_common pack_gradients", "fp8_common sum_gradients")
    least = values.nbytes + SENT, SENT + 4 * COLUMNS
    for kernel, nbytes in zip((packing, adding), least, strict=True):
        assert nbytes <= kernel.bytes <= ALLOWED * nbytes, kernel
    device = GPUS["H100"]
    assert seconds(step, device, "compiled") <= ALLOWED * sum(least) / device.bandwidth

"""What becomes of a scale that the device knows to be stale."""

import pytest
import torch

from fp8_torch_fsdp.scales.stale import nan_if_stale


class ScaleOnAGpu(torch.Tensor):
    """A scale on a CPU that says it is on a GPU."""

    device = torch.device("cuda")


def test_on_a_cpu_it_raises():
    scale = torch.ones(3)
    assert nan_if_stale(scale, torch.tensor(False), "stale") is scale
    with pytest.raises(RuntimeError, match="stale"):
        nan_if_stale(scale, torch.tensor(True), "stale")


def test_elsewhere_it_is_nan_because_an_assertion_would_end_the_process():
    scale = torch.tensor([1.0, 2.0]).as_subclass(ScaleOnAGpu)
    assert nan_if_stale(scale, torch.tensor(False), "stale").tolist() == [1.0, 2.0]
    assert nan_if_stale(scale, torch.tensor(True), "stale").isnan().all()

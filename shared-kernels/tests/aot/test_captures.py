"""Launches while a CUDA graph is captured, with Triton's own launcher and a driver that has no GPU."""

import pytest
import torch
from triton.runtime.driver import driver

import fp8_common as f8
from fp8_common import Fp8UnsupportedError
from fp8_common.presets import te_delayed
from fp8_common.torch import _triton, casts, delayed, foreach
from tests.helpers.triton_driver import Driver, unload

SENTENCE = "Run a training step with the same shapes and parameters before the capture."


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors are launched on as if they were on an H100, whose stream is captured while `capturing` is set."""
    made, run = Driver(), _triton.run
    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(_triton, "_obstacle", lambda device: None)
    monkeypatch.setattr(_triton, "run", lambda plan, device, **x: run(plan, torch.device("cuda"), **x))
    monkeypatch.setattr(_triton, "current_device", lambda: None)
    monkeypatch.setattr(_triton, "is_capturing", lambda device: made.capturing)
    unload()
    yield made
    unload()


def cast(x):
    return casts.quantize(x, torch.tensor(2.0), f8.E4M3)


def refused(work):
    with pytest.raises(Fp8UnsupportedError) as caught:
        work()
    assert str(caught.value).endswith(SENTENCE)
    return str(caught.value)


def test_a_kernel_is_loaded_before_a_capture_and_not_in_one(gpu):
    x = torch.randn(64)
    gpu.capturing = True
    assert refused(lambda: cast(x)).startswith("The kernel cast cannot be made while a CUDA graph is being captured.")
    gpu.capturing = False
    cast(x)  # what was refused can be launched later
    gpu.capturing = True
    cast(torch.randn(640))
    refused(lambda: cast(x.bfloat16()))
    assert len(gpu.loaded) == 1
    assert len(gpu.launched) == 2


def test_a_capture_takes_the_tables_of_a_step_and_keeps_them(gpu):
    shards, scales = [torch.randn(70), torch.randn(33)], torch.ones(2)
    foreach.quantize(shards, scales, f8.E4M3)
    gpu.capturing = True
    first = foreach.quantize(shards, scales, f8.E4M3)
    foreach._cached.cache_clear()  # as many other tables would
    again = foreach.quantize(shards, scales, f8.E4M3)
    assert first[0].data_ptr() != again[0].data_ptr()
    assert len(gpu.launched) == 3
    assert "table" in refused(lambda: foreach.quantize([x.clone() for x in shards], scales, f8.E4M3))


def test_a_capture_takes_the_formats_of_a_step(gpu):
    history, scale = torch.zeros(4, 2), torch.ones(2)
    bits, recipes = torch.ones(2, dtype=torch.int32), [f8.CastRecipe(scaling="delayed", policy=te_delayed())] * 2

    def roll():
        delayed.roll_histories(history, bits, scale, recipes)

    roll()
    gpu.capturing = True
    roll()
    delayed._numerators.cache_clear()
    assert "formats" in refused(roll)
    assert len(gpu.launched) == 2

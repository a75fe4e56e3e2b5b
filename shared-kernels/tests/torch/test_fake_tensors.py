"""Fake tensors pass through every cast and leave nothing in caches; neither does a default device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8_common as f8
from fp8_common.testing import assert_same_bits
from fp8_common.torch import casts, decoding, delayed
from fp8_common.torch.compat import FakeTensor
from fp8_common.torch.rounding import pairs_table, values_table

ROWS, COLUMNS = 8, 128


def parts_of(made):
    return made.codes, made.scale, made.scale_inv


def given(device):
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32, device=device).view(ROWS, COLUMNS)


def codes(device):
    return torch.arange(ROWS, dtype=torch.uint8, device=device)


def two(device):
    return torch.full((), 2.0, device=device)


def update(device):
    some = torch.ones(2, device=device)
    window = torch.ones(3, 2, device=device)
    return delayed.delayed_update(window, some, some, "e4m3,e5m2", f8.presets.te_delayed())


CALLS = {
    "amax": lambda d: casts.amax(given(d)),
    "quantize": lambda d: casts.quantize(given(d), two(d), f8.E4M3),
    "tensorwise": lambda d: parts_of(casts.quantize_dynamic(given(d), f8.E4M3, f8.CANONICAL)),
    "folded": lambda d: parts_of(casts.quantize_dynamic(given(d), f8.E4M3, f8.CANONICAL, (1, 0), fold=given(d)[0])),
    "values": lambda d: decoding.values(codes(d), f8.E4M3),
    "values in bfloat16": lambda d: decoding.values(codes(d), f8.E5M2, torch.bfloat16),
    "dequantize": lambda d: decoding.dequantize(codes(d), two(d), f8.E4M3, torch.float16),
    "delayed update": update,
}


def outputs(name, tables):
    """Call after the tables are made, or after they are forgotten."""
    if tables == "none yet":
        for kept in (values_table, pairs_table, delayed._has_format, delayed._numerators):
            kept.cache_clear()
    found = CALLS[name]("cpu")
    return found if isinstance(found, tuple | list) else (found,)


@pytest.mark.parametrize("tables", ["none yet", "kept"])
@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_have_the_shapes_of_real_ones_and_leave_nothing_behind(name, tables):
    before = outputs(name, "none yet")
    with FakeTensorMode():
        fakes = outputs(name, tables)
    with torch.device("meta"):
        found = outputs(name, tables)
    for fake, now, real, want in zip(fakes, found, outputs(name, "kept"), before, strict=True):
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
        assert isinstance(fake, FakeTensor)
        assert type(real) is torch.Tensor
        assert_same_bits(real, want)
        assert now.device.type == "cpu", "a default device decides nothing"
        assert_same_bits(now, want)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_nothing_is_launched_on_fake_tensors_of_a_gpu_that_may_not_be_there(monkeypatch, backend):
    monkeypatch.setenv("FP8_COMMON_BACKEND", backend)
    with FakeTensorMode():
        x = torch.empty(ROWS, device="cuda", dtype=torch.bfloat16)
        assert casts.quantize(x, torch.empty((), device="cuda"), f8.E4M3).device.type == "cuda"

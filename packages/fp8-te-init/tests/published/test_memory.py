"""The memory that loading a published model takes, as the kernel of the system counts it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from published_files import FP8
from tests.helpers.processes import python

LOAD = """
import pathlib, sys
import torch
from torch import nn
from fp8_te_init.published import load_published

def bytes_of(name):
    return 1024 * int(pathlib.Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

def load():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
    load_published(model, sys.argv[1], device="cpu")
    return model

del_first = load()  # what is imported and cached stays
del del_first
before = bytes_of("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
model = load()
print(bytes_of("VmRSS") - before, bytes_of("VmHWM") - bytes_of("VmRSS"))
"""


def test_loading_takes_the_memory_of_the_codes_and_of_one_tensor_more(tmp_path):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux, which tells the memory of a process")
    codes, scale = torch.zeros(4096, 4096).to(torch.float8_e4m3fn), torch.ones(32, 32)
    tensors = {f"{layer}.weight": codes.clone() for layer in range(4)}
    tensors |= {f"{layer}.weight_scale_inv": scale.clone() for layer in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    resident, above = map(int, python("-c", LOAD, tmp_path).split())
    assert resident < 1.1 * 4 * codes.numel()
    assert above < 1.25 * codes.numel()

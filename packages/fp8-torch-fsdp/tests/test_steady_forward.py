"""A steady forward stays short: the Python functions of our packages that one weight's third forward enters.

`pytest -s` prints them: the way of a weight from the look at its shard to its gathered form, and what the layer does.
"""

import subprocess
import sys

MOST_CALLS = 150
MOST_CALLS_OF_A_WEIGHT, MOST_FILES_OF_A_WEIGHT = 90, 14
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import fp8_torch_fsdp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fp8_torch_fsdp.convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False)))
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 512)
for _ in range(2):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

calls = []
sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
model(x)
sys.setprofile(None)
for code in calls:
    # a comprehension is a function before Python 3.12, and a part of its function after it
    if "/fp8_" in code.co_filename and not code.co_name.startswith("<"):
        print(code.co_filename.rpartition("/fp8_")[2], code.co_qualname)
sys.stdout.flush()
os._exit(0)  # a gloo thread may still hold tensors of the last collective
"""


def test_a_steady_forward_enters_few_functions():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    calls = [line.split() for line in done.stdout.splitlines()]
    layer = next(place for place, (_, name) in enumerate(calls) if name == "Float8Linear.forward")
    files = {file for file, _ in calls[:layer]}
    print(
        done.stdout, f"{layer} calls in {len(files)} files until the weight is gathered, {len(calls)} in all", sep="\n"
    )
    assert 5 <= layer <= MOST_CALLS_OF_A_WEIGHT
    assert len(files) <= MOST_FILES_OF_A_WEIGHT
    assert len(calls) <= MOST_CALLS

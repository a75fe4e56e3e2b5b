"""The pages of the values before rounding go back to the system with the seeding."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys, torch
from torch import nn
import fp8_te_init as fti


def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize()


def built(side, layers):
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        return nn.Sequential(*(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


def seed(model):
    fti.seed_masters(torch.optim.SGD(model.parameters(), lr=0.1), model, fallback="dequantize")


torch.set_num_threads(1)
seed(built(8, 1))  # what is imported on first use
# small: below the 128 KiB from which glibc maps pages of their own, and well above the 9 KB of objects that a layer is
side, layers = (2048, 4) if sys.argv[1] == "large" else (192, 448)
before = resident()
model = built(side, layers)
held, copies = resident() - before, fti.memory_report(model).copies
seed(model)
print(json.dumps({"held": held, "copies": copies, "left": resident() - before, "weights": side * side * layers}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("layers", ["large", "many small"])
def test_the_memory_of_a_process_falls_to_the_codes(layers):
    done = subprocess.run([sys.executable, "-c", PROGRAM, layers], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["copies"] == 2 * measured["weights"]
    assert measured["held"] > 2.5 * measured["weights"]
    assert measured["left"] < 1.6 * measured["weights"], "codes of one byte, and what the heap holds besides"

"""FP8 weights and masters in other processes: pickled into one, and saved by one that is killed."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8_te_init as fti

BUILD = """
import sys
import torch
from torch import nn
import fp8_te_init as fti

torch.set_num_threads(1)

def built(recipe, seed=0):
    torch.manual_seed(seed)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        net = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16))
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, net.parameters(), lr=1e-2)
    fti.seed_masters(optimizer, net)
    return net, optimizer

def step(net, optimizer):
    net(torch.ones(4, 24)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

GO_ON = """
import pickle
net, optimizer = pickle.load(open(sys.argv[1], "rb"))
step(net, optimizer)
pickle.dump([(layer.weight.state.own_codes.numpy(), optimizer.master_of(layer.weight).numpy()) for layer in net[::2]],
            open(sys.argv[2], "wb"))
"""

KILLED = """
import os
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

folder, every = sys.argv[1], int(sys.argv[2])
net, optimizer = built("tensorwise_delayed")

def state(net, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(net, optimizer)))

def save(name):
    dcp.save(state(net, optimizer), checkpoint_id=f"{folder}/{name}.part", no_dist=True)
    os.rename(f"{folder}/{name}.part", f"{folder}/{name}")

def loaded(name):
    twin = built("tensorwise_delayed", seed=1)
    found = state(*twin)
    dcp.load(found, checkpoint_id=f"{folder}/{name}", no_dist=True)
    set_state_dict(*twin, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return twin

def bits(net, optimizer):
    masters = [optimizer.master_of(layer.weight).clone() for layer in net[::2]]
    return [layer.weight.state.own_codes.clone() for layer in net[::2]] + masters

def lines_of_a_save(name, last=None):
    # all that a save runs in Python for the first time, in this file and in torch.distributed.checkpoint
    seen = set()
    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if file != "<string>" and "distributed/checkpoint" not in file:
            return None
        line = (file, frame.f_lineno)
        if event == "line" and line not in seen:
            if last is not None and len(seen) == last:
                os._exit(9)
            seen.add(line)
        return trace
    sys.settrace(trace)
    save(name)
    sys.settrace(None)
    return len(seen)

step(net, optimizer)
save("1")
first = bits(net, optimizer)
step(net, optimizer)
second = bits(net, optimizer)
lines = lines_of_a_save("whole")
assert lines > 300, lines
outcomes = {"unfinished": 0, "whole, not renamed": 0, "renamed": 0}
for last in range(0, lines, every):
    child = os.fork()
    if not child:
        lines_of_a_save(f"{last}", last)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9, (last, status)
    if os.path.exists(f"{folder}/{last}"):
        name, outcome = f"{last}", "renamed"
    elif os.path.exists(f"{folder}/{last}.part/.metadata"):
        name, outcome = f"{last}.part", "whole, not renamed"
    else:
        name, outcome = "1", "unfinished"
    outcomes[outcome] += 1
    twin = loaded(name)
    expected = first if name == "1" else second
    assert all(map(torch.equal, bits(*twin), expected)), (last, name)
    step(*twin)
    assert all(torch.equal(layer.weight.state.quantized(twin[1].master_of(layer.weight)), layer.weight.state.own_codes)
               for layer in twin[0][::2]), last
print(lines, outcomes)
assert outcomes["unfinished"], outcomes
"""


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", "-c", BUILD + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("recipe", ["tensorwise_delayed", "blockwise"])
def test_model_and_optimizer_that_are_pickled_into_another_process_go_on_bit_for_bit(tmp_path, recipe):
    names: dict = {}
    exec(BUILD, names)
    net, optimizer = names["built"](recipe)
    names["step"](net, optimizer)
    Path(tmp_path / "given").write_bytes(pickle.dumps((net, optimizer)))
    run(GO_ON, tmp_path / "given", tmp_path / "returned")
    names["step"](net, optimizer)
    returned = pickle.loads((tmp_path / "returned").read_bytes())
    for layer, (codes, master) in zip(net[::2], returned, strict=True):
        assert torch.equal(layer.weight.state.own_codes, torch.from_numpy(codes))
        assert torch.equal(optimizer.master_of(layer.weight), torch.from_numpy(master))


def test_values_before_rounding_are_not_pickled_and_seeding_says_so():
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        layer = torch.nn.Linear(24, 40)
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin.weight.dequantize(), layer.weight.dequantize())
    assert layer.weight.get_high_precision_init_val() is not None
    optimizer = fti.MasterOptimizer(torch.optim.SGD, twin.parameters(), lr=0.1)
    with pytest.raises(fti.MissingInitError, match="values before rounding of weight are not known"):
        fti.seed_masters(optimizer, twin)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked with a model in them, which is safe on Linux")
@pytest.mark.timeout(900)
def test_a_process_that_is_killed_at_any_line_of_a_save_leaves_a_checkpoint_to_go_on_from(tmp_path, full):
    print(run(KILLED, tmp_path, 1 if full else 40))

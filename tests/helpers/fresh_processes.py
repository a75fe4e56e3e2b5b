"""What tests of primary weights run in a process of its own, which is forked from one that has imported torch."""

import collections
import multiprocessing
import os
import pickle
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8_te_init as fti
from tests.helpers.primary_facts import are_codes_of_masters, codes, equal, masters
from tests.helpers.primary_models import built, masters_for, step
from tests.helpers.ranks import PRELOADED


def in_fresh_process(function: Callable[..., Any], *args: object) -> Any:
    """Return what a function of an importable module returns in a new process."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), torch.set_num_threads, (1,)) as pool:
        return pool.submit(function, *args).result()


def trained(recipe, seed=0):
    net = built(recipe, seed)
    return net, masters_for(net, torch.optim.AdamW, lr=1e-2)


def bits(net, optimizer):
    return [one.clone() for one in codes(net) + masters(net, optimizer)]


# ---------------------------------------------------------------- pickled into another process


def go_on(pickled: bytes) -> bytes:
    net, optimizer = pickle.loads(pickled)
    step(net, optimizer)
    return pickle.dumps(bits(net, optimizer))


# ---------------------------------------------------------------- resident memory


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory_of(side: int, layers: int) -> dict[str, int]:
    """Bytes that a model holds before and after its seeding."""

    def make(side, layers):
        with fti.fp8_model_init(preserve_high_precision_init_val=True):
            return nn.Sequential(*(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(layers)))

    def seed(model):
        fti.seed_masters(torch.optim.SGD(model.parameters(), lr=0.1), model, fallback="dequantize")

    seed(make(8, 1))  # what is imported on first use
    before = resident()
    model = make(side, layers)
    held, copies = resident() - before, fti.memory_report(model).copies
    seed(model)
    return {"held": held, "copies": copies, "left": resident() - before, "weights": side * side * layers}


# ---------------------------------------------------------------- killed in the middle of a save


def state(net, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))


def lines_of_a_save(pair, place: Path, last: int | None = None) -> int:
    """Save, and return how many lines that ran for the first time, here and in torch; end the process after `last`."""
    seen = set[tuple[str, int]]()

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if file != __file__ and "distributed/checkpoint" not in file:
            return None
        line = (file, frame.f_lineno)
        if event == "line" and line not in seen:
            if last is not None and len(seen) == last:
                os._exit(9)
            seen.add(line)
        return trace

    def save():
        dcp.save(state(*pair), checkpoint_id=f"{place}.part", no_dist=True)
        Path(f"{place}.part").rename(place)

    sys.settrace(trace)
    save()
    sys.settrace(None)
    return len(seen)


def killed_saves(folder: str, every: int) -> collections.Counter[str]:
    """Fork processes that end at every n-th line of a save, and go on from what each leaves; return what was left."""
    outcomes, pair, places = collections.Counter[str](), trained("tensorwise_delayed"), Path(folder)
    step(*pair)
    lines_of_a_save(pair, places / "first")
    first = bits(*pair)
    step(*pair)
    second = bits(*pair)
    lines = lines_of_a_save(pair, places / "whole")
    assert lines > 300, lines
    for last in range(0, lines, every):
        child = os.fork()
        if not child:
            lines_of_a_save(pair, places / f"{last}", last)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, last
        if (places / f"{last}").exists():
            left, outcome = places / f"{last}", "renamed"
        elif (places / f"{last}.part/.metadata").exists():
            left, outcome = places / f"{last}.part", "whole, not renamed"
        else:
            left, outcome = places / "first", "unfinished"
        outcomes[outcome] += 1
        twin = trained("tensorwise_delayed", seed=1)
        found = state(*twin)
        dcp.load(found, checkpoint_id=left, no_dist=True)
        set_state_dict(*twin, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        assert equal(bits(*twin), first if outcome == "unfinished" else second), (last, outcome)
        step(*twin)
        assert are_codes_of_masters(*twin), last
    return outcomes

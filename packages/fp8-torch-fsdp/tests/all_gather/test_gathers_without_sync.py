"""Gathers that the look of a root's forward does not reach: parts, what stays gathered, writes inside of a forward."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fsdp_models import converted, mesh_of, seeded, shard
from fsdp_training import batch, loss_of, plain_twin
from tests.helpers.ranks import on_ranks


def layers():
    return nn.Sequential(nn.Linear(24, 10), nn.GELU(), nn.Linear(10, 8), nn.Linear(8, 6, bias=False))


def build(recipe="tensorwise"):
    """Every layer is a group: state_dict() lets go of what FSDP2 keeps gathered of the root, on the rank that calls."""
    model = converted(seeded(layers), recipe)
    model[3].weight.requires_grad_(False)
    shard(model)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def right(model):
    """Whether a forward is that of the present values."""
    with torch.no_grad():
        return torch.equal(model(batch(7)), plain_twin(model, layers)(batch(7)))


def skip_and_call_a_part(rank):
    model, optimizer = build()
    loss_of(model, batch(0)).backward()
    if rank:
        optimizer.step()
    with torch.no_grad():
        return torch.equal(model[0](batch(7)), plain_twin(model, layers)[0](batch(7)))


def step_between_forward_and_backward(rank):
    model, optimizer = build()
    loss = loss_of(model, batch(0))
    loss_of(model, batch(1)).backward()
    if rank:
        optimizer.step()
    loss.backward()
    optimizer.step()
    return right(model)


@torch.no_grad()
def edit_what_the_root_keeps(rank, *, explicit=False):
    """FSDP2 keeps the root's weights gathered after an evaluation."""
    model = fully_shard(converted(seeded(layers)), mesh=mesh_of())
    own = list(model.parameters())  # later the model's are gathered; a state dict would let go of them
    model(batch(0))
    for parameter in own:
        parameter.to_local().mul_(100)
    if explicit:
        f8.synchronize_scales(model)
    report = f8.float8_report(model)
    assert (report.casts, report.reductions) == ((6, 2) if explicit else (3, 1))
    return right(model)


@torch.no_grad()
def write_in_the_forward(factor):
    model, _ = build()
    model(batch(0))

    def write(layer, args):
        model[2].weight.mul_(factor)

    handle = model[0].register_forward_pre_hook(write, prepend=True)
    y = model(batch(0))
    handle.remove()
    return model, y


def write_what_fits(rank):
    model, y = write_in_the_forward(0.5)
    return torch.allclose(y, plain_twin(model, layers)(batch(0)), rtol=0.05, atol=0.05)


def write_what_does_not_fit(rank):
    with pytest.raises((RuntimeError, ValueError), match=r"2\.weight was modified during the forward"):
        write_in_the_forward(4.0)
    return True


def edit_of_gathered_rows(rank):
    """FSDP2 keeps weights gathered over an accumulation window, inside of which one rank writes to its rows."""
    model, optimizer = build("rowwise")
    own = optimizer.param_groups[0]["params"][0]  # the model's are gathered
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    before = model(batch(0))
    before.sum().backward()
    if rank:
        with torch.no_grad():
            own.mul_(8)
    kept = torch.equal(model(batch(0)), before)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    return kept and not torch.equal(model(batch(0)), before)


PROGRAMS = {
    "a rank skips a step, and a part of the model is called alone": skip_and_call_a_part,
    "all ranks but one step between another forward and its backward": step_between_forward_and_backward,
    "weights that the root keeps gathered are gathered again after an edit": edit_what_the_root_keeps,
    "an explicit synchronization sees edits of weights that are gathered": functools.partial(
        edit_what_the_root_keeps, explicit=True
    ),
    "a write inside of the forward is gathered where it fits its scale": write_what_fits,
    "a write inside of the forward that does not fit is refused on all ranks": write_what_does_not_fit,
    "weights that are told to stay gathered stay so until told otherwise": edit_of_gathered_rows,
}


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2)
def test_nobody_waits_and_nothing_is_stale_when(rank, name):
    assert PROGRAMS[name](rank)


@on_ranks(4)
def test_resharding_to_part_of_the_mesh_raises_on_all_ranks(rank):
    model = converted(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)))
    fully_shard(model[0], mesh=mesh_of(), reshard_after_forward=2)
    fully_shard(model, mesh=mesh_of())
    with pytest.raises(Fp8Error, match=r"0\.weight.*HSDP"):
        model(torch.randn(4, 16))


class NumbersRead(TorchDispatchMode):
    """Counts the numbers that are read one by one, each of which waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_the_monitor_reads_all_numbers_at_once(rank):
    model, _ = build()
    monitor = f8.Float8Monitor(model)
    loss_of(model, batch(0)).backward()
    with NumbersRead() as numbers:
        collected = monitor.collect()
    assert numbers.count == 0
    assert {"0/input/amax", "0.weight/wire/scale", "0.weight/wire/nonfinite"} <= set(collected)

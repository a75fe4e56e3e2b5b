"""To read a weight changes nothing, whoever reads and when; and no rank waits for what another one alone did."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_torch_fsdp as f8

pytestmark = pytest.mark.distributed

ERRORS = (RuntimeError, ValueError)  # what an Fp8Error may be
RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise"]


def build(world_size, recipe="tensorwise"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 8), nn.Linear(8, 6, bias=False))
    f8.convert_to_float8_training(model, recipe=recipe)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2], model[3]):
        # every one: state_dict() lets go of what FSDP2 keeps gathered of the root, on the rank that calls it alone
        fully_shard(layer, mesh=mesh)
    model[3].weight.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def save(model):
    torch.save(model.state_dict(), io.BytesIO())


READERS = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict_with_vars": lambda model: model.state_dict(keep_vars=True),
    "copied_state_dict": lambda model: copy.deepcopy(model.state_dict()),
    "saved_state_dict": save,
    "repr": repr,
    "named_parameters": lambda model: [(n, p.shape, p.to_local().sum()) for n, p in model.named_parameters()],
    "data": lambda model: [p.data.to_local() for p in model.parameters() if hasattr(p, "to_local")],
    "values": lambda model: [v.to_local().detach().clone() for v in model.state_dict().values() if hasattr(v, "mesh")],
}
MOMENTS = ["before_forward", "before_backward", "in_window", "after_backward", "after_step", "after_precompute"]


class Reader:
    """Reads at one moment of a step, and keeps what it gets or lets it go."""

    def __init__(self, model, name, moment, keep):
        self.model, self.name, self.moment, self.keep, self.kept = model, name, moment, keep, None

    def at(self, moment):
        if moment == self.moment:
            result = READERS[self.name](self.model)
            self.kept = result if self.keep else None


def train(world_size, recipe, reader_of):
    model, optimizer = build(world_size, recipe)
    reader = reader_of(model)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            reader.at("before_forward")
            loss = model(torch.randn(4, 16, generator=generator)).square().mean()
            reader.at("before_backward")
            loss.backward()
            reader.at("after_backward" if microbatch else "in_window")
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        reader.at("after_step")
        f8.synchronize_scales(model)
        reader.at("after_precompute")
    return losses, f8.float8_report(model).casts


def read_on_one_rank(rank, world_size, recipe, keep, names, moments):
    """Return the readers and moments that changed losses or casts."""
    alone = train(world_size, recipe, lambda model: Reader(model, None, None, False))
    changed = []
    for name in names:
        for moment in moments:
            where = moment if rank == 0 else None
            result = train(world_size, recipe, lambda model, name=name, at=where: Reader(model, name, at, keep))
            if result != alone:
                changed.append((name, moment))
    return changed


@pytest.mark.matrix("each", recipe=RECIPES, keep=[False, True])
def test_reading_on_one_rank_changes_nothing(run_ranks, recipe, keep, full):
    names = list(READERS) if full else ["state_dict", "data"]
    moments = MOMENTS if full else ["before_backward", "in_window", "after_precompute"]
    assert run_ranks(2, read_on_one_rank, recipe, keep, names, moments) == [[], []]


@pytest.mark.parametrize("name", READERS)
def test_every_way_to_read_leaves_the_other_ranks_alone(run_ranks, name):
    assert run_ranks(2, read_on_one_rank, "tensorwise_delayed", False, [name], ["before_backward"]) == [[], []]


def skip_with_late_flag(rank, world_size):
    """The gradient synchronization flag is set between forward and backward, and rank 0 skips its second step."""
    model, optimizer = build(world_size)
    for step in range(3):
        for microbatch in range(2):
            loss = model(torch.ones(4, 16)).sum()
            model.set_requires_gradient_sync(microbatch == 1)
            loss.backward()
            model.set_requires_gradient_sync(False)
        if not (rank == 0 and step == 1):
            optimizer.step()
        optimizer.zero_grad()
    return compare(model)


def skip_and_unshard(rank, world_size):
    """The next gathers are started before the forward, and rank 0 skips its second step."""
    model, optimizer = build(world_size)
    for step in range(3):
        model.unshard()
        model(torch.ones(4, 16)).sum().backward()
        if not (rank == 0 and step == 1):
            optimizer.step()
        optimizer.zero_grad()
    model.unshard()
    return compare(model)


def skip_and_call_a_part(rank, world_size):
    """A part of the model is called alone after rank 0 has skipped a step."""
    model, optimizer = build(world_size)
    model(torch.ones(4, 16)).sum().backward()
    if rank:
        optimizer.step()
    optimizer.zero_grad()
    twin = plain(model)
    with torch.no_grad():
        return torch.equal(model[0](torch.ones(4, 16)), twin[0](torch.ones(4, 16)))


def step_between_forward_and_backward(rank, world_size):
    """Another forward's gradients are stepped before the backward, on all ranks but one."""
    model, optimizer = build(world_size)
    loss = model(torch.ones(4, 16)).sum()
    model(torch.ones(4, 16)).sum().backward()
    if rank:
        optimizer.step()
    loss.backward()
    optimizer.step()
    return compare(model)


def plain(model):
    """Return an unsharded model of the same values."""
    twin = nn.Sequential(nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 8), nn.Linear(8, 6, bias=False))
    twin.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    return f8.convert_to_float8_training(twin, recipe="tensorwise")


def compare(model):
    twin, x = plain(model), torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return torch.equal(model(x), twin(x))


@pytest.mark.parametrize(
    "program", [skip_with_late_flag, skip_and_unshard, skip_and_call_a_part, step_between_forward_and_backward]
)
def test_a_rank_that_skips_a_step_leaves_nobody_waiting(run_ranks, program):
    assert all(run_ranks(2, program))


def write_in_the_forward(rank, world_size, factor):
    model, _ = build(world_size)
    x = torch.ones(4, 16)
    model(x)

    def scale(module, args):
        with torch.no_grad():
            model[2].weight.mul_(factor)

    handle = model[0].register_forward_pre_hook(scale, prepend=True)
    try:
        with torch.no_grad():
            output = model(x)
    except ERRORS as error:
        return str(error)
    handle.remove()
    return torch.allclose(output, plain(model)(x), rtol=0.05, atol=0.05)


def test_a_write_inside_of_the_forward_is_gathered_where_it_fits_its_scale(run_ranks):
    assert run_ranks(2, write_in_the_forward, 0.5) == [True, True]
    messages = run_ranks(2, write_in_the_forward, 4.0)
    assert messages[0] == messages[1]
    assert "2.weight was changed inside of the forward" in messages[0]


def edit_in_a_window(rank, world_size, ranks):
    model, _ = build(world_size)
    x = torch.ones(4, 16)
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(x).sum().backward()
    if rank in ranks:
        with torch.no_grad():
            model[0].weight.mul_(8)
    return compare(model)


def edit_of_gathered_rows(rank, world_size):
    """FSDP2 keeps weights gathered over an accumulation window, inside of which one rank writes to its rows."""
    model, optimizer = build(world_size, "rowwise")
    own = optimizer.param_groups[0]["params"][0]  # the model's are gathered
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    x = torch.ones(4, 16)
    before = model(x)
    before.sum().backward()
    if rank:
        with torch.no_grad():
            own.mul_(8)
    kept = torch.equal(model(x), before)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    return kept, not torch.equal(model(x), before)


def test_weights_that_are_told_to_stay_gathered_stay_so_until_told_otherwise(run_ranks):
    assert run_ranks(2, edit_of_gathered_rows) == [(True, True)] * 2


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=str)
def test_an_edit_in_an_accumulation_window_is_seen(run_ranks, ranks):
    assert run_ranks(2, edit_in_a_window, ranks) == [True, True]


class NumbersRead(TorchDispatchMode):
    """Counts the numbers that are read one by one, each of which waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def collect_once(rank, world_size):
    model, _ = build(world_size)
    monitor = f8.Float8Monitor(model)
    model(torch.ones(2, 16)).sum().backward()
    with NumbersRead() as numbers:
        collected = monitor.collect()
    return numbers.count, {name for name in collected if name.startswith("0")}


def test_the_monitor_reads_all_numbers_at_once(run_ranks):
    [(reads, names)] = run_ranks(1, collect_once)
    assert reads == 0
    assert {"0/input/amax", "0.weight/wire/scale", "0.weight/wire/nonfinite"} <= names

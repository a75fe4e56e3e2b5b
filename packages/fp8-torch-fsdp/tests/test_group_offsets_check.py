"""`GroupOffsetsCheck`: offsets that do not fit on one rank are the same error on all, and change nothing."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_torch_fsdp._offsets_check import _sentence
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.ranks import RankPool

FEATURES, HIDDEN, EXPERTS, ROWS = 32, 48, 4, 12
GOOD = [3, 3, 8, 12]


class Experts(nn.Module):
    """Experts of two layers."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FEATURES, generator=generator) / FEATURES**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, FEATURES, HIDDEN, generator=generator) / HIDDEN**0.5)


def forward(experts, x, offsets, skip=()):
    hidden = x.new_zeros(len(x), HIDDEN) if "up" in skip else F.gelu(experts.grouped_product("up", x, offsets))
    return x if "down" in skip else experts.grouped_product("down", hidden, offsets)


class Model(nn.Module):
    """A dense layer and two layers of experts, the second of which is computed again in the backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList([Experts(), Experts()])

    def forward(self, x, offsets, then=None):
        first, second = self.layers
        x = self.dense(x)
        x = x + first(x, offsets)
        return x + checkpoint(second, x, offsets if then is None else then, use_reentrant=False)


def converted(model, recipe="tensorwise", *, gather=True):
    config = f8.Float8LinearConfig(recipe=recipe, all_gather=f8.AllGatherConfig(enabled=gather))
    layout = f8.ExpertLayout(forward=forward, weights=("up", "down"))
    return f8.convert_to_float8_training(model, config=config, experts={Experts: layout})


def sharded(recipe="tensorwise", *, gather=True):
    model = converted(Model(), recipe, gather=gather)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


BAD = {
    "falls": (torch.tensor([3, 8, 5, 12]), "got 3, 8, 5, 12: 5 for expert 2 does not fit"),
    "past the rows": (torch.tensor([3, 3, 8, 13]), "end at the number of rows, 12, or before; got 3, 3, 8, 13"),
    "negative": (torch.tensor([-1, 3, 8, 12]), "-1 for expert 0 does not fit"),
    "length": (torch.tensor([3, 8, 12]), r"one for each expert, got torch.int64 (3,)"),
    "dtype": (torch.tensor([3.0, 3.0, 8.0, 12.0]), "must be int32 or int64 [4]"),
    "list": (GOOD, "got list"),
}


def rows(rank, step):
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(10 * step + rank))


def message_of(function, *args):
    try:
        function(*args)
    except Fp8Error as error:
        return str(error)
    return ""


def trained(rank, ranks, recipe, gather, offsets):
    """Return what the ranks raise in a second step, if offsets for it are given, and the model after three steps."""
    model, message = sharded(recipe, gather=gather), ""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        if step == 1 and offsets is not None:
            with f8.GroupOffsetsCheck(model):
                bad = offsets if rank == ranks - 1 else torch.tensor(GOOD)
                message = message_of(model, rows(rank, step), torch.tensor(GOOD), bad)
            assert all(parameter.grad is None for parameter in model.parameters())
        with f8.GroupOffsetsCheck(model):
            model(rows(rank, step), torch.tensor(GOOD)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return message, {n: getattr(v, "_local_tensor", v).clone() for n, v in model.state_dict().items()}


@pytest.mark.distributed
@pytest.mark.matrix(
    "each",
    world_size=[2, 4],
    kind=list(BAD),
    recipe=["tensorwise", "blockwise", "tensorwise_delayed"],
    gather=[True, False],
)
def test_all_ranks_raise_the_same_and_nothing_is_changed(run_ranks, world_size, kind, recipe, gather):
    offsets, said = BAD[kind]
    found = run_ranks(world_size, trained, recipe, gather, offsets)
    wanted = run_ranks(world_size, trained, recipe, gather, None)
    first = found[0][0]
    assert first.startswith(f"grouped_product of layers.1.up: rank {world_size - 1} of the group: Group offsets must")
    assert said in first
    for (message, state), (_, expected) in zip(found, wanted, strict=True):
        assert message == first
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def of_several(rank, ranks):
    model = sharded()
    with f8.GroupOffsetsCheck(model), torch.no_grad():
        offsets = [2, 1, rank, 0] if rank in (1, 3) else GOOD
        return message_of(model.eval(), rows(rank, 0)[: ROWS if rank != 3 else 0], torch.tensor(offsets))


@pytest.mark.distributed
def test_each_rank_that_is_wrong_is_named_in_an_evaluation_too(run_ranks):
    messages = run_ranks(4, of_several)
    assert len(set(messages)) == 1
    assert "rank 1 of the group: Group offsets must" in messages[0]
    assert "got 2, 1, 1, 0: 1 for expert 1 does not fit. rank 3 of the group: Group" in messages[0]
    assert "the number of rows, 0, or before; got 2, 1, 3, 0: 2 for expert 0" in messages[0]


def in_parallel(rank, ranks, everywhere):
    """EP 2 x FSDP 2: ranks (0, 1) and (2, 3) hold other experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "part"))
    experts = fully_shard(converted(Experts()), mesh=mesh["part"])
    with f8.GroupOffsetsCheck(experts, group=dist.group.WORLD if everywhere else None):
        ends = torch.tensor([1, 0, 0, 0] if rank == 3 else GOOD)
        return message_of(experts, rows(rank, 0), ends)


@pytest.mark.distributed
def test_ranks_with_the_same_experts_agree_or_all_that_are_asked_to(run_ranks):
    alone, everywhere = run_ranks(4, in_parallel, False), run_ranks(4, in_parallel, True)
    assert alone[:2] == ["", ""]
    assert alone[2] == alone[3]
    assert alone[3].startswith("grouped_product of up: rank 1 of the group (rank 3 of all): Group offsets must")
    assert len(set(everywhere)) == 1
    assert everywhere[0].startswith("grouped_product of up: rank 3 of the group: Group offsets must")


def replicated(rank, ranks):
    """A model that no FSDP2 shards: the ranks have to be named."""
    model = converted(Model())
    unknown = message_of(f8.GroupOffsetsCheck, model)
    with f8.GroupOffsetsCheck(model, group=dist.group.WORLD):
        return unknown, message_of(model, rows(rank, 0), torch.tensor([-3, 0, 0, 0] if rank == 0 else GOOD))


@pytest.mark.distributed
def test_replicas_agree_in_the_group_that_is_given(run_ranks):
    (unknown, first), other = run_ranks(2, replicated)
    assert (unknown, first) == other
    assert "does not know which ranks run layers.0.up, because FSDP2 does not shard it" in unknown
    assert "grouped_product of layers.0.up: rank 0 of the group: Group offsets" in first


def another_product(rank, ranks):
    experts = fully_shard(converted(Experts()))
    with f8.GroupOffsetsCheck(experts):
        return message_of(experts, rows(rank, 0), torch.tensor(GOOD), ("up",) if rank else ())


@pytest.mark.distributed
def test_a_rank_at_another_product_is_named(run_ranks):
    first, second = run_ranks(2, another_product)
    assert first == second
    assert first.startswith("grouped_product of up on rank 0 of the group, of down on rank 1 of the group: every rank")


def no_product(rank, ranks):
    experts, began = fully_shard(converted(Experts())), time.monotonic()
    with f8.GroupOffsetsCheck(experts):
        message = message_of(experts, rows(rank, 0), torch.tensor(GOOD), () if rank else ("up", "down"))
    waited = time.monotonic() - began
    if not rank:
        time.sleep(6)  # it goes on with something else, and does not end
    return message, waited


@pytest.mark.distributed
def test_a_rank_that_calls_no_product_lets_the_others_time_out():
    pool = RankPool(2, collective_timeout=3.0)
    try:
        _, (message, seconds) = pool.run(no_product)
    finally:
        pool.close()
    assert "grouped_product of up: not every rank of the group came to this product" in message
    assert seconds < 30


def counted(rank, ranks):
    model, found = sharded(), []
    model(rows(rank, 0), torch.tensor(GOOD))  # FSDP2 and the plan are ready
    for checks in (True, False):
        counter = CollectiveCounter()
        check = f8.GroupOffsetsCheck(model)
        if not checks:
            check.close()
        with counter, torch.no_grad():
            model(rows(rank, 0), torch.tensor(GOOD))
        check.close()
        found.append((len(counter.seen), counter.nbytes("all_reduce")))
    return found


@pytest.mark.distributed
def test_it_costs_one_small_all_reduce_for_each_product_and_nothing_when_closed(run_ranks):
    for (checked, bytes_checked), (plain, bytes_plain) in run_ranks(2, counted):
        assert checked - plain == 4
        assert bytes_checked - bytes_plain == 4 * 12


def compiled(rank, ranks):
    model, messages = sharded(), []
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    ends = torch.tensor(GOOD)
    expected = model(rows(rank, 0), ends).detach()
    with f8.GroupOffsetsCheck(model):
        assert torch.equal(model(rows(rank, 0), ends).detach(), expected)
        bad = torch.tensor([4, 3, 8, 12])
        messages = [message_of(model, rows(rank, 0), ends, bad if rank else ends) for _ in range(2)]
    assert torch.equal(model(rows(rank, 0), ends).detach(), expected)
    return messages


@pytest.mark.distributed
def test_compiled_experts_are_checked_uncompiled(run_ranks):
    first, second = run_ranks(2, compiled)
    assert first == second == [first[0]] * 2
    assert "grouped_product of layers.1.up: rank 1 of the group: Group offsets must" in first[0]


def test_one_process_raises_with_the_name_of_the_weight():
    model = converted(Model())
    with f8.GroupOffsetsCheck(model) as check:
        with pytest.raises(Fp8Error, match=r"^grouped_product of layers\.0\.up: Group offsets must .* 2 for expert 1"):
            model(rows(0, 0), torch.tensor([3, 2, 8, 12]))
        with pytest.raises(Fp8Error, match=r"grouped_product of layers\.0\.up: .* expects \[\.\.\., 32\] as input"):
            model.layers[0](torch.ones(2, 5), torch.tensor(GOOD))
        with pytest.raises(Fp8Error, match="checked already"):
            f8.GroupOffsetsCheck(model)
        twin = copy.deepcopy(model)
    check.close()  # once more
    for plain in (model, twin):
        with pytest.raises(Fp8Error, match=r"^Group offsets must"):
            plain(rows(0, 0), torch.tensor([3, 2, 8, 12]))
    f8.GroupOffsetsCheck(model)
    assert not [name for name in vars(f8.unconvert(model).layers[0]) if "fp8" in name]


def test_one_graph_cannot_hold_the_check():
    experts = converted(Experts())
    whole = torch.compile(experts, fullgraph=True, backend="aot_eager")
    expected = whole(rows(0, 0), torch.tensor(GOOD))
    with f8.GroupOffsetsCheck(experts), pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        whole(rows(0, 0), torch.tensor(GOOD))
    assert torch.equal(whole(rows(0, 0), torch.tensor(GOOD)), expected)


def test_a_model_without_experts_is_refused():
    with pytest.raises(Fp8Error, match="found no experts in FP8"):
        f8.GroupOffsetsCheck(nn.Linear(4, 4))


def test_of_many_ranks_a_few_say_what_is_wrong():
    told = [("up", f"problem {rank}" * (rank != 2)) for rank in range(7)]
    sentence = _sentence(told, range(7))
    assert sentence.startswith("grouped_product of up: rank 0 of the group: problem 0 rank 1 of the group: problem 1 ")
    assert sentence.endswith("problem 4 The same holds for rank 5 of the group, rank 6 of the group.")

"""Every collective of torch on FP8 weights, whole ones and parts: values are read, codes are not overwritten."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error
from fp8_te_init._collectives import _READERS, _WRITES_FIRST, _WRITES_OUT, refuse_or_broadcast
from fp8_te_init._compat import CHECK

pytestmark = pytest.mark.distributed

ops = torch.ops._c10d_functional
WORLD = 2


def layers(seed):
    torch.manual_seed(seed)
    with fti.primary_weights():
        return [nn.Linear(8, 8, bias=False) for _ in range(WORLD)]


def ones(rows=8):
    return torch.ones(rows, 8)


def into(output, action):
    """Run a collective that fills `output`, and return that."""
    action(output)
    return output


# name: what is called with an FP8 weight, or with a part of one, on every rank
REFUSED = {
    "all_reduce": lambda w, other, group: dist.all_reduce(w),
    "all_reduce_coalesced": lambda w, other, group: dist.all_reduce_coalesced([ones(), w]),
    "reduce": lambda w, other, group: dist.reduce(w, 0),
    "scatter": lambda w, other, group: dist.scatter(w, [torch.ones_like(other)] * 2 if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda w, other, group: dist.reduce_scatter(w, [torch.ones_like(other)] * 2),
    "reduce_scatter of weights": lambda w, other, group: dist.reduce_scatter(torch.ones_like(other), [w, w]),
    "reduce_scatter_tensor": lambda w, other, group: dist.reduce_scatter_tensor(w, torch.cat([other, other])),
    "all_gather_into_tensor": lambda w, other, group: dist.all_gather_into_tensor(w, other.chunk(2)[0].contiguous()),
    "all_to_all": lambda w, other, group: dist.all_to_all(list(w.chunk(2)), list(other.chunk(2))),
    "all_to_all_single": lambda w, other, group: dist.all_to_all_single(w, other),
    "recv": lambda w, other, group: dist.recv(w, 1 - dist.get_rank()),
    "recv from any": lambda w, other, group: dist.recv(w),
    "irecv": lambda w, other, group: dist.irecv(w, 1 - dist.get_rank()),
    "functional all_reduce_": lambda w, other, group: ops.all_reduce_(w, "sum", group.group_name),
    "functional all_reduce_coalesced_": lambda w, other, group: ops.all_reduce_coalesced_([w], "sum", group.group_name),
    "functional broadcast_": lambda w, other, group: ops.broadcast_(w, 0, group.group_name),
    "functional all_gather_out": lambda w, other, group: ops.all_gather_into_tensor_out(
        other.chunk(2)[0].contiguous(), 2, group.group_name, out=w
    ),
    "functional reduce_scatter_out": lambda w, other, group: ops.reduce_scatter_tensor_out(
        torch.cat([other, other]), "sum", 2, group.group_name, out=w
    ),
}
READ = {
    "all_gather": lambda w, group: into(ones(2 * len(w)), lambda out: dist.all_gather(list(out.chunk(2)), w)),
    "all_gather_into_tensor": lambda w, group: into(ones(2 * len(w)), lambda out: dist.all_gather_into_tensor(out, w)),
    "reduce_scatter_tensor": lambda w, group: into(ones(len(w) // 2), lambda out: dist.reduce_scatter_tensor(out, w)),
    "all_to_all_single": lambda w, group: into(ones(len(w)), lambda out: dist.all_to_all_single(out, w)),
    "gather": lambda w, group: into(
        ones(2 * len(w)), lambda out: dist.gather(w, list(out.chunk(2)) if dist.get_rank() == 0 else None)
    ),
    "send": lambda w, group: into(
        ones(len(w)), lambda out: dist.send(w, 1) if dist.get_rank() == 0 else dist.recv(out, 0)
    ),
    "functional all_reduce": lambda w, group: functional.all_reduce(w, "sum", group) + 0,
    "functional broadcast": lambda w, group: functional.broadcast(w, 0, group) + 0,
    "functional all_gather": lambda w, group: functional.all_gather_tensor(w, 0, group) + 0,
    "functional reduce_scatter": lambda w, group: functional.reduce_scatter_tensor(w, "sum", 0, group) + 0,
    "functional all_to_all": lambda w, group: functional.all_to_all_single(w, None, None, group) + 0,
    "functional coalesced": lambda w, group: functional.all_gather_into_tensor_coalesced([w], group)[0] + 0,
}
if torch.__version__ >= "2.13":  # gloo has it since then
    READ["all_to_all"] = lambda w, group: into(
        ones(len(w)), lambda out: dist.all_to_all(list(out.chunk(2)), list(w.chunk(2)))
    )
PARTS = {
    "whole": lambda w: w,
    "rows": lambda w: w[:4],
    "chunk": lambda w: w.chunk(2)[1],
}


def codes(nets):
    return [layer.weight.state.codes.clone() for layer in nets]


def called(rank, world_size):
    """Return what was not refused, what was not read right, and whether a weight has changed."""
    nets, group = layers(rank), dist.group.WORLD
    before, unrefused, misread = codes(nets), [], []
    for part, cut in PARTS.items():
        weight = cut(nets[0].weight.data)
        plain = weight.dequantize()
        for name, action in REFUSED.items():
            try:
                action(weight, torch.ones_like(plain), group)
            except Fp8Error as error:
                if "would write to" in str(error) or "would read FP8 weights" in str(error):
                    continue
            unrefused.append(f"{name} {part}")
        for name, action in READ.items():
            if not torch.equal(action(weight, group), action(plain, group)):
                misread.append(f"{name} {part}")
    with pytest.raises(Fp8Error, match="a part of an FP8 weight"):
        dist.broadcast(nets[0].weight.data[:4], 0)
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(before, codes(nets), strict=True))
    return unrefused, misread, same


def test_collectives_read_values_and_those_that_would_write_are_refused_on_all_ranks(run_ranks):
    for unrefused, misread, same in run_ranks(WORLD, called):
        assert unrefused == []
        assert misread == []
        assert same


def sends_a_list(rank, world_size):
    with pytest.raises(Fp8Error, match="scatter would read FP8 weights of scatter_list by their addresses"):
        dist.scatter(ones(), [layers(0)[0].weight.data])


def test_weights_in_lists_whose_addresses_would_be_read_are_refused_by_the_sender(run_ranks):
    """This ended the process with a segmentation fault."""
    run_ranks(1, sends_a_list)
    assert hasattr(torch.distributed.distributed_c10d, CHECK), f"torch {torch.__version__} has no {CHECK}"


def gathered(rank, world_size):
    """Gather values into weights, whole ones and halves of one."""
    nets = layers(rank)
    values = torch.randn(8, 8, generator=torch.Generator().manual_seed(rank))
    dist.gather(values, [layer.weight.data for layer in nets] if rank == 0 else None)
    wholes = [layer.weight.get_high_precision_init_val() for layer in nets]
    halves = layers(rank)[0]
    dist.all_gather(list(halves.weight.data.chunk(2)), values[:4].contiguous())
    return wholes, halves.weight.get_high_precision_init_val()


def test_values_that_are_gathered_into_lists_of_weights_are_their_new_start(run_ranks):
    results = run_ranks(WORLD, gathered)
    values = [torch.randn(8, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[0][0], values, strict=True))
    for _, halves in results:
        assert torch.equal(halves, torch.cat([value[:4] for value in values]))


def operators():
    """Yield every overload of a collective that torch has."""
    for schema in torch._C._jit_get_all_schemas():
        space, name = schema.name.split("::")
        if space in ("c10d", "_c10d_functional", "symm_mem") and any("Tensor" in str(a.type) for a in schema.arguments):
            yield getattr(getattr(getattr(torch.ops, space), name), schema.overload_name or "default")


def test_a_collective_that_nobody_thought_of_is_refused():
    weight = layers(0)[0].weight.data
    known = {*_READERS, *_WRITES_FIRST, *_WRITES_OUT, "c10d::broadcast_"}
    names = {operator._schema.name for operator in operators()}
    later = {"c10d::check_for_nan", "_c10d_functional::isend"} if torch.__version__ < "2.13" else set()
    assert known - later - names == set(), "and the names that are known are torch's"
    for operator in operators():
        if operator._schema.name not in known:
            with pytest.raises(Fp8Error, match="would write to an FP8 weight"):
                refuse_or_broadcast(operator, (weight,), {}, fti.PrimaryFloat8Weight)
    assert len(names - known) > 10

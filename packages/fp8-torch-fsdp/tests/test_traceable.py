"""The traceable mode has FSDP2's numbers, parameters and state dicts, and says so where it cannot do something."""

import copy
import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_torch_fsdp import _compat as compat
from fp8_torch_fsdp.traceable.ops import copy_in_backward
from tests.helpers.collectives import CollectiveCounter

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "static")
WIDTHS = {"even": (24, 48, 12), "uneven": (24, 7, 40), "empty_rank": (24, 2, 40), "blocks": (24, 200, 150)}
STATIC = f8.Float8LinearConfig(
    recipe=f8.Recipe(
        name="static",
        input=f8.CastConfig(scaling="static", static_scale=64.0),
        weight=f8.CastConfig(scaling="static", static_scale=256.0),
        grad_output=f8.CastConfig(format="e5m2", scaling="static", static_scale=2.0**12),
    )
)


class Named(nn.Linear):
    """A user's subclass."""

    def what(self):
        return f"{self.in_features} to {self.out_features}"


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x):
        return self.norm(nn.functional.gelu(self.linear(x)))


def build(widths="even", recipe="tensorwise", dtype=torch.float32, high_precision_head=True, all_gather=True):
    """Embedding, FP8 layers with norms, and a head that stays in high precision."""
    torch.manual_seed(0)
    sizes = WIDTHS[widths]
    layers = [Layer(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(nn.Embedding(11, sizes[0]), *layers, nn.Linear(sizes[-1], 5)).to(dtype)
    config = STATIC if recipe == "static" else f8.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, all_gather=all_gather)
    keep = (lambda module, name: module.out_features != 5) if high_precision_head else None
    return f8.convert_to_float8_training(model, config=config, module_filter_fn=keep)


def mesh_of(world_size, hsdp=False):
    if hsdp:
        return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("copies", "shards"))
    return init_device_mesh("cpu", (world_size,))


def with_fsdp2(model, mesh):
    for layer in model[1:-1]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(rank, step):
    return torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, tokens):
    return (model(tokens).float() - 1).square().mean()


def whole(model):
    """Parameters, their gradients, and all delayed scales and histories."""
    tensors = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    tensors |= dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}


def differences(a, b):
    a, b = whole(a), whole(b)
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def train_both(rank, world_size, recipe, widths, dtype, hsdp, steps=10):
    mesh = mesh_of(world_size, hsdp)
    twins = (
        with_fsdp2(build(widths, recipe, dtype), mesh),
        f8.fully_shard_traceable(build(widths, recipe, dtype), mesh=mesh),
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in twins]
    losses, different = [], []
    for step in range(steps):
        step_losses = [loss_of(model, batch(rank, step)) for model in twins]
        for loss in step_losses:
            loss.backward()
        different += [(step, name) for name in differences(*twins)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append([loss.item() for loss in step_losses])
    local = [(a.shape, b.to_local().shape) for a, b in zip(*(list_of_locals(m) for m in twins), strict=True)]
    return losses, different, f8.float8_report(twins[1]).reductions, local


def list_of_locals(model):
    return [p if isinstance(p, DTensor) else p.data for p in model.parameters()]


@pytest.mark.distributed
@pytest.mark.matrix(
    "each",
    world_size=[1, 2],
    recipe=list(RECIPES),
    widths=list(WIDTHS),
    dtype=[torch.float32, torch.bfloat16],
)
def test_ten_adamw_steps_equal_fsdp2(run_ranks, world_size, recipe, widths, dtype):
    for losses, different, reductions, local in run_ranks(
        world_size, train_both, recipe, widths, dtype, False, timeout=300.0
    ):
        assert not different, "gradients, weights, scales and histories"
        assert all(a == b for a, b in losses)
        assert losses[-1][0] < losses[0][0]
        # under delayed scaling, also when the backward has ended
        per_step = 0 if recipe == "static" else 1
        assert reductions == (10 * per_step if world_size > 1 else 0)
        assert len(local) > 4


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise"])
def test_hsdp_equals_fsdp2_and_copies_stay_equal(run_ranks, recipe):
    results = run_ranks(4, train_both, recipe, "uneven", torch.float32, True, 4, timeout=300.0)
    for losses, different, _, _ in results:
        assert not different
        assert all(a == b for a, b in losses)
        assert losses[-1][1] < losses[0][1]


def count(rank, world_size, recipe, fp8):
    model = f8.fully_shard_traceable(build("even", recipe, all_gather=fp8))
    loss_of(model, batch(rank, 0)).backward()
    model.zero_grad()
    with CollectiveCounter() as forward:
        loss = loss_of(model, batch(rank, 1))
    with CollectiveCounter() as backward:
        loss.backward()
    return forward.seen, backward.seen


@pytest.mark.distributed
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weights_travel_in_fp8_in_both_directions_and_are_gathered_copy_in_backward(run_ranks, recipe, fp8):
    sizes = [24 * 48, 48 * 12]
    item = 1 if fp8 else 4
    dtype = torch.uint8 if fp8 else torch.float32
    for forward, backward in run_ranks(2, count, recipe, fp8):
        expected = [s * item // 2 for s in sizes]
        sent = [one.nbytes for one in forward if one.dtype == dtype and one.nbytes in expected]
        assert sorted(sent) == sorted(expected)
        again_sent = [one.nbytes for one in backward if one.kind == "all_gather"]
        assert sorted(again_sent) == sorted(sent), "the head, which was not converted, stays gathered"
        reduced = [one for one in backward if one.kind == "reduce_scatter"]
        assert len(reduced) == 1 + 2 * 4 + 2, (
            "embedding; weight, bias and norm of both layers; weight and bias of the head"
        )


def composed(rank, world_size, folder):
    """Checkpointing of activations, frozen and tied weights, state dicts, evaluation, the meta device."""
    problems = []
    mesh = mesh_of(world_size)
    plain, recomputed = (f8.fully_shard_traceable(build("uneven", "tensorwise_delayed")) for _ in range(2))
    recomputed[1].forward = recompute(recomputed[1].forward)
    for step in range(2):
        for model in (plain, recomputed):
            loss_of(model, batch(rank, step)).backward()
    problems += [f"recomputed {name}" for name in differences(plain, recomputed)]

    saved = plain.state_dict() if not f8.synchronize_scales(plain) else {}
    if any(isinstance(getattr(t, "_local_tensor", t), f8.ShardedFloat8Weight) for t in saved.values()):
        problems.append("a state dict holds more than plain tensors")
    dcp.save({"model": saved, "fp8": f8.DelayedState(plain)}, checkpoint_id=folder)
    fsdp2 = with_fsdp2(build("uneven", "tensorwise_delayed"), mesh)
    with torch.no_grad():
        for parameter in fsdp2.parameters():
            parameter.zero_()
    loaded = {"model": fsdp2.state_dict(), "fp8": f8.DelayedState(fsdp2)}
    dcp.load(loaded, checkpoint_id=folder)
    fsdp2.load_state_dict(loaded["model"])
    plain.eval()
    fsdp2.eval()
    with torch.no_grad():
        if not torch.equal(plain(batch(rank, 5)), fsdp2(batch(rank, 5))):
            problems.append("a checkpoint of one mode gives another output in the other")

    frozen = build("even")
    frozen[1].linear.weight.requires_grad_(False)
    frozen = f8.fully_shard_traceable(frozen)
    loss_of(frozen, batch(rank, 0)).backward()
    if frozen[1].linear.weight.grad is not None or frozen[1].linear.bias.grad is None:
        problems.append("a frozen weight has a gradient, or its bias has none")

    with torch.device("meta"):
        meta = build("uneven")
    meta = f8.fully_shard_traceable(meta, mesh=mesh)
    meta.to_empty(device="cpu")
    reference = f8.fully_shard_traceable(build("uneven"), mesh=mesh)
    meta.load_state_dict(reference.state_dict())
    for model in (meta, reference):
        loss_of(model, batch(rank, 0)).backward()
    return problems + [f"meta {name}" for name in differences(meta, reference)]


def recompute(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


@pytest.mark.distributed
def test_composes(run_ranks, tmp_path):
    assert run_ranks(2, composed, tmp_path / "checkpoint", timeout=300.0) == [[], []]


def tied(rank, world_size):
    """Two FP8 layers share a weight; an embedding shares one with the head."""
    model = build("even", high_precision_head=False)
    twin = nn.Linear(24, 48)
    model[1].other = f8.convert_to_float8_training(twin)
    model[1].other._parameters["weight"] = model[1].linear._parameters["weight"]
    f8.fully_shard_traceable(model)
    same = model[1].other._parameters["weight"] is model[1].linear._parameters["weight"]
    shared = model[1].other.distribution.slot is model[1].linear.distribution.slot
    model[1].linear.forward = lambda x: model[1].other(x)
    loss_of(model, batch(rank, 0)).backward()
    return same, shared, model[1].other.weight.grad is not None


@pytest.mark.distributed
def test_tied_weights_share_shard_and_scale(run_ranks):
    assert run_ranks(2, tied) == [(True, True, True)] * 2


def subclasses(rank, world_size):
    model = f8.fully_shard_traceable(f8.convert_to_float8_training(nn.Sequential(Named(6, 4), nn.Linear(4, 2))))
    model(torch.randn(3, 6)).sum().backward()
    try:
        copy.deepcopy(model)
    except Fp8Error as error:
        wires = [weight.wire for weight in f8.float8_report(model).weights]
        return model[0].what(), isinstance(model[0], Named), model[0].weight.grad is not None, str(error), wires
    return "no error"


@pytest.mark.distributed
def test_layers_stay_instances_of_their_class_and_a_sharded_model_refuses_copies(run_ranks):
    for what, same_class, trains, message, wires in run_ranks(2, subclasses):
        assert what == "6 to 4"
        assert same_class
        assert trains
        assert "before it is sharded" in message
        assert wires == ["float8_e4m3fn", "bfloat16"] * 2, "the report knows what the layers gather"


def stale(rank, world_size, change):
    model = f8.fully_shard_traceable(build("even", "tensorwise"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_of(model, batch(rank, 0)).backward()
    x = torch.randn(4, 24)
    model[1](x)  # nothing changed: the scale still covers the weight
    if change == "step":
        optimizer.step()
    elif change == "edit":
        with torch.no_grad():
            model[1].linear.weight.mul_(3)
    else:
        model.load_state_dict({name: t * 2 for name, t in model.state_dict().items()})
    try:
        model[1](x)
    except RuntimeError as error:
        model(batch(rank, 1))
        model[1](x)
        return str(error)
    return "no error"


@pytest.mark.distributed
@pytest.mark.parametrize("change", ["step", "edit", "load"])
def test_a_part_called_with_a_stale_scale_raises(run_ranks, change):
    for message in run_ranks(2, stale, change):
        assert "stale" in message
        assert "(48, 24)" in message


def refusals(rank, world_size):
    messages = []
    twice = build()
    early = torch.optim.SGD(twice.parameters(), lr=1.0)
    f8.fully_shard_traceable(twice)
    scalar = nn.Sequential(nn.Linear(16, 16))
    scalar.register_parameter("gain", nn.Parameter(torch.ones(())))
    attention = nn.ModuleDict({"attend": nn.MultiheadAttention(16, 2)})
    cube = init_device_mesh("cpu", (1, 1, world_size))
    for call in (
        lambda: f8.fully_shard_traceable(twice),
        lambda: f8.fully_shard_traceable(scalar),
        lambda: f8.fully_shard_traceable(build(), mesh=cube),
        lambda: f8.fully_shard_traceable(attention),
        early.step,
    ):
        try:
            call()
            messages.append("no error")
        except Fp8Error as error:
            messages.append(str(error))
    dist.barrier()
    return messages


@pytest.mark.distributed
def test_refusals_say_what_to_do_on_all_ranks(run_ranks):
    for twice, scalar, mesh, attention, early in run_ranks(2, refusals):
        assert "distributed already" in twice
        assert "without dimensions" in scalar
        assert "one dimension, or of two" in mesh
        assert "attend is an nn.MultiheadAttention" in attention
        assert "fully_shard_traceable replaced them" in early


def test_the_second_gather_takes_a_copy_that_depends_on_the_gradient():
    shard, grad = torch.arange(6, dtype=torch.uint8).view(2, 3).t(), torch.ones(2)
    copy = copy_in_backward(shard, grad)
    assert torch.equal(copy, shard)
    assert copy.data_ptr() != shard.data_ptr()
    opcheck(torch.ops.fp8_torch_fsdp.copy_in_backward.default, (shard.contiguous(), grad))


def test_this_torch_has_the_operators_of_the_traceable_mode():
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "wait_tensor"):
        assert hasattr(compat.collectives, name), (
            f"torch has no _c10d_functional.{name} any more: see fp8_torch_fsdp._compat"
        )

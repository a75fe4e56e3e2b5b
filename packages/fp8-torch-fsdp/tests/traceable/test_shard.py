"""The traceable mode has FSDP2's numbers, parameters and state dicts, and says so where it cannot do something."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fsdp_models import DIM, RECIPES, STATIC, WIDTHS, Tied, chain, converted, mesh_of, seeded, shard
from fsdp_rows import Row, check, check_all
from fsdp_training import batch, loss_of, tokens, train
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.ranks import on_ranks

CASTS = {name: name for name in RECIPES} | {"static": STATIC}


def net(widths="uneven shards", dtype=torch.float32):
    """Embedding, FP8 layers with norms, and a head that stays in high precision."""
    layers = chain(widths)
    return nn.Sequential(nn.Embedding(10, DIM), *layers, nn.Linear(layers[-1][0].out_features, 5)).to(dtype)


def low(recipe="tensorwise", make=net, gather=True):
    return converted(seeded(make), recipe, gather=gather, rules=lambda layer, name: layer.out_features != 5)


def both_ways(make=net, *shape, prepare=lambda model: model):
    """Return what makes a traceable model, to which `prepare` may do something, and one of FSDP2."""

    def models(recipe):
        mesh, traceable = mesh_of(*shape), low(recipe, make)
        return f8.fully_shard_traceable(prepare(traceable), mesh=mesh), shard(low(recipe, make), mesh)

    return models


@pytest.mark.matrix(
    "each", recipe=list(CASTS), world_size=[2, 1], widths=list(WIDTHS), dtype=[torch.float32, torch.bfloat16]
)
@on_ranks(lambda given: given["world_size"])
def test_steps_equal_those_of_fsdp2(rank, recipe, world_size, widths, dtype):
    row = Row(both_ways(functools.partial(net, widths, dtype)), casts=None, loop={"inputs": tokens, "steps": 4})
    check(rank, row._replace(reductions=int(recipe != "static" and world_size > 1)), CASTS[recipe])


def recompute(model):
    model[1].forward = functools.partial(checkpoint, model[1].forward, use_reentrant=False)
    return model


def frozen():
    model = net()
    model[1][0].weight.requires_grad_(False)
    return model


def from_meta(recipe):
    with torch.device("meta"):
        meta = low(recipe)
    meta, saved = f8.fully_shard_traceable(meta, mesh=mesh_of()), f8.fully_shard_traceable(low(recipe), mesh=mesh_of())
    meta.to_empty(device="cpu")
    meta.load_state_dict(saved.state_dict())
    return meta, saved


LOOP = {"inputs": tokens}
ROWS = {
    "HSDP": Row(both_ways(net, 2, 2), 4, ("tensorwise", "tensorwise_delayed", "rowwise"), None, 1, LOOP),
    "activations that are recomputed": Row(both_ways(prepare=recompute), casts=None, loop=LOOP),
    "a frozen weight whose bias learns": Row(both_ways(frozen), casts=None, loop=LOOP),
    "a model from the meta device": Row(from_meta, casts=None, loop=LOOP),
}


@pytest.mark.parametrize("name", ROWS)
@on_ranks(lambda given: ROWS[given["name"]].ranks)
def test_trains_alike(rank, full, name):
    check_all(rank, ROWS[name], full)


@on_ranks(2)
def test_tied_weights_share_shard_and_scale(rank):
    models = [place(low(make=Tied), mesh=mesh_of()) for place in (f8.fully_shard_traceable, fully_shard)]
    assert models[0].a._parameters["weight"] is models[0].b._parameters["weight"]
    assert models[0].a.fp8_strategy.weight is models[0].b.fp8_strategy.weight
    for model in models:
        loss_of(model, tokens(rank)).backward()
    for own, wanted in zip(*(model.parameters() for model in models), strict=True):
        # the sum of two gradients is reduced, or both are
        torch.testing.assert_close(own.grad.full_tensor(), wanted.grad.full_tensor(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_weights_are_sent_in_fp8_in_both_directions_and_are_gathered_copy_in_backward(rank, recipe, fp8):
    model = f8.fully_shard_traceable(low(recipe, functools.partial(net, "even shards"), gather=fp8))
    train(model, rank, 1, inputs=tokens)
    with CollectiveCounter() as forward:
        loss = loss_of(model, tokens(rank))
    with CollectiveCounter() as backward:
        loss.backward()
    dtype, item = (torch.uint8, 1) if fp8 else (torch.float32, 4)
    expected = sorted(size * item // 2 for size in (24 * 48, 48 * 24, 24 * 12))
    assert sorted(one.nbytes for one in forward.seen if one.dtype == dtype and one.nbytes in expected) == expected
    again = sorted(one.nbytes for one in backward.of("all_gather"))
    assert again == expected, "the head, which was not converted, stays gathered"
    # embedding; weight, bias and norm of three layers; weight and bias of the head
    assert backward.count("reduce_scatter") == 1 + 3 * 4 + 2


@on_ranks(2)
def test_a_checkpoint_of_one_mode_gives_the_same_output_in_the_other(rank, tmp_path):
    traceable, fsdp2 = both_ways()("tensorwise_delayed")
    train(traceable, rank, inputs=tokens)
    f8.synchronize_scales(traceable)
    saved = traceable.state_dict()
    assert not any(isinstance(getattr(t, "_local_tensor", t), f8.ShardedFloat8Weight) for t in saved.values())
    dcp.save({"model": saved, "fp8": f8.DelayedState(traceable)}, checkpoint_id=tmp_path)
    loaded = {"model": fsdp2.state_dict(), "fp8": f8.DelayedState(fsdp2)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    fsdp2.load_state_dict(loaded["model"])
    with torch.no_grad():
        assert torch.equal(traceable.eval()(tokens(rank, 5)), fsdp2.eval()(tokens(rank, 5)))


class Named(nn.Linear):
    """A user's subclass."""

    def what(self):
        return f"{self.in_features} to {self.out_features}"


@pytest.mark.parametrize("change", ["step", "step of a compiled part", "edit", "load"])
@on_ranks(2)
def test_a_part_called_with_a_stale_scale_raises(rank, change):
    model = f8.fully_shard_traceable(low(make=functools.partial(net, "even shards")))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1.0), batch(rank)
    if "compiled" in change:
        model[1].compile(backend="aot_eager")
    loss_of(model, tokens(rank)).backward()
    model[1](x)  # nothing changed: the scale still covers the weight
    if "step" in change:
        optimizer.step()
    elif change == "edit":
        with torch.no_grad():
            model[1][0].weight.mul_(3)
    else:
        model.load_state_dict({name: t * 2 for name, t in model.state_dict().items()})
    with pytest.raises(RuntimeError, match=r"stale.*\(48, 24\)|\(48, 24\).*stale"):
        model[1](x)
    model(tokens(rank, 1))
    model[1](x)


@on_ranks(2)
def test_refusals_say_what_to_do_on_all_ranks(rank):
    model = converted(nn.Sequential(Named(6, 4), nn.Linear(4, 2)))
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    f8.fully_shard_traceable(model)
    model(torch.randn(3, 6)).sum().backward()
    assert model[0].what() == "6 to 4", "layers stay instances of their class"
    assert model[0].weight.grad is not None
    assert [weight.wire for weight in f8.float8_report(model).weights] == ["float8_e4m3fn", "bfloat16"] * 2
    scalar = nn.Sequential(nn.Linear(16, 16))
    scalar.register_parameter("gain", nn.Parameter(torch.ones(())))
    calls = {
        "before it is sharded": lambda: copy.deepcopy(model),
        "distributed already": lambda: f8.fully_shard_traceable(model),
        "without dimensions": lambda: f8.fully_shard_traceable(scalar),
        "one dimension, or of two": lambda: f8.fully_shard_traceable(low(), mesh=init_device_mesh("cpu", (1, 1, 2))),
        "attend is an nn.MultiheadAttention": lambda: f8.fully_shard_traceable(
            nn.ModuleDict({"attend": nn.MultiheadAttention(16, 2)})
        ),
        "which only fully_shard gathers": lambda: f8.fully_shard_traceable(
            converted(nn.Sequential(nn.Linear(32, 32)), "mxfp8")
        ),
        "fully_shard_traceable replaced them": early.step,
    }
    for words, call in calls.items():
        with pytest.raises(Fp8Error) as raised:
            call()
        assert words in str(raised.value)
    dist.barrier()

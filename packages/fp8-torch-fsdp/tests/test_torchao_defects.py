"""What FP8 all-gathers in torchao got wrong (0.18, torch 2.13), one row each: right here, never silently wrong."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8
from fp8_common import POWER_OF_2
from fp8_torch_fsdp import synchronize_scales as precompute
from tests.helpers.collectives import CollectiveCounter

pytestmark = pytest.mark.distributed

WIDTHS = (16, 24, 10)
GROWTH = 100.0


def chain(widths=WIDTHS):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))


def convert(model, all_gather=True, **options):
    config = f8.Float8LinearConfig(all_gather=all_gather, **options)
    return f8.convert_to_float8_training(model, config=config)


def shard(model, world_size, **options):
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, rank, steps=3, after_step=None):
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = (model(torch.randn(8, 16, generator=generator)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
        losses.append(loss.item())
    return losses


def weights_of(model):
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def same_weights(a, b):
    a, b = weights_of(a), weights_of(b)
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- one function for each defect; it returns checks


def load_after(model):
    model.load_state_dict({name: value * GROWTH for name, value in model.state_dict().items()})


def ema_after(model):
    with torch.no_grad():
        torch._foreach_lerp_(list(model.parameters()), [torch.full_like(p, GROWTH) for p in model.parameters()], 0.5)


def edit_after(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(GROWTH)


def stale_scale_after_precompute(rank, world_size, change):
    model = shard(convert(chain()), world_size)
    train(model, optimizer_of(model), rank, after_step=precompute)
    change(model)
    twin = chain()
    twin.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    x = torch.randn(8, 16)
    seen = model(x)
    return {
        "output is that of the new weights": torch.equal(seen, convert(twin, all_gather=False)(x)),
        "the weights did grow": max(w.abs().max() for w in weights_of(model).values()) > 10,
    }


def load_state_dict_after_precompute(rank, world_size):
    return stale_scale_after_precompute(rank, world_size, load_after)


def ema_after_precompute(rank, world_size):
    return stale_scale_after_precompute(rank, world_size, ema_after)


def edit_after_precompute(rank, world_size):
    return stale_scale_after_precompute(rank, world_size, edit_after)


class Tied(nn.Module):
    """A head that shares the embedding's weight, and two linear layers that share theirs."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
        self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.head.weight, self.b.weight = self.embedding.weight, self.a.weight

    def forward(self, tokens):
        return self.head(self.b(self.a(self.embedding(tokens)).relu()))


def tied(world_size, all_gather):
    torch.manual_seed(0)
    return fully_shard(convert(Tied(), all_gather), mesh=init_device_mesh("cpu", (world_size,)))


def train_tied(model, rank):
    optimizer = optimizer_of(model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randint(10, (8,), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.reshard()


def tied_weights(rank, world_size):
    low, high = tied(world_size, True), tied(world_size, False)
    before = weights_of(low)["a.weight"]
    for model in (low, high):
        train_tied(model, rank)
    local = low.embedding.weight._local_tensor
    return {
        "still tied": low.head.weight is low.embedding.weight and low.a.weight is low.b.weight,
        "shared by FP8 layers alone: in FP8": isinstance(low.a.weight._local_tensor, f8.ShardedFloat8Weight),
        "shared with an embedding: exact": not isinstance(local, f8.ShardedFloat8Weight),
        "the report says why": "shared with embedding" in str(f8.float8_report(low)),
        "same training as a high-precision gather": same_weights(low, high),
        "trained at all": not torch.equal(before, weights_of(low)["a.weight"]),
    }


def powers_of_two(rank, world_size):
    model = shard(
        convert(chain(), recipe=f8.Recipe(name="power of 2", weight=f8.CastConfig(policy=POWER_OF_2))),
        world_size,
        reshard_after_forward=False,
    )
    checks = {}
    for step in range(3):
        losses = train(model, optimizer_of(model), rank, steps=1, after_step=precompute)
        model(torch.randn(8, 16))
        for name, layer in model.named_children():
            gathered = layer.weight
            checks[f"{name} in step {step}"] = torch.frexp(gathered.scale).mantissa.item() == 0.5
            amax = dict(model.named_parameters())[f"{name}.weight"].dequantize().abs().max()
            checks[f"{name} in step {step} fits"] = bool(224 * 0.9 < amax * gathered.scale <= 448) and len(losses) == 1
        model.reshard()
    return checks


def assigned_state_dict(rank, world_size):
    model, source = (shard(convert(chain()), world_size) for _ in range(2))
    train(source, optimizer_of(source), rank)
    model.load_state_dict({k: v.clone() for k, v in source.state_dict().items()}, assign=True)
    kept = all(isinstance(p._local_tensor, f8.ShardedFloat8Weight) for p in model.parameters())
    losses = [train(m, optimizer_of(m), rank) for m in (model, source)]
    wire = {entry.wire for entry in f8.float8_report(model).weights}
    return {
        "still FP8 weights": kept and wire == {"float8_e4m3fn"},
        "same training": losses[0] == losses[1] and same_weights(model, source),
    }


def uneven(widths, rank, world_size):
    low, high = (shard(convert(chain(widths), gather), world_size) for gather in (True, False))
    losses = [train(model, optimizer_of(model), rank, after_step=precompute) for model in (low, high)]
    shapes = [p._local_tensor.shape[0] for p in low.parameters()]
    rows = torch.tensor(shapes)
    dist.all_reduce(rows)
    return {
        "same training": losses[0] == losses[1] and same_weights(low, high),
        "every row is somewhere": rows.tolist() == list(widths[1:]),
    }


def uneven_shards(rank, world_size):
    return uneven((16, 7, 5, 3), rank, world_size)


def empty_shard(rank, world_size):
    return uneven((16, 1, 40, 1), rank, world_size)


def mixed_dtypes(rank, world_size):
    def build(all_gather):
        model = chain((16, 24, 24, 10))
        model[1].to(torch.bfloat16)
        model[2].to(torch.float16)
        for layer in model:
            layer.register_forward_pre_hook(lambda layer, args: args[0].to(layer.weight.dtype))
        model.register_forward_hook(lambda model, args, y: y.float())
        return shard(convert(model, all_gather), world_size)

    low, high = build(True), build(False)
    # not AdamW, whose epsilon is 0 in float16
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (low, high)]
    pairs = zip((low, high), optimizers, strict=True)
    losses = [train(model, optimizer, rank, after_step=precompute) for model, optimizer in pairs]
    return {
        "same training": losses[0] == losses[1] and same_weights(low, high),
        "three dtypes": len({p.dtype for p in low.parameters()}) == 3,
    }


def scale_survives_aliasing(rank, world_size):
    model = shard(convert(chain()), world_size)
    train(model, optimizer_of(model), rank, after_step=precompute)
    local = model[0].weight._local_tensor
    names, context = local.__tensor_flatten__()
    inner = {name: getattr(local, name) for name in names}
    rebuilt = type(local).__tensor_unflatten__(inner, context, local.shape, local.stride())
    aliases = {"unflatten": rebuilt, "detach": local.detach(), "view": local.view(-1), "slice": local[1:]}
    scale = local.info.slot.scale
    model(torch.randn(8, 16))
    gathered = f8.GatheredWeight(local.plain.to(torch.float8_e4m3fn), scale, "e4m3", torch.bfloat16)
    names, context = gathered.__tensor_flatten__()
    inner = {name: getattr(gathered, name) for name in names}
    again = type(gathered).__tensor_unflatten__(inner, context, gathered.shape, gathered.stride())
    clone = local.clone()
    return {
        **{name: alias.info is local.info for name, alias in aliases.items()},
        "codes and scale": torch.equal(again.dequantize(), gathered.dequantize()) and again.dtype == torch.bfloat16,
        "detached codes": gathered.detach().scale is scale,
        "a clone is a weight of its own": clone.info is not local.info and clone.info.cast is local.info.cast,
    }


def one_cast_for_each_step(rank, world_size):
    model = shard(convert(chain((16,) * 9)), world_size)
    optimizer, casts, reductions = optimizer_of(model), [], []
    for _ in range(4):
        before = f8.float8_report(model).casts
        with CollectiveCounter() as collectives:
            train(model, optimizer, rank, steps=1)
        casts.append(f8.float8_report(model).casts - before)
        reductions.append(collectives.count("all_reduce"))
    gathers = collectives.count("all_gather")
    return {
        "casts": casts == [8] * 4,
        "all-reduces": reductions == [1] * 4,
        "gathered in forward and in backward": gathers >= 15,
    }


def no_float8_in_collectives(rank, world_size):
    model = shard(convert(chain()), world_size)
    with CollectiveCounter() as collectives:
        train(model, optimizer_of(model), rank, after_step=precompute)
    dtypes = set(collectives.dtypes("all_gather"))
    try:
        codes = torch.zeros(4, dtype=torch.float8_e4m3fn)
        dist.all_gather_into_tensor(torch.zeros(4 * world_size, dtype=torch.float8_e4m3fn), codes)
        refused = False
    except (RuntimeError, ValueError):
        refused = True
    return {"bytes": dtypes == {torch.uint8}, "gloo still refuses float8, or this row can go": refused}


def explicit(rank, world_size, attach):
    """A training that synchronizes explicitly equals one that does not; each request is one all-reduce."""
    automatic, manual = (shard(convert(chain()), world_size) for _ in range(2))
    optimizers = [optimizer_of(model) for model in (automatic, manual)]
    after_step = attach(manual, optimizers[1])
    checks, reductions = {}, []
    for step in range(4):
        losses = []
        for model, optimizer, hook in zip((automatic, manual), optimizers, (None, after_step), strict=True):
            with CollectiveCounter() as collectives:
                losses += train(model, optimizer, rank, steps=1, after_step=hook)
            reductions.append(collectives.count("all_reduce"))
        checks[f"losses of step {step}"] = losses[0] == losses[1]
    # before every forward, so that no rank waits for what another one alone knows; and for every request
    checks["all-reduces"] = reductions == [1, 2] * 4
    checks["counted"] = (
        f8.float8_report(automatic).reductions,
        f8.float8_report(manual).reductions,
    ) == (4, 8)
    # every forward looks and casts, whatever was cast before it
    checks["casts"] = (
        f8.float8_report(automatic).casts,
        f8.float8_report(manual).casts,
    ) == (4 * len(automatic), 8 * len(manual))
    checks["weights"] = same_weights(automatic, manual)
    return checks


def explicit_precompute(rank, world_size):
    return explicit(rank, world_size, lambda model, optimizer: precompute)


DEFECTS = {
    "stale scale after precompute: load_state_dict": load_state_dict_after_precompute,
    "stale scale after precompute: EMA": ema_after_precompute,
    "stale scale after precompute: in-place edit": edit_after_precompute,
    "tied weights silently untied": tied_weights,
    "power-of-two scales ignored by the gather": powers_of_two,
    "load_state_dict(assign=True) drops the subclass": assigned_state_dict,
    "uneven shards crash": uneven_shards,
    "mixed weight dtypes crash precompute": mixed_dtypes,
    "an empty shard crashes precompute": empty_shard,
    "flatten, unflatten, detach and clone lose the scale": scale_survives_aliasing,
    "every weight cast twice a step": one_cast_for_each_step,
    "gloo refuses the float8 dtype": no_float8_in_collectives,
    "optimizer and precompute: other numbers, more casts": explicit_precompute,
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_torchao_is_none_here(run_ranks, defect):
    for checks in run_ranks(2, DEFECTS[defect]):
        assert checks
        assert [name for name, passed in checks.items() if not passed] == []

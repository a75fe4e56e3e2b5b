"""FP8 on the wire changes no number, and works with what large trainings combine with FSDP2: the guide's table.

Each row is two models that train alike, bit for bit; mostly one is gathered in FP8 and the other in high precision.
"""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8_torch_fsdp as f8
from fsdp_models import (
    DIM,
    HIDDEN,
    RECIPES,
    Conv1D,
    Tied,
    blocks,
    chain,
    converted,
    mesh_of,
    seeded,
    shard,
)
from fsdp_rows import Row, both_gathers, check_all
from fsdp_training import batch, tokens, train
from tests.helpers.ranks import on_ranks


def replicated(recipe):
    model = converted(seeded(blocks), recipe)
    return shard(converted(seeded(blocks), recipe)), DistributedDataParallel(model)


def hsdp(*shape):
    return both_gathers(place=lambda model: shard(model, mesh_of(*shape)))


def placed(**options):
    return both_gathers(place=functools.partial(shard, **options))


def uploaded(recipe):
    """What `weight.to("cuda")` gives on a machine with a GPU: a copy, gathered instead of the shard."""
    models = placed(offload_policy=CPUOffloadPolicy(pin_memory=False))(recipe)
    for parameter in models[0].parameters():
        if isinstance(parameter._local_tensor, f8.ShardedFloat8Weight):
            local = parameter._local_tensor
            local.to = lambda *_, local=local, **__: torch.ops.aten._to_copy.default(local)
    return models


def under_autocast(model):
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return shard(model)


class Adapted(nn.Module):
    """A frozen FP8 layer beside a trained low-rank product in high precision."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


def save_products(context, operator, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(**options):
    def models(recipe):
        recomputed, plain = (shard(converted(seeded(blocks), recipe)) for _ in range(2))
        for block in recomputed:
            block.forward = functools.partial(checkpoint, block.forward, **options)
        for model in (recomputed, plain):  # a reentrant checkpoint needs an input with a gradient
            model.register_forward_pre_hook(lambda model, args: (args[0].requires_grad_(),))
        return recomputed, plain

    return models


def twice(recipe):
    return [shard(converted(seeded(blocks), recipe)) for _ in range(2)]


def copied(recipe):
    original = converted(seeded(blocks), recipe)
    return [shard(model) for model in (original, copy.deepcopy(original))]


def assigned(recipe):
    model, source = twice(recipe)
    train(source, dist.get_rank())
    model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)
    f8.DelayedState(model).load_state_dict(f8.DelayedState(source).state_dict())
    assert {weight.wire for weight in f8.float8_report(model).weights} == {"float8_e4m3fn", "bfloat16"}
    return model, source


def tied_in_one_group(model):
    model = shard(nn.Sequential(model))[0]
    assert model.head.weight is model.embedding.weight
    assert model.a.weight is model.b.weight
    local = [weight._local_tensor for weight in (model.embedding.weight, model.a.weight)]
    gathers = model.a.config.all_gather
    assert [isinstance(one, f8.ShardedFloat8Weight) for one in local] == [False, gathers], "an embedding stays exact"
    return model


def two_formats(_):
    """Weights with largest codes of 448 and 240 in one group of FSDP2; the twin scales each layer by itself."""
    models = [seeded(lambda: nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))) for _ in range(2)]
    for model, (index, fmt) in itertools.product(models, enumerate(("e4m3", "e4m3fnuz") * 2)):
        casts = dict.fromkeys(("input", "weight", "grad_output"), f8.CastRecipe(format=fmt))
        model[index] = converted(model[index], f8.Recipe(name=fmt, **casts))
    return fully_shard(models[0]), DistributedDataParallel(models[1])


def three_dtypes():
    model = nn.Sequential(*(nn.Linear(24, 24, bias=False, dtype=d) for d in (None, torch.bfloat16, torch.float16)))
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, args: args[0].to(layer.weight.dtype))
    return model


def conv1d():
    return nn.Sequential(Conv1D(HIDDEN, DIM), nn.GELU(), Conv1D(7, HIDDEN))


def mxfp8(ranks, place=shard):
    """On three ranks 96 rows are even and 64 are not."""
    inputs = {"inputs": lambda rank, step: batch(rank, step, (32, 64)).bfloat16()}
    layers = lambda: nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).bfloat16()  # noqa: E731
    return Row(both_gathers(layers, place), ranks, ["mxfp8"], casts=2, reductions=0, loop=inputs, more=())


def compiled_layer(model):
    model[0].compile(backend="aot_eager")
    return shard(model)


ROWS = {
    "DDP: replicas that average all gradients, and accumulate some": Row(
        replicated, recipes=RECIPES, casts=None, reductions=2, loop={"microbatches": 2}
    ),
    "HSDP 2x2": Row(hsdp(2, 2), 4, ("tensorwise", "tensorwise_delayed", "rowwise")),
    "HSDP 4x1: of weights that every rank has whole nothing is agreed on": Row(
        hsdp(4, 1), 4, ("tensorwise", "tensorwise_delayed"), reductions=lambda recipe: int("delayed" in recipe)
    ),
    "shards of columns": Row(placed(shard_placement_fn=lambda p: Shard(p.ndim - 1)), recipes=RECIPES),
    "CPU offload": Row(placed(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "CPU offload, shards uploaded": Row(uploaded, recipes=RECIPES, casts=None),  # codes are not kept there
    "autocast": Row(both_gathers(place=under_autocast)),
    "activation checkpointing, reentrant": Row(checkpointed(use_reentrant=True)),
    "activation checkpointing, selective": Row(
        checkpointed(
            use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, save_products)
        )
    ),
    "gradient accumulation": Row(both_gathers(), casts=4 * 3, reductions=3, loop={"microbatches": 3}),
    "frozen base and LoRA": Row(both_gathers(lambda: nn.Sequential(Adapted(), Adapted())), casts=2),
    "a deepcopy before sharding: training the original leaves the copy alone": Row(copied),
    "load_state_dict(assign=True) drops the subclass": Row(assigned),
    "tied weights silently untied": Row(
        # not delayed: layers that are gathered in high precision have a scale each
        both_gathers(Tied, tied_in_one_group),
        recipes=["tensorwise"],
        more=["rowwise", "blockwise"],
        casts=1,
        loop={"inputs": tokens},
    ),
    "mixed weight dtypes crash precompute": Row(
        both_gathers(three_dtypes), casts=6, reductions=2, loop={"after_step": f8.synchronize_scales}
    ),
    "two formats in one group": Row(two_formats, recipes=("dynamic",), more=()),
    "an empty shard crashes precompute": Row(
        both_gathers(lambda: chain((24, 1, 40, 1))), casts=6, reductions=2, loop={"after_step": f8.synchronize_scales}
    ),
    "optimizer and precompute: other numbers, more casts": Row(
        twice, casts=8, reductions=2, first={"after_step": f8.synchronize_scales}
    ),
    "weights that are stored transposed": Row(both_gathers(conv1d), recipes=RECIPES, casts=2),
    "MXFP8 on one rank": mxfp8(1),
    "MXFP8 on three ranks, shards uneven": mxfp8(3),
    "MXFP8, compiled": mxfp8(2, compiled_layer),
    "MXFP8, kept gathered": mxfp8(2, functools.partial(shard, reshard_after_forward=False)),
    "MXFP8, replicas": mxfp8(4, lambda model: shard(model, mesh_of(2, 2))),
}


@pytest.mark.parametrize("name", ROWS)
@on_ranks(lambda given: ROWS[given["name"]].ranks)
def test_trains_alike(rank, full, name):
    check_all(rank, ROWS[name], full)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
@on_ranks(3)
def test_mixed_precision_gathers_the_codes_of_float32_weights(rank, recipe):
    """The wire holds codes of the float32 weights; layers compute in bfloat16, gradients are reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    make = lambda: nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))  # noqa: E731
    twin, model = converted(seeded(make), recipe), shard(converted(seeded(make), recipe), mp_policy=policy)
    y = model(batch(rank, 0, (32, 64)))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(y, twin(batch(rank, 0, (32, 64)).bfloat16()))

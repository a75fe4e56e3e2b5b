"""Loads, edits and saves of FP8 weights on several ranks: the bits of the unsharded model, or a sentence."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8_te_init as fti
from fp8_common import Fp8Error
from primary_facts import are_codes_of_masters, codes, equal, masters, weights
from tests.helpers.primary_models import RECIPES, deep, masters_for, plain_deep, sharded, step, tied, train_tied
from tests.helpers.ranks import on_ranks
from tests.helpers.sharded_models import WIDTHS, mlp, shard
from tests.helpers.tensors import placed_like, reloaded, whole


def unlike(a, b):
    """Names of entries of two state dicts that differ in dtype or in a bit."""
    same = {k for k in a.keys() & b.keys() if a[k].dtype == b[k].dtype and torch.equal(whole(a[k]), whole(b[k]))}
    return sorted((a.keys() | b.keys()) - same)


# ---------------------------------------------------------------- loads and edits


def placed(model, state):
    own = model.state_dict()
    return {name: placed_like(value, own[name]) for name, value in state.items()}


def copied(model, state):
    with torch.no_grad():
        for name, value in placed(model, state).items():
            model.get_parameter(name).copy_(value)


def full(model, state, **options):
    given = state if dist.get_rank() == 0 or not options else {}
    set_model_state_dict(model, dict(given), options=StateDictOptions(full_state_dict=True, **options))


def through_dcp(model, state, folder):
    target = model.state_dict()
    dcp.async_save(placed(model, state), checkpoint_id=folder).result()
    dcp.load(target, checkpoint_id=folder)
    model.load_state_dict(target)


FORMS = {
    "load_state_dict": lambda model, state, _: model.load_state_dict(placed(model, state)),
    "load_state_dict(assign=True)": lambda model, state, _: model.load_state_dict(placed(model, state), assign=True),
    "copy_": lambda model, state, _: copied(model, state),
    "each rank has all": lambda model, state, _: full(model, state),
    "broadcast": lambda model, state, _: full(model, state, broadcast_from_rank0=True),
    "broadcast, offloaded": lambda model, state, _: full(model, state, broadcast_from_rank0=True, cpu_offload=True),
    "dcp": through_dcp,
}
ROWS = [
    *((form, "values") for form in ("load_state_dict", "copy_", "broadcast")),
    *((form, "codes") for form in FORMS if form != "copy_"),
    ("broadcast", "codes into a meta model"),
]
MOMENTS = ["before the first gather", "before it, nothing preserved", "after seeding"]


@pytest.mark.matrix("each", world_size=[2, 3], recipe=RECIPES, turn=[0, 1, 2])
@on_ranks(lambda given: given["world_size"])
def test_loads_and_edits_of_shards_give_the_codes_and_masters_of_the_unsharded_model(
    rank, world_size, recipe, turn, tmp_path
):
    """Seeding before the first gather rounded twice: a quarter of the codes were not those of their masters.

    Each form of load at one of the moments in turn.
    """
    wrong, gathered = {}, StateDictOptions(full_state_dict=True)
    for number, (form, kind) in enumerate(ROWS):
        is_meta, is_values, moment = "meta" in kind, kind == "values", MOMENTS[(number + turn) % len(MOMENTS)]
        is_new = is_meta or "assign" in form  # parameters that no earlier optimizer can hold
        is_seeded, preserve = moment == MOMENTS[2] and not is_new, moment != MOMENTS[1]
        given, expected = plain_deep(5), fti.convert_linear(plain_deep(5), recipe=recipe)
        model = sharded(world_size, recipe, 1, preserve=preserve, device="meta" if is_meta else "cpu")
        optimizer = masters_for(model, lr=0.0, seed=preserve) if is_seeded else None
        FORMS[form](model, (given if is_values else expected).state_dict(), f"{tmp_path}/{number}")
        found = []
        if not is_seeded:
            optimizer = masters_for(model, lr=0.0, seed=False)
            found += ["codes are not those of masters"] * (not are_codes_of_masters(model, optimizer))
        if not is_seeded and is_values:
            if preserve:
                fti.seed_masters(optimizer, model)
            else:  # a save is the first to need a scale that all ranks agree on
                found += unlike(get_model_state_dict(model, options=gathered), expected.state_dict())
            before = codes(model)
        model(torch.ones(1, WIDTHS[0]))
        model.reshard()
        found += ["codes are not those of masters after a gather"] * (not are_codes_of_masters(model, optimizer))
        found += ["a gather changed codes"] * (not is_seeded and is_values and not equal(codes(model), before))
        found += unlike(get_model_state_dict(model, options=gathered), expected.state_dict())
        step(model, optimizer)
        model.reshard()
        # values reach a living master with all their bits, preserved or not
        starts = weights(given) if is_values else [w.dequantize() for w in weights(expected)]
        found += ["masters"] * (not equal(map(whole, masters(model, optimizer)), starts))
        found += ["a step that moves nothing reduces"] * (optimizer.reductions != 0)
        found += ["copies stay"] * (fti.memory_report(model).copies != 0)
        if found:
            wrong[f"{form} of {kind} {moment}"] = found
    assert wrong == {}


@pytest.mark.matrix("each", world_size=[2, 3], recipe=RECIPES)
@on_ranks(lambda given: given["world_size"])
def test_a_frozen_base_that_was_loaded_into_shards_has_the_codes_of_an_unsharded_one(rank, world_size, recipe):
    """LoRA: the base is loaded after sharding and frozen, an optimizer trains something else."""
    for moment in ("unseeded", "seeded", "cleared"):
        model, values = sharded(world_size, recipe), plain_deep(5)
        full(model, values.state_dict(), broadcast_from_rank0=True)
        for layer in model[:-1]:
            layer.requires_grad_(False)
        optimizer = masters_for(model[-1], seed=False)
        if moment == "seeded":
            fti.seed_masters(optimizer, model)
        if moment == "cleared":
            for layer in model[:-1]:
                layer.weight.to_local().clear_high_precision_init_val()
        for _ in range(2):
            step(model, optimizer)
        model.reshard()
        base = fti.convert_linear(values, recipe=recipe)[:-1]
        assert equal((whole(w) + 0 for w in weights(model[:-1])), (w.dequantize() for w in weights(base))), moment


# ---------------------------------------------------------------- saves


@pytest.mark.matrix("each", world_size=[2, 3], recipe=RECIPES)
@on_ranks(lambda given: given["world_size"])
def test_state_dicts_have_the_bits_of_the_unsharded_model_and_hold_plain_tensors(rank, world_size, recipe, tmp_path):
    reference = deep(recipe).state_dict()
    model = sharded(world_size, recipe)
    state = model.state_dict()
    gathered, offloaded = (
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
        for offload in (False, True)
    )
    assert not (rank and offloaded), "offloaded to the first rank alone"
    forms = {"gathered": gathered, "saved and read": reloaded(gathered)} | ({} if rank else {"offloaded": offloaded})
    found = {name: unlike(form, reference) for name, form in forms.items()}
    classes = {type(value) for form in forms.values() for value in form.values()}
    read = reloaded(state, weights_only=False)
    classes |= {type(value.to_local()) for value in read.values() if isinstance(value, DTensor)}
    model.load_state_dict(state)
    found["own state"] = unlike(model.state_dict(), reference)
    assert {name: names for name, names in found.items() if names} == {}
    assert classes == {torch.Tensor}


@on_ranks(2)
def test_state_dicts_reach_tied_weights_and_ddp(rank, tmp_path):
    mesh, uneven = init_device_mesh("cpu", (2,)), {"first": "head", "recipe": "rowwise", "size": 13}
    model, unsharded = fully_shard(tied(1, **uneven), mesh=mesh), tied(**uneven)
    train_tied(unsharded, masters_for(unsharded))
    full(model, unsharded.state_dict(), broadcast_from_rank0=True)
    optimizer = masters_for(model, seed=False)
    train_tied(model, optimizer)
    train_tied(unsharded, masters_for(unsharded, seed=False))
    model.reshard()
    assert unlike(model.state_dict(), unsharded.state_dict()) == []
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    loaded = fully_shard(tied(2, **uneven), mesh=mesh)
    target = loaded.state_dict()
    dcp.load(target, checkpoint_id=tmp_path)
    loaded.load_state_dict(target)
    assert unlike(loaded.state_dict(), unsharded.state_dict()) == [], "by dcp"
    assert all(each.head.weight is each.other.weight for each in (model, loaded))
    assert len(optimizer.masters()) == 1
    reference, ddp = deep("tensorwise_delayed").state_dict(), DistributedDataParallel(deep("tensorwise_delayed", 1))
    full(ddp, reference, broadcast_from_rank0=True)
    assert unlike(ddp.module.state_dict(), reference) == []


# ---------------------------------------------------------------- refusals


def told(call, *arguments):
    try:
        call(*arguments)
    except (Fp8Error, RuntimeError) as error:  # the same on all ranks, so that none waits
        return f"{type(error).__name__}: {error}"
    return "nothing was told"


def without_scales(world_size):
    model = sharded(world_size, seed=1)
    state = {name: value for name, value in deep().state_dict().items() if "scale" not in name}
    full(model, state, broadcast_from_rank0=True, strict=False)
    model(torch.ones(2, WIDTHS[0]))


def made_too_early(world_size):
    model = deep()
    optimizer = masters_for(model, seed=False)
    try:
        fti.seed_masters(optimizer, shard(model, world_size))
    finally:
        assert fti.memory_report(model).copies > 0, "nothing is dropped"


REFUSED = {
    "broadcast codes without scales": (without_scales, "without the scales that belong to them"),
    "reshard_after_forward=2": (
        lambda size: shard(deep(), size, reshard_after_forward=2)(torch.ones(2, WIDTHS[0])),
        "shard over a two-dimensional mesh (HSDP)",
    ),
    "converted after sharding": (
        lambda size: fti.convert_linear(shard(mlp(), size)),
        "Convert the model first, then apply fully_shard",
    ),
    "a forward around fully_shard": (
        lambda size: fti.PrimaryFloat8Linear.forward(sharded(size)[0], torch.ones(2, WIDTHS[0])),
        "call the model through the module that fully_shard was applied to",
    ),
    "torch's tensor parallelism": (
        lambda size: parallelize_module(deep(), init_device_mesh("cpu", (size,)), {"0": ColwiseParallel()}),
        "torch's tensor parallelism cannot cut FP8 primary weights",
    ),
    "an optimizer that was made before the sharding": (made_too_early, "holds none of the 4 trained FP8 weights"),
}


@on_ranks(4)
def test_what_cannot_work_raises_on_all_ranks(rank):
    sentences = {name: told(call, 4) for name, (call, _) in REFUSED.items()}
    assert [name for name, (_, wanted) in REFUSED.items() if wanted not in sentences[name]] == []


@on_ranks(3)
def test_a_start_that_is_stale_on_one_rank_is_an_error_on_all_and_nothing_is_dropped(rank):
    wanted = "0.weight: The values before rounding" if rank == 1 else "Another rank could not seed its masters"
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        model = sharded(3, recipe)
        optimizer = masters_for(model, seed=False)
        if rank == 1:
            model[0].weight.to_local().state.codes[0, 0] ^= 1
        sentence = told(fti.seed_masters, optimizer, model)
        assert sentence.startswith("StaleInitError")
        assert wanted in sentence
        assert fti.memory_report(model).copies > 0


CASTS = {"to": lambda m: m.to(torch.bfloat16), "half": nn.Module.half, "bfloat16": nn.Module.bfloat16}


@pytest.mark.matrix("each", world_size=[1, 2], cast=CASTS, reshard=[True, False], recipe=["tensorwise", "rowwise"])
@on_ranks(lambda given: given["world_size"])
def test_the_dtype_of_a_sharded_model_changes_before_its_first_forward_or_never(
    rank, world_size, recipe, cast, reshard
):
    """FSDP2 refuses it later for plain parameters; beside FP8 weights it took the bytes of biases for another dtype."""
    x = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(rank))
    pairs = []
    for is_late in (False, True):
        unsharded = deep(recipe)
        model = shard(copy.deepcopy(unsharded), world_size, reshard_after_forward=reshard)
        if is_late:
            model(x)
        for each in (model, unsharded):
            CASTS[cast](each)
        pairs.append((model, unsharded))
    (model, unsharded), (late, late_unsharded) = pairs
    low = x.to(unsharded[0].bias.dtype)
    model(low).sum().backward()
    model.reshard()
    with torch.no_grad():
        sentence = told(late, low)
    assert torch.equal(model(low), unsharded(low))
    assert "weight became torch." in sentence
    assert "Call model.to(dtype) before the first forward" in sentence
    assert torch.equal(late.float()(x), late_unsharded.float()(x)), "it goes on"


@pytest.mark.parametrize("preserve", [True, False])
@on_ranks(2)
def test_a_copy_that_is_sent_instead_of_a_written_shard_has_its_agreed_codes(rank, preserve):
    """Under CPU offload FSDP2 copies a shard to the device first, and sends the copy."""
    model, reference = sharded(2, preserve=preserve), sharded(2, preserve=preserve)
    for each in (model, reference):
        with torch.no_grad():
            each[0].weight.to_local().mul_(3.0 + rank)
    layer, mesh = model[0], model[0].weight.device_mesh
    local = layer.weight.to_local()
    copied = local.clone()
    (sent,), (scale_inv, _) = copied.fsdp_pre_all_gather(mesh, layer.weight.shape, (), layer, MixedPrecisionPolicy())
    reference(torch.ones(1, WIDTHS[0]))
    wanted = reference[0].weight.to_local().state
    assert torch.equal(sent[: wanted.rows], wanted.local_codes)
    assert torch.equal(scale_inv, wanted.scale_inv)
    assert torch.equal(local.state.local_codes, wanted.local_codes)


@on_ranks(2)
def test_seeding_after_a_write_that_is_not_preserved_does_the_same_on_shards_and_in_one_process(rank):
    found = []
    for place in (lambda model: model, lambda model: shard(model, 2)):
        model = place(deep(preserve=False))
        optimizer = masters_for(model, seed=False)
        model(torch.ones(1, WIDTHS[0])).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for number, weight in enumerate(weights(model)):
                values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
                weight.copy_(placed_like(values, weight))
        report = fti.seed_masters(optimizer, model, fallback="dequantize")
        found.append([whole(master) for master in optimizer.masters() if master.ndim == 2])
        assert set(report.sources.values()) == {"dequantize"}
        with pytest.raises(fti.MissingInitError, match="are not known"):
            fti.seed_masters(optimizer, model)
    assert all(map(torch.equal, *found))

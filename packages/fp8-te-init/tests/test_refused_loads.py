"""Loads that are refused half way: codes, scales, kept values, masters and the next step are those of before."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fp8_te_init as fti
from fp8_common import Fp8Error, get_recipe
from fp8_te_init._compat import local_of
from fp8_te_init._kept_in_module import kept_values
from tests.helpers.sharded_models import WIDTHS, mlp, shard

LAST = f"{len(WIDTHS) - 2}.weight"
ERRORS = (Fp8Error, RuntimeError, dcp.CheckpointException)


def built(recipe, seed):
    torch.manual_seed(seed)
    return fti.convert_linear(mlp(WIDTHS), recipe=recipe)


def checkpoint(recipe, form):
    torch.manual_seed(5)
    source = mlp(WIDTHS)
    return dict((source if form == "values" else fti.convert_linear(source, recipe=recipe)).state_dict())


def other_format(state, recipe):
    named = get_recipe(recipe)
    casts = {"weight": "e5m2", "grad_output": "e4m3"}
    changed = {name: dataclasses.replace(getattr(named, name), format=each) for name, each in casts.items()}
    theirs = checkpoint(dataclasses.replace(named, **changed), "codes")
    return state | {LAST: theirs[LAST]}


# In the last layer, so that the others have been loaded when it is found.
FAULTS = {
    "shape": lambda state, recipe: state | {LAST: state[LAST][:-1].clone()},
    "missing": lambda state, recipe: {key: value for key, value in state.items() if key != LAST},
    "unexpected": lambda state, recipe: state | {"another": torch.ones(3)},
    "bias": lambda state, recipe: state | {LAST.replace("weight", "bias"): torch.ones(3)},
    "format": other_format,
    "no scale": lambda state, recipe: {key: v for key, v in state.items() if key != f"{LAST}_quant_scale"},
    "scale shape": lambda state, recipe: state | {f"{LAST}_quant_scale": torch.ones(7, 7)},
}
OF_CODES = ("format", "no scale", "scale shape")


def facts(model, optimizer):
    """Return by name everything of the FP8 weights that is held here."""
    found = {}
    for name, layer in enumerate(model):
        state, kept = local_of(layer.weight).state, kept_values(layer, "weight")
        parts = {"codes": state.codes, "scale": state.scale, "history": state.history, "kept": kept}
        parts["master"] = None if optimizer is None else local_of(optimizer.master_of(layer.weight))
        found |= {f"{name} {part}": None if value is None else value.clone() for part, value in parts.items()}
    return found


def unlike(before, after):
    return [
        name
        for name, value in before.items()
        if (value is None) != (after[name] is None) or (value is not None and not torch.equal(value, after[name]))
    ]


def step(model, optimizer):
    for index, parameter in enumerate(model.parameters()):
        local = torch.randn(local_of(parameter).shape, generator=torch.Generator().manual_seed(index))
        gradient = torch.zeros_like(parameter)
        local_of(gradient).copy_(local)
        parameter.grad = gradient
    optimizer.step()


def plain(model, state, **options):
    model.load_state_dict(state, **options)


def whole(model, state, broadcast):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    sends = not broadcast or torch.distributed.get_rank() == 0
    set_model_state_dict(model, state if sends else {}, options=options)


def from_folder(model, state, folder):
    dcp.save(state, checkpoint_id=folder)
    target = model.state_dict()
    dcp.load(target, checkpoint_id=folder)
    model.load_state_dict(target)


def refused(rank, world_size, way, form, fault, recipe, seeded, folder):
    """Return what was said, and what differs: right after the refusal, and after one more step."""
    models = [built(recipe, 1) for _ in range(2)]
    if world_size > 1:
        models = [shard(model, world_size) for model in models]
    # float32 masters before the load, or three bytes each, or none yet
    make = functools.partial(fti.MasterOptimizer, torch.optim.SGD, lr=0.1)
    optimizers = [make(model.parameters()) if seeded else None for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        if optimizer is not None:
            fti.seed_masters(optimizer, model)
            step(model, optimizer)
    state = FAULTS[fault](checkpoint(recipe, form), recipe)
    before = facts(models[0], optimizers[0])
    with pytest.raises(ERRORS) as caught:
        WAYS[way](models[0], state, folder)
    after = unlike(before, facts(models[0], optimizers[0]))
    optimizers = [one or make(model.parameters()) for one, model in zip(optimizers, models, strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    return str(caught.value), after, unlike(*(facts(*pair) for pair in zip(models, optimizers, strict=True)))


WAYS = {
    "load": lambda model, state, folder: plain(model, state),
    "assign": lambda model, state, folder: plain(model, state, assign=True),
    "folder": from_folder,
    "each": lambda model, state, folder: whole(model, state, broadcast=False),
    "broadcast": lambda model, state, folder: whole(model, state, broadcast=True),
}
CASES = [("values", fault) for fault in FAULTS if fault not in OF_CODES] + [("codes", fault) for fault in FAULTS]
# dcp loads what it is asked for: keys that nobody asked for are no fault there
ALONE = [
    (way, *case) for way in ("load", "assign", "folder") for case in CASES if (way, case[1]) != ("folder", "unexpected")
]
# torch takes keys that are missing from the model itself where each rank has the whole
TOGETHER = [
    (way, *case)
    for way in ("each", "broadcast", "folder")
    for case in CASES
    if (way, case[1]) not in (("folder", "unexpected"), ("each", "missing"))
]


@pytest.mark.matrix("each", case=ALONE, recipe=["tensorwise_delayed", "rowwise"], seeded=["float32", None])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_load_that_is_refused_leaves_every_bit_as_it_was(case, recipe, seeded, tmp_path):
    message, after, later = refused(0, 1, *case, recipe, seeded, str(tmp_path))
    assert message
    assert after == []
    assert later == [], "and the next step is the one that it would have been"


@pytest.mark.distributed
@pytest.mark.matrix("each", case=TOGETHER, recipe=["tensorwise", "rowwise"], seeded=["float32", None])
def test_ranks_refuse_a_load_together_and_nothing_has_changed(run_ranks, case, recipe, seeded, tmp_path):
    for message, after, later in run_ranks(2, refused, *case, recipe, seeded, str(tmp_path)):
        assert message
        assert after == []
        assert later == []


@pytest.mark.parametrize("fault", ["shape", "missing", "no scale", "scale shape"])
def test_masters_are_seeded_from_all_of_a_checkpoint_or_from_nothing_of_it(fault):
    model = built("rowwise", 1)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    before = facts(model, optimizer)
    with pytest.raises(Fp8Error):
        fti.seed_masters(optimizer, model, checkpoint=FAULTS[fault](checkpoint("rowwise", "codes"), "rowwise"))
    assert unlike(before, facts(model, optimizer)) == []

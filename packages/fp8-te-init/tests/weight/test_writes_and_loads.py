"""What a load, an edit or another tool does to FP8 weights and their masters: right, or a sentence.

After each of them codes are the rounding of the masters, and nothing that somebody wrote is lost in silence.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8_te_init as fti
from fp8_common import Fp8Error
from primary_facts import are_codes_of_masters, codes, equal, masters, rounded
from tests.helpers.primary_models import RECIPES, Tied, built, loss_of, masters_for, plain, step, tied, train_tied

# ---------------------------------------------------------------- values and codes that take a weight's place


def data_of(layer, values):
    layer.weight.data = values


def another_parameter(layer, values):
    del layer.weight
    setattr(layer, "weight", nn.Parameter(values.clone()))  # noqa: B010  what loaders write


def written(layer, values):
    with torch.no_grad():
        layer.weight.copy_(values)


def reset(layer, values):
    torch.manual_seed(5)  # of the values
    layer.reset_parameters()


VALUES = {
    "a checkpoint of values is loaded": lambda net, given: net.load_state_dict(given.state_dict()),
    "a checkpoint of values is assigned": lambda net, given: net.load_state_dict(given.state_dict(), assign=True),
    "weight.data = values": lambda net, given: data_of(net[0], given[0].weight.detach()),
    "weight.data.copy_, which torch does not count": lambda net, given: net[0].weight.data.copy_(given[0].weight),
    "in place through .data": lambda net, given: net[0].weight.data.mul_(0).add_(given[0].weight),
    "layer.weight = nn.Parameter": lambda net, given: setattr(net[0], "weight", nn.Parameter(given[0].weight.clone())),
    "del, then setattr": lambda net, given: another_parameter(net[0], given[0].weight.detach()),
    "weight.copy_": lambda net, given: written(net[0], given[0].weight),
    "reset_parameters": lambda net, given: reset(net[0], given[0].weight),
}
CODES = {
    "a checkpoint of codes is loaded": VALUES["a checkpoint of values is loaded"],
    "a checkpoint of codes is assigned": VALUES["a checkpoint of values is assigned"],
    "weight.data = another weight's": lambda net, given: data_of(net[0], given[0].weight.data),
    "codes are copied through .data": lambda net, given: net[0].weight.data.copy_(given[0].weight),
}
NEW_OBJECT = ("del, then setattr", "a checkpoint of values is assigned", "a checkpoint of codes is assigned")


@pytest.mark.matrix(
    change=[*VALUES, *CODES],
    recipe=RECIPES,
    moment=["before seeding", "after seeding", "after a step", "after a touch of a master"],
)
def test_what_is_put_in_a_weights_place_is_kept_and_becomes_the_master(change, recipe, moment, caplog):
    """Masters undid a checkpoint that was loaded after seeding; exports and looks at masters saw the old values."""
    net = built(recipe)
    coded = fti.convert_linear(plain(5), recipe=recipe, preserve_high_precision_init_val=False)
    weight, exact, expected = net[0].weight, plain(5)[0].weight.detach(), coded[0].weight.dequantize()
    optimizer = masters_for(net, lr=0.0, seed=moment != "before seeding")
    if moment == "after a step":
        step(net, optimizer)
    if moment == "after a touch of a master":
        optimizer.master_of(net[0].weight).mul_(0.5)
    (VALUES | CODES)[change](net, plain(5) if change in VALUES else coded)
    assert isinstance(net[0].weight, fti.PrimaryFloat8Weight)
    assert torch.equal(net[0].weight.dequantize(), expected)
    assert torch.equal(net[0].weight_scale_e4m3, coded[0].weight.scale)
    if change in NEW_OBJECT:
        optimizer = masters_for(net, lr=0.0, seed=False)
    elif change != "weight.data = another weight's":
        assert net[0].weight is weight, "optimizers go on with it"
    # after seeding nothing is preserved, and where another object came no master lives that would take exact values
    keeps = change in VALUES and (moment == "before seeding" or change != "a checkpoint of values is assigned")
    start = exact if keeps else expected
    if moment == "before seeding" and change in VALUES:
        assert torch.equal(net[0].weight.get_high_precision_init_val(), exact)
    exported = fti.export_fp32_state_dict(net, optimizer)["0.weight"]
    for seen in (optimizer.master_of(net[0].weight), optimizer.masters()[0], exported):
        assert torch.equal(seen, start)
    step(net, optimizer)
    assert torch.equal(net[0].weight.dequantize(), expected)
    assert torch.equal(optimizer.master_of(net[0].weight), start)
    restarts = change in CODES and change not in NEW_OBJECT
    assert ("these masters start again from rounded values" in caplog.text) == restarts


def test_masters_keep_their_bits_where_they_were_set_by_hand_or_nothing_new_was_written(caplog):
    net, loaded, by_hand = built(), plain(5), torch.randn(40, 24)
    optimizer = masters_for(net, lr=0.0, seed=False)
    with torch.no_grad():
        optimizer.master_of(net[0].weight).copy_(by_hand)
        net[0].weight.copy_(net[0].weight.dequantize())
        net[2].weight.copy_(net[2].weight.dequantize())  # an exponential average that is put in and taken out again
    for _ in range(2):
        step(net, optimizer)
    assert equal(masters(net, optimizer), [by_hand, plain()[2].weight])
    net.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        optimizer.master_of(net[0].weight).copy_(loaded[0].weight)  # what the loaded codes were made of
    caplog.clear()
    step(net, optimizer)
    assert torch.equal(optimizer.master_of(net[0].weight), loaded[0].weight)


def test_a_float32_checkpoint_in_a_model_that_was_built_in_bfloat16_keeps_its_bits():
    net, loaded = built(dtype=torch.bfloat16).float(), plain(5)
    net.load_state_dict(loaded.state_dict())
    assert torch.equal(masters_for(net).master_of(net[0].weight), loaded[0].weight)


def test_low_precision_parameters_that_are_loaded_or_written_through_data_are_not_undone():
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        net = nn.Sequential(nn.Embedding(10, 16, dtype=torch.bfloat16), nn.Linear(16, 16, dtype=torch.bfloat16))
    optimizer = masters_for(net, lr=0.0, momentum=0.9)
    loaded = torch.randn(16).bfloat16()
    net.load_state_dict(net.state_dict() | {"1.bias": loaded})
    others = optimizer.master_of(net[0].weight)[1:].clone()
    net[0].weight.data[0] = 0  # a padding row
    for _ in range(2):
        net(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert torch.equal(net[1].bias, loaded)
    assert net[0].weight[0].abs().max() == 0
    assert torch.equal(optimizer.master_of(net[0].weight)[1:], others), "other elements keep their bits"


# ---------------------------------------------------------------- exchanges, casts, other shapes


def exchanged(a, b):
    held = a.weight.data
    a.weight.data = b.weight.data
    b.weight.data = held


@pytest.mark.parametrize("exchange", [exchanged, lambda a, b: torch.utils.swap_tensors(a.weight, b.weight)])
def test_exchanged_weights_take_their_scales_along(exchange):
    a, b, loaded = (built(seed=seed)[0] for seed in range(3))
    with torch.no_grad():
        b.weight.mul_(100)
    first, second = a.weight.dequantize(), b.weight.dequantize()
    exchange(a, b)
    assert equal([a.weight.dequantize(), b.weight.dequantize()], [second, first])
    loaded.load_state_dict(a.state_dict())
    assert torch.equal(loaded.weight.dequantize(), second)


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("move", [nn.Module.half, nn.Module.bfloat16, nn.Module.cpu])
def test_moves_and_casts_keep_starts_and_the_attributes_of_others(move, swaps):
    net = built()
    weight, start = net[0].weight, plain()[0].weight
    weight.main_grad, weight.tensor_model_parallel = torch.ones(40, 24), True
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        move(net)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert net[0].weight.tensor_model_parallel
    assert net[0].weight.main_grad.shape == (40, 24)
    assert torch.equal(net[0].weight.get_high_precision_init_val(), start)


def test_a_model_that_changes_its_dtype_goes_on_with_its_optimizer():
    net = built()
    optimizer = masters_for(net)
    before = optimizer.master_of(net[0].weight).clone()
    net.bfloat16()
    step(net, optimizer)
    assert not torch.equal(optimizer.master_of(net[0].weight), before)
    assert are_codes_of_masters(net, optimizer)


def test_an_assigned_parameter_keeps_whether_it_is_trained_and_may_have_another_shape():
    net = built()
    net[0].weight = nn.Parameter(torch.randn(40, 24), requires_grad=False)
    net[2].weight = nn.Parameter(torch.randn(7, 40))
    assert not net[0].weight.requires_grad
    assert isinstance(net[2].weight, fti.PrimaryFloat8Weight)
    assert net[2].weight.shape == (7, 40)


def test_a_loader_that_looks_at_a_model_on_the_meta_device_brings_values():
    """Transformers casts what it loads to the dtypes of the state dict, which were those of codes."""
    given = plain(3)
    with fti.fp8_model_init(recipe="rowwise", preserve_high_precision_init_val=True):
        with torch.device("meta"):
            net = plain()
        kinds = {name: value.dtype for name, value in net.state_dict().items()}
        assert kinds == {name: value.dtype for name, value in given.state_dict().items()}
        for name, value in given.state_dict().items():
            owner, _, last = name.rpartition(".")
            setattr(net.get_submodule(owner), last, nn.Parameter(value.to(kinds[name])))
    assert torch.equal(net[0].weight.state.codes, fti.convert_linear(given, recipe="rowwise")[0].weight.state.codes)
    assert "0.weight_scale_e4m3" in net.state_dict()


def test_pruning_works_and_its_removal_leaves_an_fp8_weight():
    net = built()
    prune.l1_unstructured(net[0], "weight", amount=0.3)
    prune.remove(net[0], "weight")
    assert isinstance(net[0].weight, fti.PrimaryFloat8Weight)
    assert (net[0].weight.dequantize() == 0).sum() >= 0.29 * 24 * 40
    loss_of(net).backward()


def test_a_layer_from_elsewhere_keeps_the_values_that_it_is_given():
    layer, values, loaded = nn.Linear(24, 40), nn.Parameter(torch.randn(40, 24)), plain(5)[0]
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        layer.weight = values
        assert layer.weight is values
        layer.load_state_dict(loaded.state_dict(), assign=True)
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, loaded.weight)


# ---------------------------------------------------------------- what is refused


def put_behind_its_back(net):
    net[0]._parameters["weight"] = nn.Parameter(torch.ones(40, 24))
    loss_of(net)


def step_of_what_was_assigned(net):
    values = nn.Parameter(torch.randn(40, 24))
    net[0].weight = values
    loss_of(net).backward()
    torch.optim.SGD([values], lr=0.1).step()


def step_of_what_was_converted(net):
    net = plain()
    early = torch.optim.SGD(net.parameters(), lr=1.0)
    fti.convert_linear(net)
    loss_of(net).backward()
    early.step()


def thawed(net):
    net[0].weight.requires_grad_(False)
    optimizer = masters_for(net, seed=False)
    net[0].weight.requires_grad_(True)
    step(net, optimizer)


def averaged(net, **options):
    """Scales are buffers, which `AveragedModel` copies from the model: they do not belong to its codes then."""
    optimizer, average = masters_for(net, lr=0.5), AveragedModel(net, **options)
    for _ in range(3):
        step(net, optimizer)
        average.update_parameters(net)
    average(torch.ones(1, 24))


def copied_with_other_scales(net):
    net[0].weight.scale.mul_(2)
    copy.deepcopy(net)(torch.ones(1, 24))


REFUSED = {
    "another shape": (
        lambda net: data_of(net[0], torch.ones(40, 25)),
        r"FP8 weight \(40, 24\) of torch.float32 on cpu takes values like it",
    ),
    "a parameter of integers": (
        lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(40, 24, dtype=torch.uint8), requires_grad=False)),
        "A parameter of torch.uint8 was assigned",
    ),
    "another device": (lambda net: data_of(net[0], torch.ones(40, 24, device="meta")), "on meta"),
    "a bucket": (lambda net: data_of(net[0], torch.ones(4000)[:960].view(40, 24)), "a part of a larger buffer"),
    "codes of another format": (lambda net: written(net[0], torch.zeros(40, 24).to(torch.float8_e5m2)), "float8_e5m2"),
    "a plain parameter behind the layer's back": (put_behind_its_back, "replaced by a plain parameter through"),
    "an optimizer of the assigned object": (
        step_of_what_was_assigned,
        "the FP8 layer that it was assigned to replaced",
    ),
    "an optimizer from before the conversion": (step_of_what_was_converted, r"holds 2 of 4 .*convert_linear replaced"),
    "a weight that was thawed": (thawed, r"shape \(40, 24\) was frozen when this MasterOptimizer took it"),
    "an average takes scales without their codes": (averaged, "overwritten without the codes"),
    "a moving average": (
        lambda net: averaged(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "average the masters of a MasterOptimizer",
    ),
    "a copy of what has other scales": (copied_with_other_scales, "overwritten without the codes"),
    "memory that is shared with processes": (nn.Module.share_memory, "cannot be shared between processes"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_right_raises(change):
    net, (do, told) = built(), REFUSED[change]
    before = net[0].weight.state.codes.clone()
    with pytest.raises(Fp8Error, match=told):
        do(net)
    if do.__name__ == "<lambda>" and change != "a moving average":
        assert torch.equal(net[0].weight.state.codes, before)


def test_the_backward_of_a_forward_before_a_step_raises_as_for_plain_weights():
    net = built()
    optimizer, late = masters_for(net), loss_of(net)
    step(net, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


# ---------------------------------------------------------------- two layers, or a layer and an embedding, share one


def shares(state):
    return len({state[f"{name}.weight"].untyped_storage().data_ptr() for name in ("other", "head")}) == 1


TIED_CHANGES = {
    "values are loaded": lambda m: m.load_state_dict(Tied().state_dict()),
    "codes are loaded": lambda m: m.load_state_dict(tied(5).state_dict()),
    "dtype": lambda m: m.bfloat16(),
    "assigned": lambda m: setattr(m.other, "weight", nn.Parameter(torch.randn(16, 16))),
    "data": lambda m: m.head.weight.data.copy_(torch.ones(16, 16)),
    "reset": lambda m: m.other.reset_parameters(),
}


@pytest.mark.parametrize("change", TIED_CHANGES)
def test_changes_reach_both_layers_and_the_tie_stays(change):
    model = tied()
    before = model.other.weight.dequantize()
    TIED_CHANGES[change](model)
    for each in (model, copy.deepcopy(model)):
        assert each.head.weight is each.other.weight
    assert change == "dtype" or not torch.equal(model.head.weight.dequantize(), before)


@pytest.mark.parametrize("first", ["linear", "converted", "head"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tie_has_one_master_and_one_storage_and_a_resumed_model_goes_on_with_its_bits(recipe, first, tmp_path):
    is_converted, first = first == "converted", "linear" if first == "converted" else first
    model, other = (tied(seed, first, recipe, converted=is_converted) for seed in (0, 1))
    assert len(list(model.parameters())) == 1
    fti.rescale_(model)
    optimizer, resumed = masters_for(model, torch.optim.AdamW), masters_for(other, torch.optim.AdamW)
    torch.manual_seed(0)
    assert torch.equal(optimizer.masters()[0], Tied(first).head.weight), "seeded with what it was before rounding"
    train_tied(model, optimizer)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    torch.save(saved[0], tmp_path / "file")
    exported = fti.export_fp32_state_dict(model, optimizer)
    for state in (Tied(first).state_dict(), model.state_dict(), torch.load(tmp_path / "file"), exported):
        assert shares(state), "as plain ones do"
    Tied(first).load_state_dict(exported)
    assert torch.equal(exported["head.weight"], optimizer.masters()[0])
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, its in ((model, optimizer), (other, resumed)):
        train_tied(each, its)
        assert each.head.weight is each.other.weight
        assert fti.memory_report(each).copies == 0
    assert equal(
        [other.head.weight.detach() + 0, *resumed.masters()], [model.head.weight.detach() + 0, *optimizer.masters()]
    )


def test_an_embedding_that_is_built_first_keeps_its_values_and_a_head_gives_it_codes():
    plain_head, fp8_head = tied(first="embedding"), tied(first="head")
    train_tied(plain_head, masters_for(plain_head, seed=False))
    assert plain_head.head.weight is plain_head.other.weight
    assert type(plain_head.head) is nn.Linear
    assert type(fp8_head.head) is fti.PrimaryFloat8Linear
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Embedding(16, 16), nn.Linear(16, 16))
    model[1].weight, model[3].weight = model[0].weight, model[2].weight
    fti.convert_linear(model)
    assert model[0].weight is model[1].weight
    assert type(model[3]) is nn.Linear, "an embedding would embed rounded values"


# ---------------------------------------------------------------- writes that are initializations


def parts(weight):
    with torch.no_grad():
        weight[3].zero_()
        weight[:, 5:7] *= 2.0
        weight.data[1, 1] = 0.125


INITS = [
    lambda w: nn.init.normal_(w, 0.0, 0.02),
    lambda w: nn.init.trunc_normal_(w, std=0.02),
    lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
    lambda w: nn.init.xavier_normal_(w),
    lambda w: nn.init.constant_(w, 0.3),
    lambda w: nn.init.zeros_(w),
    lambda w: nn.init.orthogonal_(w),
    parts,
]


@pytest.mark.parametrize("init", INITS)
def test_every_initialization_and_write_to_a_part_acts_on_the_values_before_rounding(init):
    net, twin = built(), plain()
    for each in (net, twin):
        torch.manual_seed(7)
        init(each[0].weight)
    assert torch.equal(net[0].weight.get_high_precision_init_val(), twin[0].weight)
    assert torch.equal(net[0].weight.dequantize(), rounded(twin[0].weight.detach()))


def test_putting_back_the_values_that_are_there_changes_nothing():
    net = built()
    before, start = codes(net), net[0].weight.get_high_precision_init_val()
    with torch.no_grad():
        net[0].weight.copy_(net[0].weight.dequantize())
        net[0].weight.data.copy_(net[0].weight.detach().clone().float())
    assert equal(codes(net), before)
    assert torch.equal(net[0].weight.get_high_precision_init_val(), start)

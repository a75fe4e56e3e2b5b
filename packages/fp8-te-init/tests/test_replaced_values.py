"""Values that are put in a weight's place, masters that are edited, and what optimizers and exports make of both."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8_te_init as fti
from fp8_common import Fp8Error

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


def model(dtype=torch.float32, preserve=True, **options) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=preserve, **options):
        return nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.GELU(), nn.Linear(40, 16, dtype=dtype))


def plain(seed=0, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.GELU(), nn.Linear(40, 16, dtype=dtype))


def loss_of(net, rows=8) -> torch.Tensor:
    return (net(torch.ones(rows, 24)) - 1).square().mean()


def optimizer_of(net, cls=torch.optim.SGD, **options):
    return fti.MasterOptimizer(cls, net.parameters(), **({"lr": 0.1} | options))


def rounded_from(values, recipe="tensorwise") -> torch.Tensor:
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(values)
    return fti.convert_linear(layer, recipe=recipe).weight.dequantize()


# ---------------------------------------------------------------- weight.data = x, layer.weight = nn.Parameter(x)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["data", "alias", "parameter", "setattr", "merge"])
def test_values_that_are_put_in_a_weights_place_are_quantized_and_kept(how, recipe):
    net, values = model(recipe=recipe), plain(5)[0].weight.detach()
    layer, before = net[0], net[0].weight
    if how == "data":
        layer.weight.data = values
    elif how == "alias":
        layer.weight.data = fti.convert_linear(plain(5), recipe=recipe)[0].weight.data
        values = layer.weight.dequantize()
    elif how == "parameter":
        layer.weight = nn.Parameter(values.clone())
    elif how == "setattr":
        del layer.weight
        setattr(layer, "weight", nn.Parameter(values.clone()))  # noqa: B010  what loaders write
    else:
        delta = values - layer.weight.get_high_precision_init_val()
        layer.weight.data += delta
        values = layer.weight.get_high_precision_init_val()
    assert isinstance(layer.weight, fti.PrimaryFloat8Weight)
    assert torch.equal(layer.weight.dequantize(), rounded_from(values, recipe))
    assert torch.equal(layer(torch.eye(24)), layer(torch.eye(24)))
    if how != "alias":
        assert torch.equal(layer.weight.get_high_precision_init_val(), values)
    if how != "setattr":
        assert layer.weight is before, "optimizers go on with it"


def test_an_assigned_parameter_keeps_whether_it_is_trained_and_may_have_another_shape():
    net = model()
    net[0].weight = nn.Parameter(torch.randn(40, 24), requires_grad=False)
    assert not net[0].weight.requires_grad
    net[2].weight = nn.Parameter(torch.randn(7, 40))
    assert isinstance(net[2].weight, fti.PrimaryFloat8Weight)
    assert net[2].weight.shape == (7, 40)


def test_pruning_works_and_its_removal_leaves_an_fp8_weight():
    net, exact = model(), plain()
    prune.l1_unstructured(net[0], "weight", amount=0.3)
    prune.l1_unstructured(exact[0], "weight", amount=0.3)
    prune.remove(net[0], "weight")
    assert isinstance(net[0].weight, fti.PrimaryFloat8Weight)
    assert (net[0].weight.dequantize() == 0).sum() >= 0.29 * 24 * 40
    loss_of(net).backward()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (torch.ones(40, 25), r"FP8 weight \(40, 24\) of torch.float32 on cpu takes values like it"),
        (torch.ones(40, 24, dtype=torch.float64), "got .* torch.float64"),
        (torch.ones(40, 24, device="meta"), "on meta"),
        (torch.ones(2, 40, 24)[1], "a part of a larger buffer"),
        (torch.ones(4000)[:960].view(40, 24), "a part of a larger buffer"),
    ],
    ids=["shape", "dtype", "device", "slice", "bucket"],
)
def test_what_a_weight_cannot_alias_is_refused(values, told):
    net = model()
    before = net[0].weight.dequantize()
    with pytest.raises(Fp8Error, match=told):
        net[0].weight.data = values
    assert torch.equal(net[0].weight.dequantize(), before)


def test_a_plain_parameter_that_was_put_there_behind_the_layers_back_is_refused():
    net = model()
    net[0]._parameters["weight"] = nn.Parameter(torch.ones(40, 24))
    with pytest.raises(Fp8Error, match="replaced by a plain parameter behind its back"):
        loss_of(net)


def test_an_optimizer_of_the_assigned_object_does_not_step():
    net, values = model(), nn.Parameter(torch.randn(40, 24))
    net[0].weight = values
    loss_of(net).backward()
    with pytest.raises(Fp8Error, match="the FP8 layer that it was assigned to replaced them"):
        torch.optim.SGD([values], lr=0.1).step()


# ---------------------------------------------------------------- masters that were touched


@pytest.mark.parametrize("touch", ["read-modify", "scale"])
def test_a_loaded_checkpoint_is_not_undone_though_a_master_was_touched_before(touch):
    net, loaded = model(), plain(5)
    optimizer = optimizer_of(net, lr=0.0)
    fti.seed_masters(optimizer, net)
    with torch.no_grad():
        optimizer.master_of(net[0].weight).mul_(1.0 if touch == "read-modify" else 0.5)
    net.load_state_dict(loaded.state_dict())
    expected = net[0].weight.dequantize()
    loss_of(net).backward()
    optimizer.step()
    assert torch.equal(net[0].weight.dequantize(), expected)


def test_masters_that_were_set_to_what_the_loaded_codes_were_made_of_stay():
    net, loaded = model(), plain(5)
    optimizer = optimizer_of(net, lr=0.0)
    fti.seed_masters(optimizer, net)
    net.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        optimizer.master_of(net[0].weight).copy_(loaded[0].weight)
    loss_of(net).backward()
    optimizer.step()
    assert torch.equal(optimizer.master_of(net[0].weight), loaded[0].weight)


# ---------------------------------------------------------------- optimizers with state in their groups


class Distance(torch.optim.SGD):
    """Keeps state in its groups as Prodigy (`d`) and schedule-free optimizers (`k`, keys added in a step) do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["d"] = 1e-6

    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = 2 * group.get("d", 1e-6)
            group["scheduled"] = group.get("scheduled", 0) + 1
        return super().step(closure)


def test_state_that_optimizers_keep_in_their_groups_is_neither_reset_nor_lost():
    net = model()
    optimizer, reference = optimizer_of(net, Distance), Distance(plain().parameters())
    for _ in range(3):
        loss_of(net).backward()
        optimizer.step()
        reference.step()
    for key in ("d", "scheduled"):
        assert optimizer.param_groups[0][key] == reference.param_groups[0][key]
        assert optimizer.inner.param_groups[0][key] == reference.param_groups[0][key]
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["scheduled"] == 3
    resumed = optimizer_of(model(), Distance)
    resumed.load_state_dict(saved)
    assert resumed.inner.param_groups[0]["scheduled"] == 3
    assert resumed.inner.param_groups[0]["d"] == reference.param_groups[0]["d"]


def test_schedulers_and_later_groups_still_reach_the_inner_optimizer():
    net = model()
    optimizer = fti.MasterOptimizer(Distance, net[0].parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loss_of(net).backward()
    optimizer.step()
    scheduler.step()
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 0.3})
    optimizer.step()
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.2, 0.3]


# ---------------------------------------------------------------- releases


def test_a_step_of_a_model_drops_nothing_of_a_copied_twin_or_of_others_from_the_same_block(caplog):
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        first, second = (nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 16)) for _ in range(2))
    twin = copy.deepcopy(first)
    starts = [net[0].weight.get_high_precision_init_val().clone() for net in (twin, second)]
    optimizer = optimizer_of(first)
    loss_of(first).backward()
    optimizer.step()
    assert fti.memory_report(first).copies == 0
    for net, start in zip((twin, second), starts, strict=True):
        later = optimizer_of(net)
        assert torch.equal(later.master_of(net[0].weight), start)
    assert not caplog.text


def test_a_weight_that_gets_its_master_after_its_values_were_dropped_is_told_of(caplog):
    net = model()
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net[0].parameters(), lr=0.1)
    fti.seed_masters(optimizer, net)
    assert not caplog.text
    optimizer.add_param_group({"params": list(net[2].parameters())})
    assert "The masters of 1 FP8 weights start from rounded values" in caplog.text


def test_a_weight_that_no_optimizer_has_yet_keeps_its_values_over_a_step():
    net, exact = model(), plain()
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net[0].parameters(), lr=0.1)
    loss_of(net).backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(net[2].parameters())})
    assert torch.equal(optimizer.master_of(net[2].weight), exact[2].weight)


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("preserve", [True])
def test_a_float32_checkpoint_in_a_model_that_was_built_in_bfloat16_keeps_its_bits(preserve):
    net, loaded = model(torch.bfloat16, preserve=preserve).float(), plain(5)
    net.load_state_dict(loaded.state_dict())
    optimizer = optimizer_of(net)
    assert set(fti.seed_masters(optimizer, net).sources.values()) == {"init"}
    assert torch.equal(optimizer.master_of(net[0].weight), loaded[0].weight)


def test_an_export_takes_every_parameter_from_its_master():
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        net = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 16)).bfloat16()
    optimizer = optimizer_of(net)
    with torch.no_grad():
        for master in optimizer.masters():
            master.add_(1e-4)
    optimizer.write_back()
    exported = fti.export_fp32_state_dict(net, optimizer)
    for name, parameter in net.named_parameters():
        assert torch.equal(exported[name], optimizer.master_of(parameter)), name
    assert not torch.equal(exported["1.weight"], net[1].weight.float())


# ---------------------------------------------------------------- autograd, averages


def test_the_backward_of_a_forward_before_a_step_is_refused_as_for_plain_weights():
    for net, make in ((plain(), lambda n: torch.optim.SGD(n.parameters(), lr=0.1)), (model(), optimizer_of)):
        optimizer = make(net)
        late = loss_of(net)
        loss_of(net).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()


def test_an_average_of_masters_follows_the_average_of_a_plain_model():
    """The recipe of the guide; an `AveragedModel` of the FP8 weights themselves rounds at every update."""
    net, decay = model(), 0.9
    optimizer = optimizer_of(net, lr=0.5)
    fti.seed_masters(optimizer, net)
    masters = nn.ParameterList(optimizer.masters())
    average = AveragedModel(masters, multi_avg_fn=get_ema_multi_avg_fn(decay))
    expected = [master.clone() for master in optimizer.masters()]
    average.update_parameters(masters)
    for _ in range(20):
        loss_of(net).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(nn.ParameterList(optimizer.masters()))
        expected = [decay * old + (1 - decay) * new for old, new in zip(expected, optimizer.masters(), strict=True)]
    for ours, exact in zip(average.module, expected, strict=True):
        torch.testing.assert_close(ours.detach(), exact)
    evaluated = copy.deepcopy(net)
    weights = [parameter for parameter in net.parameters() if optimizer.master_of(parameter) is not None]
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    with torch.no_grad():
        for weight, mean in zip(weights, average.module, strict=True):
            evaluated.get_parameter(names[id(weight)]).copy_(mean)
    assert torch.equal(evaluated[0].weight.dequantize(), rounded_from(average.module[0].detach()))


def test_an_average_of_fp8_weights_themselves_is_refused():
    """Scales are buffers, which `AveragedModel` copies from the model: they do not belong to its codes then."""
    net = model()
    optimizer = optimizer_of(net, lr=0.5)
    fti.seed_masters(optimizer, net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def averaged():
        for _ in range(3):
            loss_of(net).backward()
            optimizer.step()
            average.update_parameters(net)

    with pytest.raises(Fp8Error, match="average the masters of a MasterOptimizer"):
        averaged()

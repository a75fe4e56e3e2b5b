"""Parameters that are exchanged, moved or removed in the groups of a MasterOptimizer."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error
from primary_facts import are_codes_of_masters, codes, equal, masters, weights
from tests.helpers.primary_models import RECIPES, built, deep, loss_of, masters_for, step
from tests.helpers.ranks import on_ranks
from tests.helpers.sharded_models import WIDTHS, shard
from tests.helpers.tensors import placed_like, whole


def exchange(optimizer, model, change):
    """Do as Accelerate does: put tensors with addresses in the place of parameters, then those of the changed model."""
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            group["params"][index] = torch.empty(1)
            group["params"][index].data_ptr = parameter.data_ptr()
    change(model)
    new = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [new[names[placeholder.data_ptr]] for placeholder in group["params"]]


def step_of(model, optimizer, seed):
    """Make a step with the same gradients on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = placed_like(gradient, parameter)
    optimizer.step()
    optimizer.zero_grad()


MOMENTS = ["before seeding", "after seeding", "after steps"]


@pytest.mark.matrix(
    "each",
    world_size=[1, 2, 3],
    moment=MOMENTS,
    recipe=RECIPES,
    dtype=[torch.float32, torch.bfloat16],
    preserve=[True, False],
)
@on_ranks(lambda given: given["world_size"])
def test_an_optimizer_that_was_made_before_the_sharding_follows_its_exchanged_parameters(
    rank, world_size, moment, recipe, dtype, preserve
):
    """Accelerate makes it so; the step raised, and before that it trained nothing."""
    model, twin = (deep(recipe, dtype=dtype, preserve=preserve) for _ in range(2))
    both = [(each, masters_for(each, torch.optim.AdamW, seed=False)) for each in (model, twin)]
    for each, optimizer in both:
        if moment != "before seeding":
            fti.seed_masters(optimizer, each, fallback=None if preserve else "dequantize")
        for seed in range(2 if moment == "after steps" else 0):
            step_of(each, optimizer, seed)
    optimizer, reference = both[0][1], both[1][1]
    state = weakref.ref(model[0].weight.state)
    exchange(optimizer, model, lambda model: shard(model, world_size))
    if moment == "before seeding" and preserve:
        assert set(fti.seed_masters(optimizer, model).sources.values()) == {"init"}
    for seed in range(2, 4):
        assert equal([whole(each) for each in masters(model, optimizer)], masters(twin, reference))
        assert are_codes_of_masters(model, optimizer)
        step_of(model, optimizer, seed)
        step_of(twin, reference, seed)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(ours.detach() * 1), theirs.detach() * 1)
    assert equal([whole(each) for each in optimizer.masters()], reference.masters())
    gc.collect()
    assert state() is None, "no whole weight stays"
    assert fti.memory_report(model, optimizer).masters * world_size <= 4 * (world_size + 1) * sum(
        parameter.numel() for parameter in twin.parameters()
    )


class Sorted(torch.optim.AdamW):
    """Sorts its parameters, as some optimizers of matrices do."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            group["params"] = sorted(group["params"], key=torch.Tensor.numel)


def test_moments_follow_their_own_parameters_in_an_optimizer_that_sorts_them():
    net, twin = (deep(widths=(24, 24, 24, 8)) for _ in range(2))
    both = [(each, masters_for(each, Sorted, lr=1e-2)) for each in (net, twin)]
    for each, optimizer in both:
        step_of(each, optimizer, 0)
    optimizer, reference = both[0][1], both[1][1]
    copied = copy.deepcopy(net)
    optimizer.param_groups[0]["params"] = list(copied.parameters())
    for each, own in ((copied, optimizer), (twin, reference)):
        step_of(each, own, 1)
    assert equal(masters(copied, optimizer), masters(twin, reference))


def test_an_optimizer_trains_another_model_that_is_put_into_its_groups():
    net, other = built(), built(seed=1)
    optimizer = masters_for(net)
    optimizer.param_groups[0]["params"] = list(other.parameters())
    before = codes(net)
    start = other[0].weight.get_high_precision_init_val()
    assert torch.equal(optimizer.master_of(other[0].weight), start)
    step(other, optimizer)
    assert are_codes_of_masters(other, optimizer)
    assert not torch.equal(optimizer.master_of(other[0].weight), start)
    assert equal(codes(net), before)
    assert optimizer.master_of(net[0].weight) is None


def test_parameters_that_are_moved_between_groups_get_the_options_of_the_new_one_and_removed_ones_stay():
    net = built()
    (one, _, two) = net
    groups = [{"params": list(one.parameters()), "lr": 0.0}, {"params": list(two.parameters()), "lr": 0.1}]
    optimizer = masters_for(net, seed=False)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, groups, lr=0.1)
    optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = [two.weight, two.bias], [one.weight]
    before, bias = codes(net), one.bias.detach().clone()
    step(net, optimizer)
    assert [torch.equal(a, b) for a, b in zip(before, codes(net), strict=True)] == [False, True]
    assert torch.equal(one.bias, bias)
    assert optimizer.inner.param_groups[1]["params"] == [optimizer.master_of(one.weight)]


def lengthened(net, group):
    group["params"].append(nn.Parameter(torch.ones(3)))


def reshaped(net, group):
    group["params"][0] = nn.Parameter(torch.ones(3))


def doubled(net, group):
    group["params"] = [group["params"][1], nn.Parameter(torch.ones(40)), *group["params"][2:]]


@pytest.mark.parametrize("change", [lengthened, reshaped, doubled])
def test_what_is_instead_of_no_parameter_is_an_error_that_names_the_cure(change):
    net = built()
    optimizer = masters_for(net)
    change(net, optimizer.param_groups[0])
    loss_of(net).backward()
    told = r"replaces no other of this shape: make the optimizer .*, after fully_shard, or use add_param_group"
    for use in (optimizer.step, optimizer.state_dict, optimizer.masters, lambda: fti.seed_masters(optimizer, built())):
        with pytest.raises(Fp8Error, match=told):
            use()


@on_ranks(2)
def test_shards_that_are_exchanged_for_whole_weights_name_the_cure(rank):
    model = shard(deep(), 2)
    optimizer = masters_for(model)
    optimizer.param_groups[0]["params"] = list(deep().parameters())
    with pytest.raises(Fp8Error, match="save and load the optimizer to reshard it"):
        optimizer.step()
    assert model(torch.ones(1, WIDTHS[0])).isfinite().all()
    assert len(weights(model)) == 4

"""Delayed scaling: the history oracle, first steps, skipped steps, recomputation, and scales nobody synchronized."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import fp8_common
import fp8_torch_fsdp as f8
from fp8_common.torch import amax_to_scale
from fp8_common.torch.delayed import fitting
from fp8_torch_fsdp.scales import sync
from fp8_torch_fsdp.scales.delayed import delayed_scales
from fp8_torch_fsdp.scales.invalidate import nan_if_stale
from fsdp_models import Experts, converted, seeded, shard, with_delayed
from fsdp_training import batch, loss_of, train, unlike, whole
from tests.helpers.ranks import on_ranks


def layer(**delayed):
    return converted(seeded(lambda: nn.Linear(24, 16)), "tensorwise_delayed", delayed=with_delayed(**delayed))


class Stack(Experts):
    """Two experts that share the rows of an input."""

    def forward(self, x):
        return super().forward(x, torch.tensor([3, len(x)]))

    @property
    def layouts(self):
        return {Stack: f8.ExpertLayout(forward=Stack.forward, weights=self.names)}


def stack(**delayed):
    return converted(Stack(2, weight=(16, 24)), "tensorwise_delayed", delayed=with_delayed(**delayed))


KINDS = pytest.mark.parametrize("make", [layer, stack])


def step_of(model, x, optimizer=None):
    model(x).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize(("name", "most"), [("e4m3", 1 + 2.0**-4), ("e5m2", 1 + 2.0**-3)])
def test_a_scale_of_earlier_steps_fits_if_it_clips_no_more_than_a_rounding_and_wastes_at_most_half(name, most):
    ends = np.float32([0.5, 1, most]), np.nextafter(np.float32([0.5, most]), np.float32([0, 2]))
    scales, dynamic = 8 * torch.tensor(np.concatenate(ends)), torch.full((5,), 8.0)
    fits = fitting(torch.tensor(True), scales, dynamic, fp8_common.formats.get_format(name))
    assert fits.tolist() == [True, True, True, False, False]
    assert not fitting(torch.tensor(False), scales, dynamic, fp8_common.formats.get_format(name)).any()


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("initial", ["one", "dynamic"])
def test_scales_follow_the_numpy_oracle(algo, margin, initial):
    model = layer(scale_fn=algo, margin=margin, initial=initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window, scale = np.zeros(3, np.float32), np.float32(1)
    policy = model.config.input.policy
    for step in range(7):
        x = batch(0, step) * 3.0**-step
        model(x).sum().backward()
        amax = fp8_common.amax(x.numpy())
        if step == 0 and initial == "dynamic":
            assert not model.fp8_input.ready
            used = fp8_common.amax_to_scale(amax, "e4m3", policy)
            assert model.fp8_input.current(torch.from_numpy(amax), record=False).numpy() == used
        else:
            assert model.fp8_input.ready
            assert model.fp8_input.scale.numpy() == scale
            assert np.array_equal(model.fp8_input.history.numpy(), window)
        window, reduced = fp8_common.numerics.update_history(window, amax, algo)
        scale = fp8_common.amax_to_scale(reduced, "e4m3", policy, scale)
        optimizer.step()
        optimizer.zero_grad()


@KINDS
def test_evaluation_observes_nothing_and_a_second_synchronization_changes_nothing(make):
    model = make().eval()
    model(batch(0))
    with torch.no_grad():
        model.train()(batch(0))
    assert all((state.observed < 0).all() for state in delayed_scales(model))
    f8.synchronize_scales(model)
    assert not any(state.ready.any() for state in delayed_scales(model))
    step_of(model, batch(0))
    assert unlike(whole(model), whole(model)) == []


@KINDS
def test_an_unsynchronized_training_forward_raises(make):
    model = make()
    model._forward_pre_hooks.clear()  # those that synchronize: as parts of models are called
    step_of(model, batch(0), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="synchronize_scales"):
        model(batch(0))
    model.eval()(batch(0))
    f8.synchronize_scales(model)
    model.train()(batch(0))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_amax_that_is_not_finite_is_not_recorded_and_hides_no_good_one(bad):
    model = layer()
    for value in (2.0, bad, 1.0):  # three micro-batches of a step
        step_of(model, torch.full((8, 24), value))
    f8.synchronize_scales(model)
    assert model.fp8_input.history.tolist() == [2, 0, 0]
    assert model.fp8_input.scale == 224


class ScaleOnAGpu(torch.Tensor):
    """A scale on a CPU that says it is on a GPU."""

    device = torch.device("cuda")


def test_a_stale_scale_is_nan_on_a_gpu_because_an_assertion_would_end_the_process():
    scale = torch.tensor([1.0, 2.0]).as_subclass(ScaleOnAGpu)
    assert nan_if_stale(scale, torch.tensor(False), "stale").tolist() == [1.0, 2.0]
    assert nan_if_stale(scale, torch.tensor(True), "stale").isnan().all()


@KINDS
def test_state_survives_copies_and_round_trips_and_without_it_scales_start_again(make):
    model, other = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        step_of(model, batch(0, step), optimizer)
    f8.synchronize_scales(model)
    names = {"weight", "bias"} if make is layer else {"weight"}
    assert set(model.state_dict()) == names, "those of what was not converted"
    copied = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    f8.DelayedState(other).load_state_dict(f8.DelayedState(model).state_dict())
    for twin in (copied, other):
        assert torch.equal(twin(batch(9)), model(batch(9)))
        pairs = zip(delayed_scales(twin), delayed_scales(model), strict=True)
        assert all(torch.equal(a.scale, b.scale) and a is not b for a, b in pairs)
    f8.DelayedState(other).load_state_dict({})
    assert not any(state.ready.any() for state in delayed_scales(other))
    assert torch.equal(other.weight.plain, model.weight.plain)
    plain = f8.unconvert(model)
    assert set(plain.state_dict()) == names
    assert not list(plain.children())


def test_an_edited_stack_takes_the_scale_of_the_edited_expert_again():
    low = stack()
    optimizer = torch.optim.SGD(low.parameters(), lr=0.0)
    for _ in range(2):
        step_of(low, batch(0), optimizer)
    with torch.no_grad():
        low.weight.mul_(torch.tensor([8.0, 1.0])[:, None, None])
    low(batch(0))
    amax, state = low.weight.detach().abs().amax((1, 2)), low.fp8_weight_weight
    used = state.current(amax, record=False)
    assert torch.equal(used, torch.stack([amax_to_scale(amax, "e4m3")[0], state.scale[1]]))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_scales_are_float32_whatever_the_default_dtype_is_and_the_model_becomes(default):
    torch.set_default_dtype(default)
    try:
        model = converted(nn.Linear(24, 16).float(), "tensorwise_delayed")
        for _ in range(2):
            step_of(model, torch.full((8, 24), 1.1, dtype=torch.float32))
        f8.synchronize_scales(model)
    finally:
        torch.set_default_dtype(torch.float32)
    scale = model.to(torch.bfloat16).fp8_input.scale
    assert (scale.dtype, model.fp8_input.history.dtype) == (torch.float32, torch.float32)
    assert scale == torch.div(torch.tensor(448.0), torch.tensor(1.1))


# ---------------------------------------------------------------- zeros, and steps at other places


def test_a_branch_that_starts_at_zero_learns_from_its_second_step_on():
    """As those of LoRA and many transformers do."""
    model = converted(
        seeded(lambda: nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))),
        "tensorwise_delayed",
    )
    nn.init.zeros_(model[1].weight)
    seen = train(model, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), before_step=lambda m: m[0].weight.grad.any())
    assert seen[1::2] == [False, True, True], "an amax of 0 says nothing about the scale of the next gradient"
    assert model[0].fp8_grad_output.ready


def test_a_weight_that_is_edited_to_zero_takes_the_scale_of_its_next_values():
    model, x = layer(), torch.ones(8, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step_of(model, x, optimizer)
    nn.init.zeros_(model.weight)
    step_of(model, x, optimizer)
    assert (model(x) - model.bias).abs().min() > 0, "weights of 1e-4 are not 0 after the step"


class Recomputed(nn.Module):
    """A recomputed layer and one that is trained by an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x):
        # both from the input: a step of the head's optimizer leaves what the layer's backward needs
        return checkpoint(self.layer, x, use_reentrant=False), self.head(x)


def test_a_step_before_the_backward_leaves_recomputation_alone():
    model = converted(seeded(Recomputed), "tensorwise_delayed")
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for _ in range(3):
        recomputed, output = model(torch.ones(4, 24))
        output.sum().backward()
        head.step()
        recomputed.sum().backward()
        assert model.layer.weight.grad.any()
        model.zero_grad()
    assert model.layer.fp8_input.history.count_nonzero() == 2


# ---------------------------------------------------------------- compilers


def test_a_compiled_optimizer_is_captured_once_whatever_else_comes_and_goes():
    graphs, others, model = CompileCounter(), [], layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(optimizer.step, backend=graphs)
    for step in range(4):
        step_of(model, batch(0))
        assert not model.fp8_input.late
        compiled()
        assert model.fp8_input.late, "the step is noticed"
        others = [layer() for _ in range(3 - step)]
        f8.synchronize_scales(model)
        assert graphs.frame_count == 1, f"after {len(others)} others were alive"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_dynamic_shapes_are_one_graph(recipe):
    model, counter = converted(nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 16)), recipe), CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for rows in (16, 48, 7):
        assert torch.equal(compiled(batch(0, 0, (rows, 24))), model(batch(0, 0, (rows, 24))))
    assert counter.frame_count == 1


def test_synchronization_in_a_compiled_step_breaks_the_graph_once():
    model, counter = nn.Sequential(layer()), CompileCounter()
    f8.synchronize_scales(model)

    @torch.compile(backend=counter)
    def after_step(x):
        y = x * 2
        f8.synchronize_scales(model)
        return y + 1

    for step in range(3):
        step_of(model, torch.full((8, 24), step + 1.0))
        after_step(torch.ones(4))
        assert model[0].fp8_input.history[0] == step + 1
    assert counter.frame_count == 2, "what is before and what is after"


# ---------------------------------------------------------------- scales that are ready


def test_settled_scales_give_the_numbers_of_scales_that_are_looked_at_in_every_step(monkeypatch):
    def trained():
        model = layer()
        return model, train(model, steps=6, inputs=lambda rank, step: batch(rank, step) * 2.0 ** (step % 3))

    settled, got = trained()
    assert settled.fp8_input.always_ready
    assert not settled.fp8_weight.always_ready, "the amax of a weight is looked at in every forward"
    monkeypatch.setattr(sync, "MAX_READY_READS", 0)
    looked_at, want = trained()
    assert not looked_at.fp8_input.always_ready
    assert got == want
    assert unlike(whole(settled), whole(looked_at)) == []
    assert copy.deepcopy(settled).fp8_input.ready_on_host
    # a checkpoint may be of a model that was not trained
    f8.DelayedState(settled).load_state_dict(f8.DelayedState(layer()).state_dict())
    settled.load_state_dict(layer().state_dict())
    assert not settled.fp8_input.always_ready
    assert torch.equal(settled(batch(0)), layer()(batch(0)))


# ---------------------------------------------------------------- forwards that were left by an exception


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
@pytest.mark.parametrize(
    ("place", "recipe", "at"),
    # sharded, the first of two batches of a step: later, a reset loses the gradients of earlier ones
    [("alone", "tensorwise_delayed", at) for at in (0, 4, 5)]
    + [("sharded", recipe, at) for recipe in ("tensorwise_delayed", "tensorwise", "rowwise") for at in (0, 4)],
)
@on_ranks(lambda given: 2 if given["place"] == "sharded" else 1)
def test_what_an_aborted_forward_of_a_far_larger_batch_observed_is_dropped(rank, place, recipe, at):
    found = []
    for aborted in (False, True):
        model = converted(seeded(lambda: nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 16))), recipe)
        model = shard(model) if place == "sharded" else model
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(8):
            if aborted and step == at:  # after the first layer has observed its operands
                handle = model[1].register_forward_pre_hook(lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    model(batch(0, step) * 100)
                handle.remove()
                if place == "sharded":
                    model.reset_iter_state()
            loss = loss_of(model, batch(0, step))
            loss.backward()
            losses.append(loss.item())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(losses)
    assert found[0] == found[1]


@on_ranks(2)
def test_ranks_agree_on_scales_of_a_model_that_was_called_before_it_was_sharded(rank):
    model = converted(
        seeded(lambda: nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))), "tensorwise_delayed", gather=False
    )
    model(batch(rank, 0, (8, 24))).sum().backward()  # alone, on each rank
    train(shard(model), rank, 4, inputs=lambda rank, step: batch(rank, step, (8, 24)) * (1 + 3 * rank))
    for scale in delayed_scales(model):
        first = [torch.empty_like(scale.scale) for _ in range(2)]
        dist.all_gather(first, scale.scale)
        assert torch.equal(*first)

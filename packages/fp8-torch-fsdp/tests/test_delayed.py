"""Delayed scaling: the history oracle, first steps, skipped steps, recomputation, and scales nobody synchronized."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import fp8_common
import fp8_torch_fsdp as f8
from fp8_common.torch import casts
from fp8_torch_fsdp.scales import sync


def layer(**delayed):
    torch.manual_seed(0)
    config = f8.Float8LinearConfig.from_recipe_name(
        "tensorwise_delayed", delayed=f8.DelayedScalingConfig(**{"history_len": 3, **delayed})
    )
    return f8.convert_to_float8_training(nn.Linear(32, 16), config=config)


def train_step(model, x, optimizer=None):
    model(x).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("initial", ["one", "dynamic"])
def test_scales_follow_the_numpy_oracle(algo, margin, initial):
    model = layer(scale_fn=algo, margin=margin, initial=initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window, scale = np.zeros(3, np.float32), np.float32(1)
    policy = model.config.input.policy
    for step in range(7):
        x = torch.randn(8, 32) * 3.0**-step
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
        window, reduced = fp8_common.update_history(window, amax, algo)
        scale = fp8_common.amax_to_scale(reduced, "e4m3", policy, scale)
        optimizer.step()
        optimizer.zero_grad()


def test_first_step_of_dynamic_initialisation_equals_dynamic_scaling():
    delayed = layer(initial="dynamic")
    dynamic = f8.convert_to_float8_training(f8.unconvert(copy.deepcopy(delayed)))
    x = torch.randn(8, 32)
    for model in (delayed, dynamic):
        train_step(model, x)
    assert torch.equal(delayed(x), dynamic(x))
    assert torch.equal(delayed.weight.grad, dynamic.weight.grad)


def test_accumulation_and_recomputation_roll_once_per_step():
    plain, recomputed = layer(), layer()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, recomputed)]
    for _ in range(4):
        batches = [torch.randn(8, 32, requires_grad=True) for _ in range(3)]
        for x in batches:
            plain(x).sum().backward()
            checkpoint(recomputed, x, use_reentrant=False).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model in (plain, recomputed):
        f8.synchronize_scales(model)
    for name in ("fp8_input", "fp8_weight", "fp8_grad_output"):
        a, b = getattr(plain, name), getattr(recomputed, name)
        assert torch.equal(a.history, b.history)
        assert torch.equal(a.scale, b.scale)
    assert (plain.fp8_input.history > 0).all(), "four steps fill a window of three"
    assert torch.equal(plain.weight.plain, recomputed.weight.plain)


def test_evaluation_observes_nothing():
    model = layer().eval()
    model(torch.randn(8, 32) * 100)
    with torch.no_grad():
        model.train()(torch.randn(8, 32) * 100)
    assert model.fp8_input.observed == -1
    f8.synchronize_scales(model)
    assert not model.fp8_input.ready


def test_a_second_synchronization_changes_nothing():
    model = layer()
    train_step(model, torch.randn(8, 32))
    f8.synchronize_scales(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    f8.synchronize_scales(model)
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_nonfinite_amax_is_not_recorded_and_the_scale_recovers(bad):
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_step(model, torch.ones(8, 32), optimizer)
    x = torch.ones(8, 32)
    x[0, 0] = bad
    train_step(model, x, None)  # the step is skipped, as a gradient scaler would
    model.weight.grad = model.bias.grad = None
    train_step(model, torch.ones(8, 32) * 2, optimizer)
    train_step(model, torch.ones(8, 32), optimizer)
    assert model.fp8_input.history.isfinite().all()
    assert model.fp8_input.history.max() == 2
    assert model.fp8_input.scale == 224
    assert model(torch.ones(8, 32)).isfinite().all()


def test_an_unsynchronized_training_forward_raises():
    model = nn.Sequential(layer())
    layer_alone = model[0]
    # the hook that synchronizes is on what was converted; take it away, as calling parts of a model would
    layer_alone._forward_pre_hooks.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, torch.randn(8, 32), optimizer)
    with pytest.raises(RuntimeError, match="synchronize_scales"):
        model(torch.randn(8, 32))
    model.eval()(torch.randn(8, 32))
    f8.synchronize_scales(model)
    model.train()(torch.randn(8, 32))


def test_a_compiled_optimizer_is_captured_once_whatever_else_comes_and_goes():
    torch._dynamo.reset()
    graphs, others = CompileCounter(), []
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(optimizer.step, backend=graphs)
    for step in range(4):
        model(torch.randn(8, 32)).sum().backward()
        assert not model.fp8_input.late
        compiled()
        assert model.fp8_input.late, "the step is noticed"
        others = [layer() for _ in range(3 - step)]
        f8.synchronize_scales(model)
        optimizer.zero_grad()
        assert graphs.frame_count == 1, f"after {len(others)} others were alive"


def test_state_survives_a_round_trip_and_without_it_scales_start_anew():
    model, twin = layer(), layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, torch.randn(8, 32), optimizer)
    assert set(model.state_dict()) == {"weight", "bias"}, "those of the unconverted layer"
    state = f8.DelayedState(model).state_dict()
    twin.load_state_dict(model.state_dict())
    f8.DelayedState(twin).load_state_dict(state)
    x = torch.randn(8, 32)
    assert torch.equal(model(x), twin(x))
    f8.DelayedState(twin).load_state_dict({})
    assert not twin.fp8_input.ready
    assert torch.equal(twin.weight.plain, model.weight.plain)


def test_meta_initialisation():
    with torch.device("meta"):
        model = f8.convert_to_float8_training(nn.Linear(32, 16), recipe="tensorwise_delayed")
    assert isinstance(model.weight, f8.ShardedFloat8Weight)
    model.to_empty(device="cpu")
    for module in model.modules():
        module.reset_parameters()
    assert isinstance(model.weight, f8.ShardedFloat8Weight)
    train_step(model, torch.randn(8, 32))
    assert model.fp8_input.observed >= 0


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_scales_are_float32_whatever_the_default_dtype_is(default):
    torch.set_default_dtype(default)
    try:
        model = f8.convert_to_float8_training(nn.Linear(32, 16).float(), recipe="tensorwise_delayed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            train_step(model, torch.full((8, 32), 1.1, dtype=torch.float32), optimizer)
        f8.synchronize_scales(model)
    finally:
        torch.set_default_dtype(torch.float32)
    scale, amax = model.fp8_input.scale, torch.tensor(1.1)
    assert (scale.dtype, model.fp8_input.history.dtype) == (torch.float32, torch.float32)
    assert scale == torch.div(torch.tensor(448.0), amax)


class ZeroBranch(nn.Module):
    """A residual branch whose last layer starts at zero, as those of LoRA and many transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        return x + self.last(self.first(x))


def test_a_branch_that_starts_at_zero_learns_from_its_second_step_on():
    model = f8.convert_to_float8_training(ZeroBranch(), recipe="tensorwise_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(8, 16)) * 1e-3).square().mean().backward()
        seen.append(bool(model.first.weight.grad.any()))
        optimizer.step()
    assert seen == [False, True, True], "an amax of 0 says nothing about the scale of the next gradient"
    assert model.first.fp8_grad_output.ready


def test_a_weight_that_is_edited_to_zero_takes_the_scale_of_its_next_values():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.ones(8, 32)
    train_step(model, x, optimizer)
    nn.init.zeros_(model.weight)
    train_step(model, x, optimizer)
    assert (model(x) - model.bias).abs().min() > 0, "weights of 1e-4 are not 0 after the step"


class Recomputed(nn.Module):
    """A recomputed layer and one that is trained by an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        # both from the input: a step of the head's optimizer leaves what the layer's backward needs
        return checkpoint(self.layer, x, use_reentrant=False), self.head(x)


def test_a_step_before_the_backward_leaves_recomputation_alone():
    torch.manual_seed(0)
    model = f8.convert_to_float8_training(Recomputed(), recipe="tensorwise_delayed")
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for _ in range(3):
        recomputed, output = model(torch.ones(4, 16))
        output.sum().backward()
        head.step()
        recomputed.sum().backward()
        assert model.layer.weight.grad.any()
        model.zero_grad()
    assert model.layer.fp8_input.history.count_nonzero() == 2


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_dynamic_shapes_are_one_graph(recipe):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)), recipe=recipe)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for rows in (16, 32, 48, 7):
        x = torch.randn(rows, 32)
        assert torch.equal(compiled(x), model(x))
    assert counter.frame_count == 1


def test_synchronization_in_a_compiled_step_breaks_the_graph_once():
    torch._dynamo.reset()
    model = nn.Sequential(layer())
    f8.synchronize_scales(model)
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def after_step(x):
        y = x * 2
        f8.synchronize_scales(model)
        return y + 1

    for step in range(3):
        train_step(model, torch.full((8, 32), step + 1.0))
        after_step(torch.ones(4))
        assert model[0].fp8_input.history[0] == step + 1
    assert counter.frame_count == 2, "what is before and what is after"


def test_settled_scales_give_the_numbers_of_scales_that_are_looked_at_in_every_step(monkeypatch):
    def trained():
        model, losses = layer(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            x = torch.linspace(-1, 1, 8 * 32).reshape(8, 32) * 2.0 ** (step % 3)
            losses.append(model(x).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, torch.stack(losses)

    settled, got = trained()
    assert settled.fp8_input.always_ready
    assert not settled.fp8_weight.always_ready, "the amax of a weight is looked at in every forward"
    monkeypatch.setattr(sync, "SETTLES_AFTER", 0)
    looked_at, want = trained()
    assert not looked_at.fp8_input.always_ready
    assert torch.equal(got, want)
    states = [f8.DelayedState(model).state_dict() for model in (settled, looked_at)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert copy.deepcopy(settled).fp8_input.settled
    # a checkpoint may be of a model that was not trained
    f8.DelayedState(settled).load_state_dict(f8.DelayedState(layer()).state_dict())
    settled.load_state_dict(layer().state_dict())
    assert not settled.fp8_input.always_ready
    assert torch.equal(settled(torch.ones(8, 32)), layer()(torch.ones(8, 32)))


def test_settled_scales_are_observed_in_one_pass(monkeypatch):
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train_step(model, torch.ones(8, 32), optimizer)
    model(torch.ones(8, 32))  # whose synchronization finds that the scales are ready
    passes = []
    cast = casts.quantize_with_amax
    monkeypatch.setattr(casts, "quantize_with_amax", lambda *x, **y: (passes.append(1), cast(*x, **y))[1])
    read, amax = [], casts.amax
    monkeypatch.setattr(casts, "amax", lambda x: (read.append(x.shape), amax(x))[1])
    train_step(model, torch.ones(8, 32))
    assert len(passes) == 2
    assert read == [(16, 32)], "the weight alone, whose scale has to fit it"


class Interrupted(Exception):
    """What a forward is left by."""


class Fragile(nn.Module):
    """Raises after what came before it has observed its operands, if told to."""

    def forward(self, x):
        if self.breaks:
            raise Interrupted
        return x


def losses_without_and_with_an_aborted_forward(at, sharded, recipe="tensorwise_delayed", accumulate=2):
    """Return the losses of a run, and of one in which a forward of a far larger batch was left by an exception."""
    found = []
    for aborted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), Fragile(), nn.Linear(32, 16))
        f8.convert_to_float8_training(model, config=f8.Float8LinearConfig.from_recipe_name(recipe))
        model[1].breaks = False
        if sharded:
            for part in (model[0], model[2], model):
                fully_shard(part)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for batch in range(6 * accumulate):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(batch))
            if aborted and batch == at:
                model[1].breaks = True
                with pytest.raises(Interrupted):
                    model(x * 100)
                model[1].breaks = False
                if sharded:
                    model.reset_iter_state()
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            if batch % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.stack(losses))
    return found


@pytest.mark.parametrize("at", [0, 4, 5])
def test_what_an_aborted_forward_observed_is_dropped(at):
    without, with_ = losses_without_and_with_an_aborted_forward(at, sharded=False)
    assert torch.equal(without, with_)


def aborted_under_fsdp(rank, world_size):
    for recipe in ("tensorwise_delayed", "tensorwise", "rowwise"):
        for at in (0, 4):  # the first of two batches of a step: later, a reset loses the gradients of earlier ones
            without, with_ = losses_without_and_with_an_aborted_forward(at, sharded=True, recipe=recipe)
            assert torch.equal(without, with_), (recipe, at)


@pytest.mark.distributed
@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
def test_what_an_aborted_forward_observed_is_dropped_under_fsdp(run_ranks):
    run_ranks(2, aborted_under_fsdp)

"""Which operators of fp8_common do the work: they choose kernels on a GPU, so nothing may go past them.

Eager layers call the functions behind the operators; that these launch kernels is tested in the interpreter.
"""

import collections
import contextlib

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_torch_fsdp as f8
from fp8_common.torch import _triton, foreach
from fp8_common.torch import delayed as histories
from fp8_common.torch.linear.operand import quantize_operand
from fp8_common.torch.sharding.scale_grid import ScaleGrid
from fp8_torch_fsdp.scales import delayed, sync


def config_of(recipe, **delayed):
    changes = {"delayed": f8.DelayedScalingConfig(**delayed)} if delayed else {}
    return f8.Float8LinearConfig.from_recipe_name(recipe, **changes)


# What one forward and backward of one layer without FSDP casts: the weight in both, each other operand as needed.
EXPECTED = {
    "tensorwise": (config_of("tensorwise"), {"quantize_dynamic": 4}),
    "delayed, first step measured": (
        config_of("tensorwise_delayed", initial="dynamic"),
        {"amax": 4, "quantize": 4},
    ),
    "delayed, first step given": (
        config_of("tensorwise_delayed", initial="one"),
        {"quantize_with_amax": 4},
    ),
    "rowwise": (config_of("rowwise"), {"quantize_dynamic": 6}),
    "rowwise_with_gw_hp": (config_of("rowwise_with_gw_hp"), {"quantize_dynamic": 4}),
    "blockwise": (config_of("blockwise"), {"quantize_dynamic": 6}),
}


def casts_among(calls):
    """Leave out what surrounds casts."""
    return {name: count for name, count in calls.items() if name not in ("decode", "reciprocal", "scales")}


def test_delayed_scales_of_a_model_move_on_at_once(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    f8.convert_to_float8_training(model, config=config_of("tensorwise_delayed", history_len=4))
    model(torch.randn(4, 32)).sum().backward()
    moved, roll = [], histories.roll_histories

    def counted(window, *rest):
        moved.append(window.shape[1])
        return roll(window, *rest)

    monkeypatch.setattr(histories, "roll_histories", counted)
    f8.synchronize_scales(model)
    assert moved == [9], "nine operands, two formats, one policy"


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise_1x128"])
def test_operands_of_fake_tensors_look_like_real_ones(granularity):
    cast, real = f8.CastConfig(granularity=granularity), torch.randn(12, 300, dtype=torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        fakes = [quantize_operand(x, cast) for x in (fake, fake.t())]
    for fake, x in zip(fakes, (real, real.t()), strict=True):
        operand = quantize_operand(x, cast)
        for field in ("codes", "scale_inv"):
            got, want = getattr(fake, field), getattr(operand, field)
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", EXPECTED)
def test_every_cast_of_a_compiled_layer_is_an_operator_and_gives_the_bits_of_eager(name):
    config, expected = EXPECTED[name]
    torch.manual_seed(0)
    layer = f8.convert_to_float8_training(nn.Linear(256, 128, bias=False), config=config)
    seen = collections.Counter()

    def inspect(graph, inputs):
        seen.update(str(node.target).split(".")[1] for node in graph.graph.nodes if "fp8_common" in str(node.target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=inspect, bw_compiler=inspect)
    x = torch.randn(128, 256, requires_grad=True)
    torch._dynamo.reset()
    y = torch.compile(layer, backend=backend)(x)
    y.square().sum().backward()
    compiled, x.grad, layer.weight.grad = (y, x.grad, layer.weight.grad), None, None
    assert casts_among(seen) == expected
    for module in layer.modules():
        if hasattr(module, "reset_parameters") and module is not layer:
            module.reset_parameters()
    y = layer(x)
    y.square().sum().backward()
    for got, want in zip(compiled, (y, x.grad, layer.weight.grad), strict=True):
        assert torch.equal(got, want)


def sharded_steps(rank, world_size, formats):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(5)))
    for index, (layer, fmt) in enumerate(zip(list(model), formats, strict=True)):
        casts = {"weight": f8.CastConfig(format=fmt), "grad_output": f8.CastConfig(format="e4m3")}
        config = f8.Float8LinearConfig(recipe=f8.Recipe(name="formats", **casts))
        model[index] = f8.convert_to_float8_training(layer, config=config)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for _ in range(3):
        with counted_casts() as calls:
            f8.synchronize_scales(model)
            synchronized = dict(calls)
            model(torch.randn(4, 24)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append((synchronized, dict(calls), f8.float8_report(model).casts))
    return counts


@contextlib.contextmanager
def counted_casts():
    """Count what weights are measured and cast with: together, or by themselves."""
    calls = collections.Counter()

    def counted(name, function):
        def call(*args):
            calls[name] += 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("amax_bits", "quantize"):
            patch.setattr(foreach, name, counted(f"foreach.{name}", getattr(foreach, name)))
        for name in ("amax_bits", "quantize_part"):
            patch.setattr(ScaleGrid, name, counted(name, getattr(ScaleGrid, name)))
        yield calls


@pytest.mark.distributed
@pytest.mark.parametrize(("formats", "casts"), [(["e4m3"] * 5, 1), (["e4m3", "e5m2", "e4m3", "e5m2", "e4m3"], 2)])
def test_weights_of_a_group_share_one_amax_and_one_cast_per_format(run_ranks, formats, casts):
    for counts in run_ranks(2, sharded_steps, formats):
        for step, (synchronized, whole, total) in enumerate(counts):
            # before the first forward there is nothing to synchronize; later that happens twice
            times = 2 if step else 1
            assert whole == {"foreach.amax_bits": times, "foreach.quantize": times * casts}, "no weight went by itself"
            assert total == 5 * (2 * step + 1)
            assert synchronized == ({"foreach.amax_bits": 1, "foreach.quantize": casts} if step else {})


class AllOperators(TorchDispatchMode):
    """Counts every operator."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_synchronization(rank, world_size, recipe, layers):
    """Return the operators of a step's end, of a synchronization after it, and of the observation of all weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(layers)))
    f8.convert_to_float8_training(model, recipe=recipe)
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
        counted = []
        for act in (optimizer.step, lambda: f8.synchronize_scales(model)):
            with AllOperators() as operators:
                act()
            counted.append(operators.calls)
        optimizer.zero_grad()
    with AllOperators() as operators:
        own = sync.syncs_of(model)[0]
        own._after_forward(model, (), None)
    return [*counted, operators.calls]


@pytest.mark.distributed
def test_delayed_scaling_adds_operators_to_a_step_and_none_for_each_weight(run_ranks):
    """What grows with the number of weights is what the references on CPU do for dynamic scaling too."""
    counts = {
        (recipe, layers): run_ranks(1, operators_of_a_synchronization, recipe, layers)[0]
        for recipe in ("tensorwise", "tensorwise_delayed")
        for layers in (4, 12)
    }
    growth = {
        recipe: [many - few for few, many in zip(counts[recipe, 4], counts[recipe, 12], strict=True)]
        for recipe in ("tensorwise", "tensorwise_delayed")
    }
    assert growth["tensorwise"] == growth["tensorwise_delayed"]
    assert growth["tensorwise"][0] == growth["tensorwise"][2] == 0
    added = [d - t for t, d in zip(counts["tensorwise", 4], counts["tensorwise_delayed", 4], strict=True)]
    assert all(a <= b for a, b in zip(added, (8, 91, 13), strict=True)), added


class LaunchingOperators(TorchDispatchMode):
    """Counts operators that would launch something on a GPU: neither views nor allocations."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        moves_nothing = ("detach", "alias", "empty", "lift_fresh", "split", "unbind", "profiler")
        self.calls += not (func.is_view or any(name in str(func) for name in moves_nothing))
        return func(*args, **(kwargs or {}))


def launches_between_steps(rank, world_size, recipe, layers):
    """Return what `mark_late`, a synchronization and the observation of all weights would launch on a GPU.

    The kernels of this project are taken as launched: values are not computed.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(layers)))
    f8.convert_to_float8_training(model, recipe=recipe)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    own, launched = sync.syncs_of(model)[0], []
    marks = lambda: delayed.mark_late(own.scales)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "_obstacle", lambda device: None)
        patch.setattr(_triton, "run", lambda plan, *_, **tensors: launched.append(plan.name))
        counts = []
        for act in (marks, lambda: own._before_forward(model, ()), lambda: own._after_forward(model, (), None)):
            launched.clear()
            with LaunchingOperators() as operators:
                act()
            counts.append(operators.calls + len(launched))
    return counts


@pytest.mark.distributed
@pytest.mark.parametrize(("recipe", "most"), [("tensorwise", (0, 40, 0)), ("tensorwise_delayed", (8, 44, 8))])
def test_launches_between_steps_do_not_grow_with_the_number_of_weights(run_ranks, recipe, most):
    few, many = (run_ranks(1, launches_between_steps, recipe, layers)[0] for layers in (4, 40))
    assert few == many
    assert all(count <= limit for count, limit in zip(many, most, strict=True)), many

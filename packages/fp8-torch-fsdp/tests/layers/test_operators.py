"""Which operators of fp8_common do the work: they choose kernels on a GPU, so nothing may go past them.

Eager layers call the functions behind the operators; that these launch kernels is tested in the interpreter.
"""

import collections
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from captured_graphs import CapturedGraphs
from fp8_common.torch import _triton
from fp8_torch_fsdp.scales import delayed, sync
from fsdp_models import converted, mesh_of, seeded, with_delayed
from fsdp_training import batch, train
from tests.helpers.ranks import on_ranks

# What one forward and backward of one layer without FSDP casts: an operand once for each matmul that needs other codes.
EXPECTED = {
    "tensorwise": ("tensorwise", {}, {"dynamic": 3}),
    "delayed, first step measured": ("tensorwise_delayed", {}, {"amax": 3, "quantize": 3}),
    "delayed, first step given": (
        "tensorwise_delayed",
        {"delayed": with_delayed(initial="one")},
        {"quantize_with_amax": 3},
    ),
    "rowwise": ("rowwise", {}, {"dynamic": 5}),
    "rowwise_with_gw_hp": ("rowwise_with_gw_hp", {}, {"dynamic": 3}),
    "blockwise": ("blockwise", {}, {"dynamic": 5}),
}
AROUND_CASTS = ("values", "reciprocal", "scales")


def layers(count, dim=16):
    return lambda: nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(count)))


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", EXPECTED)
def test_every_cast_of_a_compiled_layer_is_an_operator_and_gives_the_bits_of_eager(name):
    recipe, options, expected = EXPECTED[name]
    graphs, results = CapturedGraphs(), []
    for layer in (converted(seeded(lambda: nn.Linear(256, 128, bias=False)), recipe, **options) for _ in range(2)):
        x = batch(0, 0, (128, 256)).requires_grad_()
        y = (layer if results else torch.compile(layer, backend=graphs, fullgraph=True))(x)
        y.square().sum().backward()
        results.append((y, x.grad, layer.weight.grad))
    called = collections.Counter(one.operator.split(".")[1] for one in graphs.calls if "fp8_common" in one.operator)
    assert {name: count for name, count in called.items() if name not in AROUND_CASTS} == expected
    assert all(map(torch.equal, *results))


class LaunchingOperators(TorchDispatchMode):
    """Counts operators that would launch something on a GPU: neither views nor allocations."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        moves_nothing = ("detach", "alias", "empty", "lift_fresh", "split", "unbind", "profiler")
        self.calls += not (func.is_view or any(name in str(func) for name in moves_nothing))
        return func(*args, **(kwargs or {}))


def launches_between_steps(rank, world_size, recipe, count):
    """Return what `mark_late`, a synchronization and the observation of all weights would launch on a GPU.

    The kernels of this project are taken as launched: values are not computed.
    """
    model = fully_shard(converted(layers(count)(), recipe), mesh=mesh_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    own, launched = sync.syncs_of(model)[0], []
    marks = lambda: delayed.mark_late(own.scales)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "_obstacle", lambda device: None)
        patch.setattr(_triton, "run", lambda plan, *_, **tensors: launched.append(plan.name))
        counts = []
        before = lambda: own._before_fsdp_forward((model,), True)  # noqa: E731
        after = lambda: own._after_fsdp_forward((model,), None, True)  # noqa: E731
        for act in (marks, before, after):
            launched.clear()
            with LaunchingOperators() as operators:
                act()
            counts.append(operators.calls + len(launched))
    return counts


@pytest.mark.distributed
@pytest.mark.parametrize(("recipe", "most"), [("tensorwise", (0, 40, 0)), ("tensorwise_delayed", (8, 44, 8))])
def test_launches_between_steps_do_not_grow_with_the_number_of_weights(run_ranks, recipe, most):
    few, many = (run_ranks(1, launches_between_steps, recipe, count)[0] for count in (4, 40))
    assert few == many
    assert all(count <= limit for count, limit in zip(many, most, strict=True)), many


@on_ranks(1)
def test_a_steady_forward_enters_few_functions(rank):
    """From the look at a shard to its gathered form, and then what the layer does."""
    model = fully_shard(converted(nn.Sequential(nn.Linear(24, 24, bias=False))), mesh=mesh_of())
    train(model, rank, 2)
    calls, x = [], batch(rank)
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
    model(x)
    sys.setprofile(None)
    # a comprehension is a function before Python 3.12, and a part of its function after it
    ours = [code for code in calls if "/fp8_" in code.co_filename and not code.co_name.startswith("<")]
    layer = [code.co_qualname for code in ours].index("Float8Linear.forward")
    assert 5 <= layer <= 88
    assert len({code.co_filename for code in ours[:layer]}) <= 16
    assert len(ours) <= 178

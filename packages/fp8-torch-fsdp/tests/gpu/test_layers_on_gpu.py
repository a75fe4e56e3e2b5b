"""Layers on a GPU: native products against emulated ones, FSDP2, Inductor, steps without waits, CUDA graphs.

Each test also runs on a CPU, where it proves its own program and nothing about a GPU.
"""

import copy
import functools
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import config as inductor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8_torch_fsdp as f8
from tests.helpers.collectives import KINDS, CollectiveCounter
from tests.helpers.gpu import DEVICES, graph_of, sync_debug
from tests.helpers.processes import python

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
SHAPES = [(16, 16, 16), (1, 256, 512), (17, 512, 256), (128, 512, 1024), (300, 1024, 512), (2, 64, 1536, 512)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
ON_EACH = pytest.mark.parametrize(
    ("recipe", "device"),
    [(r, "cpu") for r in ("tensorwise_delayed", "mxfp8")]
    + [pytest.param(r, "cuda", marks=pytest.mark.gpu) for r in RECIPES],
)
"""All recipes on a GPU, and two on a CPU."""


def config(recipe, **options):
    return f8.Float8TrainingConfig(recipe=recipe, **options)


def close(got, want, dtype):
    """Compare sums of the same codes in another order; outputs may be accumulated with fewer bits."""
    error = (got.float() - want.float()).abs().max()
    share = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-9
    assert error <= 2 * share * want.float().abs().max(), (error, want.abs().max())


def near(got, want):
    """Compare gradients whose codes differ where a sum in another order was rounded to another neighbour."""
    assert (got.float() - want.float()).norm() <= 2.0**-5 * want.float().norm()


def model_on(device, recipe, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256, bias=False)).to(device, dtype)
    return f8.convert_to_float8_training(model, config=config(recipe, **options))


def training_step(model, x, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)

    def step():
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.matrix(recipe=RECIPES, shape=SHAPES, dtype=DTYPES)
def test_matmuls_are_those_of_emulation(recipe, shape, dtype, device):
    *rows, columns, features = shape
    if recipe == "mxfp8":  # blocks along every dimension that a matmul contracts
        *rows, columns, features = (-(-size // 32) * 32 for size in shape)
    torch.manual_seed(0)
    plain = nn.Linear(columns, features, bias=False).to(device, dtype)
    x = torch.randn(*rows, columns, device=device, dtype=dtype)
    weights = torch.randn(*rows, features, device=device, dtype=dtype)
    results = []
    for emulate in (False, True):
        layer = f8.convert_to_float8_training(
            copy.deepcopy(plain), config=config(recipe, emulate=emulate or device == "cpu", pad_inner_dim=True)
        )
        given = x.clone().requires_grad_()
        y = layer(given)
        (y * weights).sum().backward()
        results.append((y.detach(), given.grad, layer.weight.grad))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype == dtype
        close(got, want, dtype)


def train_two_ranks(rank, world_size, recipe, device):
    """Return losses alone and under FSDP2, the dtypes of what is sent in a step, and how often the host waits in it."""
    if device == "cuda":
        torch.cuda.set_device(0)
    alone, sharded = model_on(device, recipe), model_on(device, recipe)
    # a mesh that is made for CUDA beside gloo would take NCCL, which refuses two ranks on one GPU
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(128, 256, device=device, dtype=torch.bfloat16, generator=torch.Generator(device).manual_seed(1))
    steps = [training_step(model, x) for model in (alone, sharded)]
    losses = [tuple(float(step()) for step in steps) for _ in range(4)]
    with CollectiveCounter() as counter:
        steps[1]()
    sent = {kind: sorted({str(dtype) for dtype in counter.dtypes(kind)}) for kind in KINDS}
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        with sync_debug(device, "warn"):
            steps[1]()
    return losses, sent, sum("synchron" in str(each.message) for each in waits)


@pytest.mark.distributed
@ON_EACH
def test_two_ranks_train_like_one_and_gather_codes(run_ranks, record_property, recipe, device):
    """Over gloo, which moves tensors of a GPU through the host: streams, events and dtypes are those of FSDP2."""
    found = run_ranks(2, train_two_ranks, recipe, device)
    for losses, sent, waits in found:
        record_property("waits of the host in a step", waits)
        for alone, sharded in losses:
            assert sharded == pytest.approx(alone, rel=2.0**-7)
        assert losses[-1][1] < losses[0][1]
        assert "torch.uint8" in sent["all_gather"], sent
        # only biases, and scales of rows and blocks, have another dtype
        assert {"torch.uint8", "torch.bfloat16", "torch.float32"} >= set(sent["all_gather"])
        assert set(sent["all_reduce"]) <= {"torch.int32"}, sent


def compiled(model, device):
    # on a CPU the graphs are captured and not compiled
    return torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")


def checkpointed(model, device):
    return functools.partial(checkpoint, model, use_reentrant=False)


WAYS = {
    "compiled": (compiled, {}),
    "checkpointed": (checkpointed, {}),
    "checkpointed, with saved codes": (checkpointed, {"fp8_saved_input": True}),
    "CUDA graphs of the compiler": (lambda model, device: torch.compile(model, mode="reduce-overhead"), {}),
}


@ON_EACH
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_eager_layers(way, recipe, device):
    change, options = WAYS[way]
    if device == "cpu" and "CUDA" in way:
        pytest.skip("needs a GPU")
    torch._dynamo.reset()
    eager, twin = (model_on(device, recipe, **options) for _ in range(2))
    x = torch.randn(128, 256, device=device, dtype=torch.bfloat16)
    for model, call in ((eager, eager), (twin, change(twin, device))):
        for _ in range(4 if "CUDA" in way else 1):
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            # without this, a compiler keeps what lies between two operations wider than bfloat16
            with inductor.patch(emulate_precision_casts=True):
                call(x).float().square().mean().backward()
    for one, other in zip(eager.parameters(), twin.parameters(), strict=True):
        near(other.grad, one.grad)


@ON_EACH
def test_the_host_does_not_wait_in_a_step(recipe, device):
    x = torch.randn(128, 256, device=device, dtype=torch.bfloat16)
    step = training_step(model_on(device, recipe), x)
    for _ in range(3):  # the first ones make tables, and ask whether delayed scales are ready
        step()
    with sync_debug(device):
        loss = step()
    assert loss.isfinite()


@ON_EACH
def test_a_graph_of_the_second_step_trains_like_eager_steps(recipe, device):
    x = torch.randn(128, 256, device=device, dtype=torch.bfloat16)
    eager, twin = model_on(device, recipe), model_on(device, recipe)
    plain, captured = training_step(eager, x), training_step(twin, x)
    replay = captured if device == "cpu" else graph_of(captured).replay
    if device == "cpu":
        captured()  # the plain step before a capture
    plain()
    for _ in range(3):
        plain()
        replay()
    for one, other in zip(eager.parameters(), twin.parameters(), strict=True):
        close(other, one, torch.bfloat16)


CAPTURE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from fp8_common import Fp8UnsupportedError
from test_layers_on_gpu import model_on
x = torch.randn(128, 256, device="cuda", dtype=torch.float16)
model = model_on("cuda", "blockwise", torch.float16)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x)
except Fp8UnsupportedError as error:
    print(error)
"""


@pytest.mark.gpu
def test_a_capture_without_a_step_before_it_raises():
    """In a process of its own, where no kernel was launched before."""
    assert "before the capture" in python("-c", CAPTURE, Path(__file__).parent)


@ON_EACH
def test_compiled_gradients_are_as_near_to_exact_ones_as_eager_ones(recipe, device):
    """As everybody compiles: fused operations round less often, so that other codes come out."""
    torch._dynamo.reset()
    eager, twin = model_on(device, recipe), model_on(device, recipe)
    exact = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256, bias=False)).to(device)
    exact.load_state_dict({name: value.float() for name, value in eager.state_dict().items()}, strict=False)
    x = torch.randn(128, 256, device=device, dtype=torch.bfloat16)
    for call, given in ((exact, x.float()), (eager, x), (compiled(twin, device), x)):
        call(given).float().square().mean().backward()
    for want, one, other in zip(exact.parameters(), eager.parameters(), twin.parameters(), strict=True):
        errors = [(each.grad.float() - want.grad).norm() for each in (one, other)]
        assert errors[1] <= 1.1 * errors[0] + 2.0**-8 * want.grad.norm(), (errors, want.grad.norm())

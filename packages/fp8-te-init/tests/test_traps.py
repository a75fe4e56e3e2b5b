"""The traps of the usual ways to keep a start: in each test the naive way fails, and this package does not."""

import contextlib
import io
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8_te_init as fti
from fp8_common import get_format
from fp8_common.torch._quantize import dequantize, quantize
from fp8_te_init._kept_in_module import kept_values
from tests.helpers import te_double


def model(**options) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.primary_weights(**options):
        return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 16))


def naive(**options) -> nn.Sequential:
    """Upstream's way: the copy is an attribute of each parameter."""
    net = model(preserve="none", **options)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 16))
    for layer, twin in zip(net[::2], plain[::2], strict=True):
        layer.weight._high_precision_init_val = twin.weight.detach().clone()
    return net


def naive_bytes(net) -> int:
    copies = [getattr(layer.weight, "_high_precision_init_val", None) for layer in net[::2]]
    return sum(copy.nbytes for copy in copies if copy is not None)


def naive_seed(masters, net):
    """The loop that frameworks write: over what the optimizer owns."""
    for parameter, master in masters.items():
        master.copy_(parameter._high_precision_init_val.float())
        del parameter._high_precision_init_val


def test_copies_of_frozen_weights_and_of_those_another_rank_owns_stay():
    net = naive()
    net[0].weight.requires_grad_(False)
    owned = {net[2].weight: torch.empty(16, 40)}
    naive_seed(owned, net)
    assert naive_bytes(net) == 4 * 24 * 40, "for ever"

    ours = model()
    ours[0].weight.requires_grad_(False)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, [ours[2].weight], lr=0.1)
    fti.seed_masters(optimizer, ours)
    assert fti.memory_report(ours).copies == 0


def test_nothing_clears_when_a_model_is_only_used():
    net, ours = naive(), model(release="forward")
    assert fti.memory_report(ours).copies == naive_bytes(net) > 0
    for each in (net, ours):
        each(torch.ones(2, 24))
    assert naive_bytes(net) > 0
    assert fti.memory_report(ours).copies == 0


def size_of(parameter) -> int:
    file = io.BytesIO()
    torch.save(parameter, file)
    return file.tell()


def test_saved_parameters_take_the_copy_along():
    torch.manual_seed(0)
    bare, plain = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))
    plain._high_precision_init_val = plain.detach().clone()
    assert size_of(plain) > size_of(bare) + plain.nbytes

    with fti.primary_weights():
        kept = nn.Linear(64, 64)
    with fti.primary_weights(preserve="none"):
        none = nn.Linear(64, 64)
    assert fti.memory_report(kept).copies == 4 * 64 * 64
    assert abs(size_of(kept.weight) - size_of(none.weight)) < 1024
    restored = torch.load(io.BytesIO(saved(kept.weight)), weights_only=False)
    assert torch.equal(restored.dequantize(), kept.weight.dequantize())


def saved(parameter) -> bytes:
    file = io.BytesIO()
    torch.save(parameter, file)
    return file.getvalue()


def test_moving_with_swapped_tensors_loses_the_attribute(monkeypatch):
    plain = nn.Linear(8, 8)
    plain.weight._high_precision_init_val = plain.weight.detach().clone()
    ours = model()
    start = ours[0].weight.get_high_precision_init_val().clone()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        plain.to(torch.bfloat16)
        ours.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert not hasattr(plain.weight, "_high_precision_init_val")
    assert torch.equal(ours[0].weight.get_high_precision_init_val(), start)


@pytest.fixture
def te():
    yield te_double.install()
    te_double.remove()


def test_the_fused_optimizer_never_reads_the_copy(te):
    torch.manual_seed(0)
    with te.quantized_model_init(preserve_high_precision_init_val=True):
        layer = te.Linear(24, 40)
    start = layer.weight.get_high_precision_init_val()
    optimizer = te.FusedAdam([layer.weight], master_weights=True)
    optimizer.initialize_state(layer.weight, False)
    error = (optimizer.state[layer.weight]["master_param"] - start).norm() / start.norm()
    assert error > 0.02, "it starts from rounded values, with the copy at hand"

    torch.manual_seed(0)
    with fti.primary_weights():
        ours = nn.Sequential(te.Linear(24, 40))
    optimizer = te.FusedAdam(ours.parameters(), master_weights=True)
    fti.seed_masters(optimizer, ours)
    assert torch.equal(optimizer.state[ours[0].weight]["master_param"], start)


def test_the_formula_taken_literally_replaces_the_weights():
    """`w += |w| + (u - 0.5) * eps`: the noise was meant to be scaled by |w|, not to come on top of it."""
    generator = torch.Generator().manual_seed(0)
    values, fmt = 0.02 * torch.randn(256, 256, generator=generator), get_format("e4m3")
    scale = 448 / values.abs().max()
    rounded = dequantize(quantize(values, scale, fmt), scale, fmt, torch.float32)
    noise = (torch.rand(values.shape, generator=generator) - 0.5) * 0.125
    literal = rounded + rounded.abs() + noise
    assert (literal - values).norm() / values.norm() > 1

    net = model(preserve="none")
    codes = net[0].weight.state.codes.clone()
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    fti.seed_masters(optimizer, net, strict=False, source_order=("dither",))
    master = optimizer.master_of(net[0].weight)
    assert torch.equal(net[0].weight.quantized_rows.quantized(master), codes)
    assert (master - net[0].weight.dequantize()).norm() / master.norm() < 0.05


PAGES = """
import ctypes, json, sys, torch
from fp8_te_init._host_memory import mapped_copy
from fp8_te_init._report import host_rss

torch.set_num_threads(1)
values, small = torch.ones(250_000), []  # 1 MB: freed once, such blocks come from the heap from then on
torch.empty(8_000_000).fill_(1.0)


def kept_after_release(make):
    before, copies = host_rss(), []
    for _ in range(100):
        copies.append(make(values))
        small.append(torch.ones(20_000))  # what a model goes on using, between them
    held = host_rss() - before
    copies.clear()
    return (host_rss() - before) / held


print(json.dumps({"heap": kept_after_release(torch.Tensor.clone), "pages": kept_after_release(mapped_copy)}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc, and the heap is glibc's")
def test_freed_copies_stay_with_the_process():
    done = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    share = json.loads(done.stdout)
    assert share["heap"] > 0.5, "ordinary copies: freed, and still resident"
    assert share["pages"] < 0.2


WHOLE_MODEL = """
import json, sys, torch
from torch import nn
import fp8_te_init as fti
from fp8_te_init._report import host_rss



def make(side, layers):
    with fti.primary_weights(preserve=sys.argv[1]):
        return nn.Sequential(*(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


def seed(model):
    fti.seed_masters(torch.optim.SGD(model.parameters(), lr=0.1), model, strict=False)


torch.set_num_threads(1)
seed(make(8, 1))  # what is imported on first use
before = host_rss()
model = make(2048, 8)
built, report = host_rss(), fti.memory_report(model)
seed(model)
print(json.dumps({"copies": report.copies, "fell": built - host_rss(), "left": host_rss() - before - report.codes}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("preserve", ["cpu", "residual"])
def test_the_memory_of_a_model_falls_by_its_copies(preserve):
    """Residuals are one byte an element, and encoding them takes much more for a while."""
    command = [sys.executable, "-c", WHOLE_MODEL, preserve]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["copies"] >= {"cpu": 2, "residual": 1}[preserve] * 8 * 2048 * 2048
    assert measured["fell"] >= 0.8 * measured["copies"]
    assert measured["left"] < 8e6, "besides the codes"


# ---------------------------------------------------------------- several ranks


@contextlib.contextmanager
def counted():
    original, seen = dist.all_reduce, []

    def count(*args, **kwargs):
        seen.append(args[0].numel())
        return original(*args, **kwargs)

    dist.all_reduce = count
    try:
        yield seen
    finally:
        dist.all_reduce = original


def reductions(rank, world_size):
    torch.manual_seed(rank)
    with fti.primary_weights():
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    values = [kept_values(layer, "weight") for layer in net]
    with counted() as one_by_one:
        for own in values:
            amax = own.abs().max()
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)  # what a quantizer with an amax group does
    with counted() as together:
        fti.rescale_(net, groups=dist.group.WORLD)
    return one_by_one, together


@pytest.mark.distributed
def test_every_tensor_is_reduced_by_itself(run_ranks):
    for one_by_one, together in run_ranks(2, reductions):
        assert one_by_one == [1] * 5
        assert together == [5]

"""The traps of the usual ways to keep a start: in each test the naive way fails, and this package does not."""

import io

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import get_format
from fp8_common.torch.casts import quantize
from fp8_common.torch.decoding import dequantize
from tests.helpers import te_double


def model(preserve=True, **options) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=preserve, **options):
        return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 16))


def naive(**options) -> nn.Sequential:
    """Upstream's way: the copy is an attribute of each parameter."""
    net = model(preserve=False, **options)
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

    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        kept = nn.Linear(64, 64)
    with fti.fp8_model_init():
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
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
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

    net = model(preserve=False)
    codes = net[0].weight.state.codes.clone()
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    fti.seed_masters(optimizer, net, fallback="dither")
    master = optimizer.master_of(net[0].weight)
    assert torch.equal(net[0].weight.state.quantized(master), codes)
    assert (master - net[0].weight.dequantize()).norm() / master.norm() < 0.05

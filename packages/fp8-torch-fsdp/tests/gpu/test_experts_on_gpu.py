"""Experts on a GPU: grouped products against those of a CPU, compiled, without waits, and offsets that do not fit.

Each test also runs on a CPU, where it proves its own program and nothing about a GPU.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor

import fp8_torch_fsdp as f8
from tests.helpers.gpu import DEVICES, sync_debug
from tests.helpers.processes import python

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]
NATIVE = RECIPES[:3]
"""Recipes whose products need not know on the host where groups end."""
# an empty group, none that is a multiple of 16 rows; multiples; one group alone; no rows at all
SIZES = {"uneven": [5, 0, 17, 40], "aligned": [16, 32, 0, 16], "one": [0, 0, 0, 7], "empty": [0, 0, 0, 0]}
BEHIND = 3
"""Rows of no expert."""
ON_EACH = pytest.mark.parametrize(
    ("recipe", "device"), [(NATIVE[1], "cpu"), *(pytest.param(r, "cuda", marks=pytest.mark.gpu) for r in NATIVE)]
)


class Experts(nn.Module):
    """Gated experts, as a user would write them; x [rows, width] sorted by expert, `offsets` where each one ends."""

    def __init__(self, width, hidden):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(4, 2 * hidden, width, generator=generator) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, width, hidden, generator=generator) / hidden**0.5)

    def forward(self, x, offsets):
        gate, value = F.grouped_mm(x, self.up.mT, offs=offsets).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * value, self.down.mT, offs=offsets)


def in_fp8(experts, x, offsets):
    gate, value = experts.expert_matmul("up", x, offsets).chunk(2, dim=-1)
    return experts.expert_matmul("down", F.silu(gate) * value, offsets)


def experts_on(device, recipe, width=128, hidden=64):
    experts = Experts(width, hidden).to(device, torch.bfloat16)
    layouts = {Experts: f8.ExpertLayout(forward=in_fp8, weights=("up", "down"))}
    # padded, as other layers of such widths have to be
    config = f8.Float8TrainingConfig(recipe=recipe, pad_inner_dim=width % 16 > 0)
    return f8.convert_to_float8_training(experts, config=config, experts=layouts)


def rows_on(device, sizes, width=128):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes) + BEHIND, width, generator=generator).to(device, torch.bfloat16)
    return x, torch.tensor(sizes, device=device).cumsum(0).int()


def results(experts, x, offsets, call=None):
    """Return the output and all gradients of one step."""
    given = x.clone().requires_grad_()
    y = (experts if call is None else call)(given, offsets)
    y.float().square().sum().backward()
    return [y.detach(), given.grad, *(weight.grad for weight in experts.parameters())]


def close(got, want):
    """Compare what differs by the order of sums and by what that changes in later casts."""
    got, want = got.float().cpu(), want.float().cpu()
    assert got.isfinite().all()
    assert (got - want).norm() <= 2.0**-4 * want.norm() + 1e-6, ((got - want).norm(), want.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.matrix(recipe=RECIPES, sizes=list(SIZES), width=[128, 40])
def test_matmuls_are_those_of_a_cpu(recipe, sizes, width, device):
    """A width of 40 is none that FP8 hardware takes for groups."""
    if (recipe, width) != ("blockwise", 40):
        found, wanted = (
            results(experts_on(at, recipe, width), *rows_on(at, SIZES[sizes], width)) for at in (device, "cpu")
        )
        for got, want in zip(found, wanted, strict=True):
            close(got, want)
        assert not found[0][sum(SIZES[sizes]) :].any(), "rows of no expert give zeros"


@ON_EACH
def test_compiled_experts_compute_what_eager_ones_do(recipe, device):
    eager, twin = experts_on(device, recipe), experts_on(device, recipe)
    # on a CPU the graphs are captured and not compiled
    compiled = torch.compile(twin, backend="inductor" if device == "cuda" else "aot_eager")
    x, offsets = rows_on(device, SIZES["uneven"])
    # without this, a compiler keeps what lies between two operations wider than bfloat16
    with inductor.patch(emulate_precision_casts=True):
        found = results(twin, x, offsets, compiled)
    for got, want in zip(found, results(eager, x, offsets), strict=True):
        close(got, want)


@ON_EACH
def test_the_host_does_not_wait_for_the_offsets(recipe, device):
    experts, (x, offsets) = experts_on(device, recipe), rows_on(device, SIZES["uneven"])
    results(experts, x, offsets)
    with sync_debug(device):
        found = results(experts, x, offsets)
    assert all(each.isfinite().all() for each in found)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", NATIVE)
@pytest.mark.parametrize("ends", [[64, 32, 128, 128], [16, 96, 96, 256], [-16, 32, 64, 128]])
def test_offsets_that_do_not_fit_give_nan_and_the_process_lives(recipe, ends):
    """In a process of its own: an assertion on the device would end every later test."""
    assert python(__file__, recipe, *ends).split() == ["True", "True"]


def bad_offsets(recipe, ends):
    """Print whether bad offsets gave NaN, and whether good ones do not afterwards."""
    experts, (x, offsets) = experts_on("cuda", recipe), rows_on("cuda", [32, 32, 32, 32 - BEHIND])
    print(bool(experts(x, torch.tensor(ends, device="cuda", dtype=torch.int32)).isnan().all()))
    torch.cuda.synchronize()
    print(bool(experts(x, offsets).isfinite().all()))


if __name__ == "__main__":
    bad_offsets(sys.argv[1], list(map(int, sys.argv[2:])))

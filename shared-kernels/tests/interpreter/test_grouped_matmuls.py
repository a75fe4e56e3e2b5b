"""Own grouped matmuls beside a loop over experts: codes are exact, and only the order of accumulation differs."""

import itertools

import numpy as np
import pytest
import torch

from fp8_common import E4M3, E5M2, Fp8Error
from fp8_common._kernels import matmul_over_rows, matmul_rows
from fp8_common.hardware import OWN_GROUPED
from fp8_common.torch import _triton
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear import grouped_matmul
from fp8_common.torch_layers.linear.config import GemmConfig, LinearConfig
from fp8_common.torch_layers.linear.grouped import RowGroups
from fp8_common.torch_layers.linear.matmul import MatmulOptions
from fp8_common.torch_layers.linear.plan import decide
from kernel_inputs import DEVICE

ENDS = {
    "uneven": [5, 5, 22, 62],
    "empty": [0, 0, 0, 0],
    "one row": [0, 0, 1, 1],
    "all in one": [0, 70, 70, 70],
    "aligned": [16, 48, 48, 64],
    "a long one": [3, 260, 260, 261],
}
BEHIND = 3
"""Rows of no group."""
OWN = MatmulOptions(torch.bfloat16, emulate=False, use_fast_accum=True, grouped="own")


@pytest.fixture
def launched(monkeypatch):
    """Multiply as on a device with grouped FP8 matmuls; return the names of the kernels that are launched."""
    names, run = [], _triton.run
    monkeypatch.setattr(grouped_matmul, "device_multiplies", lambda device: "fp8")
    monkeypatch.setattr(_triton, "run", lambda plan, *_, **named: (names.append(plan.name), run(plan, *_, **named)))
    return names


def codes(rng, fmt, *shape):
    """Return random codes of values around one."""
    values = torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(DEVICE)
    return values.to(torch.float8_e4m3fn if fmt is E4M3 else torch.float8_e5m2)


def inverses(rng, *shape):
    """Return random scales back from FP8."""
    return torch.from_numpy(rng.uniform(0.5, 2, shape).astype(np.float32)).to(DEVICE)


def wild(x, rows):
    """Make what is behind `rows` NaN."""
    if x.element_size() == 1:
        x[rows:].view(torch.uint8).fill_(0x7F)
    else:
        x[rows:] = torch.nan
    return x


def assert_close(found, wanted):
    """One rounding to bfloat16, and sums of float32 in another order; zeros are exact."""
    assert found.dtype == torch.bfloat16
    assert not found.isnan().any()
    assert torch.equal(found == 0, wanted.bfloat16() == 0)
    assert (found.float() - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.matrix(
    ends=list(ENDS), size=[(48, 64), (16, 32), (144, 272)], fmt=[E4M3, E5M2], single=[False, True], fast=[True, False]
)
def test_rows_are_multiplied_by_the_matrix_of_their_group(launched, ends, size, fmt, single, fast):
    rng, ends, (n, k) = np.random.default_rng(0), ENDS[ends], size
    rows, count = ends[-1] + BEHIND, len(ends)
    a, b = wild(codes(rng, fmt, rows, k), ends[-1]), codes(rng, E4M3, count, n, k)
    a_inv = inverses(rng, count) if single else wild(inverses(rng, rows, 1), ends[-1])
    b_inv = inverses(rng, count) if single else inverses(rng, count, n, 1)
    groups = RowGroups(torch.tensor(ends, device=DEVICE), rows)
    options = OWN._replace(use_fast_accum=fast)
    found = groups.matmul(Quantized(a, a_inv, fmt), Quantized(b, b_inv, E4M3), options)
    assert launched == ["matmul_rows"], "nothing clears rows of no group"
    wanted = torch.zeros(rows, n, device=DEVICE)
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        own = a_inv[group] if single else a_inv[start:end]
        wanted[start:end] = (a[start:end].float() @ b[group].float().T) * own * b_inv[group].reshape(-1)
    assert_close(found, wanted)


@pytest.mark.matrix(
    ends=list(ENDS), size=[(48, 64), (16, 32), (144, 272)], fmt=[E4M3, E5M2], single=[False, True], fast=[True, False]
)
def test_rows_of_each_group_are_multiplied_with_each_other(launched, ends, size, fmt, single, fast):
    rng, ends, (n, k) = np.random.default_rng(0), ENDS[ends], size
    rows, count = ends[-1] + BEHIND, len(ends)
    # of an empty group the scales may be anything
    empty = [start == end for start, end in itertools.pairwise([0, *ends])]
    operands, scales = [], []
    for columns, own in ((n, fmt), (k, E4M3)):
        scale = inverses(rng, count) if single else inverses(rng, count, 1, columns)
        scale[empty] = torch.nan
        operands.append(Quantized(wild(codes(rng, own, rows, columns), ends[-1]), scale, own))
        scales.append(scale.reshape(count, -1))
    groups = RowGroups(torch.tensor(ends, device=DEVICE), rows)
    found = groups.matmul_over_rows(*operands, OWN._replace(use_fast_accum=fast))
    assert launched.count("matmul_over_rows") == 1
    assert "fill_rows_with_zeros" not in launched
    wanted = torch.zeros(count, n, k, device=DEVICE)
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        if start < end:
            sums = operands[0].codes[start:end].float().T @ operands[1].codes[start:end].float()
            wanted[group] = sums * scales[0][group][:, None] * scales[1][group]
    assert_close(found, wanted)


def test_gaps_between_columns_of_groups_are_not_read():
    """A NaN of another group times zero is NaN, too."""
    rng, ends = np.random.default_rng(0), torch.tensor([16, 32], dtype=torch.int32, device=DEVICE)
    a, b, ones = codes(rng, E4M3, 16, 64), codes(rng, E4M3, 16, 64), torch.ones(2, 16, device=DEVICE)
    whole = grouped_matmul.multiply_over_rows(a, b, ones, ones, ends, E4M3, E4M3, True)
    for each in (a, b):
        each.view(torch.uint8)[:, 16:] = 0x7F
    first, second = grouped_matmul.multiply_over_rows(a, b, ones, ones, ends, E4M3, E4M3, True)
    assert torch.equal(first, whole[0])
    assert second.isnan().all()


@pytest.mark.parametrize("ends", [[64, 32, 80, 80], [64, 96, 256, 512], [-7, 3, 3, 80], [999, 0, 0, 0]])
def test_offsets_that_do_not_fit_give_nan(launched, monkeypatch, ends):
    """As on a GPU, where the host does not look at them."""
    monkeypatch.setattr(RowGroups, "known_on_host", property(lambda groups: False))
    rng, rows = np.random.default_rng(0), 80
    groups = RowGroups(torch.tensor(ends, device=DEVICE), rows)
    weight = groups.checked(Quantized(codes(rng, E4M3, 4, 16, 32), inverses(rng, 4, 16, 1), E4M3))
    y = groups.matmul(Quantized(codes(rng, E5M2, rows, 32), inverses(rng, rows, 1), E5M2), weight, OWN)
    assert launched == ["matmul_rows"]
    assert y.isnan().all()
    of_rows = [Quantized(codes(rng, E4M3, rows, 16), inverses(rng, 4, 1, 16), E4M3) for _ in range(2)]
    assert groups.matmul_over_rows(*of_rows, OWN).isfinite().all()


def test_the_operators_are_their_references(monkeypatch):
    rng, found = np.random.default_rng(0), []
    ends = torch.tensor([16, 16, 80], dtype=torch.int32, device=DEVICE)
    rows = codes(rng, E5M2, 83, 32), codes(rng, E4M3, 3, 48, 32), inverses(rng, 83, 1), inverses(rng, 3, 48)
    over = codes(rng, E5M2, 48, 96), codes(rng, E4M3, 32, 96), inverses(rng, 3, 48), inverses(rng, 3, 32)
    for choice in ("triton", "reference"):
        monkeypatch.setenv("FP8_COMMON_BACKEND", choice)
        found.append(grouped_matmul.multiply_rows(*rows, ends, E5M2, E4M3, True))
        found.append(grouped_matmul.multiply_over_rows(*over, ends, E5M2, E4M3, True))
    assert_close(found[0], found[2].float())
    assert_close(found[1], found[3].float())


def test_the_library_multiplies_where_no_kernel_was_measured(launched):
    """The table is empty: "table" is "library"."""
    rng = np.random.default_rng(0)
    a = Quantized(codes(rng, E4M3, 32, 32), inverses(rng, 32, 1), E4M3)
    b = Quantized(codes(rng, E4M3, 2, 16, 32), inverses(rng, 2, 16, 1), E4M3)
    c = Quantized(codes(rng, E4M3, 32, 16), inverses(rng, 2, 1, 16), E4M3)
    paths = {how: grouped_matmul.path_of(a, b, OWN._replace(grouped=how)) for how in ("table", "library", "own")}
    assert paths == {"table": "fp8", "library": "fp8", "own": "own"}
    assert grouped_matmul.path_of(c, c, OWN._replace(grouped="table")) == "fp8"
    assert grouped_matmul.path_of(c, c, OWN) == "own"
    gradient = Quantized(a.codes, a.scale_inv, E5M2)
    assert grouped_matmul.path_of(gradient, b, OWN._replace(grouped="library")) == "bfloat16"
    assert grouped_matmul.path_of(gradient, b, OWN) == "own"
    assert grouped_matmul.path_of(a, b, OWN._replace(emulate=True)) == "bfloat16"


def test_the_table_decides_by_matmul_rows_and_sizes(launched, monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setitem(OWN_GROUPED, ("rows", 16, 32), 16)
    b = Quantized(codes(rng, E4M3, 2, 16, 32), inverses(rng, 2, 16, 1), E4M3)
    for rows, wanted in ((32, "own"), (31, "fp8")):
        a = Quantized(codes(rng, E4M3, rows, 32), inverses(rng, rows, 1), E4M3)
        assert grouped_matmul.path_of(a, b, OWN._replace(grouped="table")) == wanted
    c = Quantized(codes(rng, E4M3, 64, 16), inverses(rng, 2, 1, 16), E4M3)
    d = Quantized(codes(rng, E4M3, 64, 32), inverses(rng, 2, 1, 32), E4M3)
    assert grouped_matmul.path_of(c, d, OWN._replace(grouped="table")) == "fp8"


def test_the_choice_reaches_all_three_matmuls():
    x = torch.ones(4, 16)
    plan = decide(LinearConfig(gemms=GemmConfig(grouped="own")), x, 16, x.dtype, casts_rows=False, grouped=True)
    assert [own.grouped for own in (plan.output, plan.grad_input, plan.grad_weight)] == ["own"] * 3
    with pytest.raises(Fp8Error, match="grouped must be"):
        GemmConfig(grouped="mine")


def test_sizes_that_16_does_not_divide_raise():
    for plan, sizes in ((matmul_rows, (5, 24, 32)), (matmul_rows, (5, 32, 24)), (matmul_over_rows, (24, 32, 32))):
        with pytest.raises(Fp8Error, match="multiples of 16"):
            plan(*sizes, 2, "e4m3", "e4m3", fast=True)

"""What engines' quantizers write beside what an export writes: the bytes where rules agree, else how many.

The table of docs/torch/serving.md has a row for each.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fp8_common as f8
from fp8_common.torch.export import serving_state_dict
from tests.conformance.serving_quantizers import RULES, Rule

ROWS, COLUMNS = 1024, 1024
PAGE = Path(__file__).parents[2] / "docs/torch/serving.md"


def normal() -> np.ndarray:
    """Return normal values whose rows have 2^20 different sizes, as blocks and tensors do."""
    rng = np.random.default_rng(11)
    return (rng.standard_normal((ROWS, COLUMNS)) * rng.uniform(0.01, 1, (ROWS, 1))).astype(np.float32)


def with_amax_of_powers() -> np.ndarray:
    """Return values whose largest in each row, block and in all is 448 times a power of two."""
    exponents = np.random.default_rng(12).integers(-9, 0, (ROWS // 128, 1, COLUMNS // 128, 1))
    x = np.clip(normal(), -1, 1).reshape(ROWS // 128, 128, COLUMNS // 128, 128)
    x[..., ::32] = 1.75
    x = (x * np.exp2(exponents)).reshape(ROWS, COLUMNS).astype(np.float32)
    x[:, 0] = 1.75
    return x


def ours(x: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and stored scales as an export has them."""
    layer = nn.Linear(x.shape[1], x.shape[0], bias=False)
    layer.weight = nn.Parameter(torch.from_numpy(x))
    policy = f8.POWER_OF_2 if rule.powers else f8.CANONICAL
    cast = f8.CastRecipe(granularity=rule.granularity, policy=policy)
    state = serving_state_dict(nn.ModuleDict({"w": layer}), {"w": cast}, "compressed-tensors")
    return state["w.weight"].view(torch.uint8).numpy(), state["w.weight_scale"].numpy()


def theirs(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        codes, scale = RULES[name].quantize(torch.from_numpy(x))
    except ImportError as missing:
        pytest.skip(f"{missing.name} cannot be imported, and {name} is not compared with it")
    return codes.view(torch.uint8).numpy(), scale.numpy()


def far(one: np.ndarray, other: np.ndarray) -> tuple[int, int]:
    """Return how many numbers differ, and by how many places at most."""
    kind = {1: np.int8, 4: np.int32}[one.itemsize]
    steps = np.abs(one.reshape(-1).view(kind).astype(np.int64) - other.reshape(-1).view(kind))
    return int((steps > 0).sum()), int(steps.max())


@pytest.mark.parametrize("name", RULES)
def test_bytes_are_the_same_where_rules_agree(name):
    x = with_amax_of_powers()
    for own, their in zip(ours(x, RULES[name]), theirs(x, name), strict=True):
        assert own.shape == their.shape
        assert own.tobytes() == their.tobytes()


@pytest.mark.parametrize("name", RULES)
def test_elsewhere_they_differ_as_the_table_says(name):
    rule, x = RULES[name], normal()
    found = [far(one, other) for one, other in zip(ours(x, rule), theirs(x, name), strict=True)]
    assert [count for count, _ in found] == [rule.codes, rule.scales]
    assert max(steps for _, steps in found) <= 1
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |"))
    said = [int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= of)", line)]
    assert said == [rule.scales, rule.codes]


@pytest.mark.parametrize("name", RULES)
def test_zeros(name):
    # one block: scales of any granularity broadcast to it
    rule, x = RULES[name], np.zeros((128, 128), np.float32)
    codes, scale = theirs(x, name)
    with np.errstate(all="ignore"):
        decoded = f8.decode(codes, "e4m3") * scale
    assert np.array_equal(decoded, np.full_like(x, rule.zeros), equal_nan=True)
    assert not ours(x, rule)[0].any()

"""`torch.compile(mode="reduce-overhead")`: forwards and backwards become CUDA graphs, with FSDP2 and without."""

import json

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.helpers.cuda_graphs import CASES, PLANTED
from tests.helpers.processes import on_a_pretended_gpu, python

pytestmark = [on_a_pretended_gpu, pytest.mark.xdist_group("CUDA graphs")]  # all read one program's findings

MOVES = "writes to 1 inputs that may be elsewhere"
# torch 2.15 counts the inputs that stay in place before it takes gathered weights apart into codes and scales, and so
# takes other inputs of the backward for them: backwards that record an amax are launched one kernel after the other.
COUNTED_WRONG = {"tensorwise_delayed, FSDP2": [[], [MOVES]]} if TorchVersion(torch.__version__) >= "2.15" else {}


@pytest.fixture(scope="module")
def found():
    # in a process of its own, because nothing takes the pretended GPU back
    return json.loads(python("-m", "tests.helpers.cuda_graphs"))


@pytest.mark.parametrize("case", [case for case in CASES if case != PLANTED])
def test_forward_and_backward_become_cuda_graphs(found, case):
    assert found[case] == COUNTED_WRONG.get(case, [[], []])


def test_a_planted_obstacle_is_found(found):
    assert found[PLANTED][0] == [MOVES]

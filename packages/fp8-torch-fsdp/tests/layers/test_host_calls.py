"""What an eager layer asks of the host, forward and backward, counted: Triton's driver launches nothing."""

import json

import pytest

from fp8_common.torch import _triton
from tests.helpers.processes import python

pytest.importorskip("triton")
from benchmarks import host

pytestmark = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(_triton.plans().interpreting(), reason="the interpreter runs kernels without a driver"),
]
MOST = {
    "tensorwise": (18, 6, 194),
    "tensorwise_delayed": (18, 4, 196),
    "rowwise": (34, 7, 235),
    "rowwise_with_gw_hp": (27, 3, 269),
    "blockwise": (33, 3, 233),
}
"""ATen operators, launches and calls of functions of one layer; of nn.Linear they are 8, 0 and 25."""


@pytest.mark.parametrize("recipe", MOST)
def test_a_layer_asks_little_of_the_host(recipe):
    with host.pretended_gpu() as gpu:
        found = host.eager(gpu, recipe)
    assert all(own <= most for own, most in zip(found, MOST[recipe], strict=True)), found


OWN = {"tensorwise": 325, "tensorwise_delayed": 420, "rowwise": 415, "rowwise_with_gw_hp": 385, "blockwise": 500}
"""Calls of functions of this project in a step of two layers under FSDP2."""


COUNT = """
import json, logging
import torch.distributed as dist
from benchmarks import host
logging.disable(logging.WARNING)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with host.pretended_gpu():
    print(json.dumps({recipe: host.sharded(recipe)[0] for recipe in host.RECIPES}))
dist.destroy_process_group()
"""


def test_a_sharded_step_makes_few_calls_of_its_own():
    # in a process of its own: what other models have watched is asked in every step
    found = json.loads(python("-c", COUNT))
    assert all(found[recipe] <= most for recipe, most in OWN.items()), found

"""How often a step of `fully_shard_traceable` reads weights: once for their amax, and once for their codes."""

import collections
import contextlib

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8_torch_fsdp as f8
from fp8_torch_fsdp.scales import sync
from tests.helpers.fsdp_models import converted

LAYERS, ROWS, COLUMNS = 2, 512, 128
# What reads a weight in the captured graph; the amax was taken before, when the ranks agreed on scales.
CASTS = {
    "tensorwise": "quantize_with_amax",
    "tensorwise_delayed": "quantize_with_amax",
    "rowwise": "quantize",
    "blockwise": "quantize",
}
# what copies, cuts and sends reads no values; gradients have the shapes of shards too
MOVES = ("copy", "view", "permute", "detach", "alias", "slice", "wait_tensor")


@contextlib.contextmanager
def ranks(world_size):
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def reads_of_a_step(recipe, rows):
    """Return the operators of the captured graphs that read a weight's shard, and how many amax are made besides."""
    model = nn.Sequential(*(nn.Linear(COLUMNS if i == 0 else rows, rows, bias=False) for i in range(LAYERS)))
    f8.fully_shard_traceable(converted(model, recipe))
    shards = {(rows // 2, COLUMNS), (rows // 2, rows)}
    seen, looked, made = collections.Counter(), [], sync.amax_bits

    def inspect(graph, inputs):
        for node in graph.graph.nodes:
            inputs = node.all_input_nodes if node.op == "call_function" else []
            values = [a.meta["val"] for a in inputs if isinstance(a.meta["val"], torch.Tensor)]
            wide = any(tuple(v.shape) in shards and v.is_floating_point() and v.itemsize > 1 for v in values)
            if wide and not any(word in str(node.target) for word in MOVES):
                seen[str(node.target).split(".")[1]] += 1
        return make_boxed_func(graph.forward)

    compiled = torch.compile(nn.Sequential.forward, backend=aot_autograd(fw_compiler=inspect, bw_compiler=inspect))
    model.forward = compiled.__get__(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "amax_bits", lambda slots: looked.extend(slots) or made(slots))
        model(torch.randn(128, COLUMNS)).sum().backward()
    return dict(seen), len(looked)


@pytest.mark.parametrize("recipe", CASTS)
def test_a_captured_step_reads_a_weight_once_for_its_amax_and_once_for_its_codes(recipe):
    with ranks(2):
        seen, keys = reads_of_a_step(recipe, ROWS)
    assert seen == {CASTS[recipe]: LAYERS}
    assert keys == LAYERS

"""A compiler makes one graph of a layer on a GPU, forward and backward: Dynamo traces fake tensors, nothing runs."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8_torch_fsdp as f8
from fp8_common import RECIPES
from fp8_common.torch_layers.linear import matmul

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is built without CUDA")
PRODUCTS = ("matmul", "_scaled_mm", "scaled_mm", "_scaled_mm_v2")


@pytest.fixture(autouse=True)
def devices_are_asked_anew():
    matmul._look_up.cache_clear()
    yield
    matmul._look_up.cache_clear()


# Dynamo copies the state that it guards, and copying a fake tensor of a subclass looks at its address
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
# with MXFP8 twice, whose products are emulated before Blackwell
@pytest.mark.matrix("each", recipe=[*RECIPES, "mxfp8"], capability=[(10, 0), (8, 9), (9, 0)], gather=[False, True])
def test_forward_and_backward_are_one_graph(monkeypatch, recipe, capability, gather):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    # scales of the first step would be taken from its values
    delayed = f8.DelayedScalingConfig(initial="one") if "delayed" in recipe else None
    config = f8.Float8TrainingConfig(recipe=recipe, all_gather=gather, emulate=False, delayed=delayed)
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        layer = nn.Linear(256, 384, dtype=torch.bfloat16)
        model = f8.convert_to_float8_training(nn.Sequential(layer), config=config)
        x = torch.randn(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
        y = torch.compile(model.forward, fullgraph=True, backend=backend)(x)
    assert (y.device.type, y.shape) == ("cuda", (2, 64, 384))
    (graph,) = graphs
    # the graphs of the rules of the autograd function are modules of the graph
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    called = [getattr(node.target, "__name__", str(node.target)) for part in parts for node in part.graph.nodes]
    products = [name for name in called if name in PRODUCTS]
    assert len(products) == 3, "of the output, of both gradients"
    if recipe == "mxfp8":
        assert all("scaled" in name for name in products) == (capability == (10, 0)), "emulated before Blackwell"

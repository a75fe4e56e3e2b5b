"""Gradients as FP8 codes in the traceable mode: the definition, the same bits compiled, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh

import fp8_common
import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_torch_fsdp._traceable.placement import Placement

pytestmark = pytest.mark.distributed
ROWS, COLUMNS = 7, 100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def build(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 32), Block(), nn.Linear(32, 5))
    keep = lambda module, name: module.out_features != 5  # noqa: E731
    f8.convert_to_float8_training(model, module_filter_fn=keep)
    return f8.fully_shard_traceable(model, mesh=mesh)


def gradients(model, rank, call=None):
    model.zero_grad()
    tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(rank))
    ((call or model)(tokens).float() - 1).square().mean().backward()
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def whole_gradient(rank):
    return np.random.default_rng(rank).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def average(rank, ranks, config):
    place = Placement.of(init_device_mesh("cpu", (ranks,)))
    coded = Placement(size=place.size, rank=place.rank, group=place.group, compression=config)
    return coded.finish_average(coded.start_average(torch.from_numpy(whole_gradient(rank))), ROWS).numpy()


@pytest.mark.parametrize("ranks", [2, 3])
def test_averages_equal_the_definition_bit_for_bit(run_ranks, ranks):
    config, part = f8.GradientCompression(), -(-ROWS // ranks)
    padded = [np.pad(whole_gradient(rank), ((0, part * ranks - ROWS), (0, 0))) for rank in range(ranks)]
    rows = np.stack(padded).reshape(ranks, ranks, part * COLUMNS)
    for rank, found in enumerate(run_ranks(ranks, average, config)):
        total = fp8_common.sum_of_compressed(rows[:, rank], config) / np.float32(ranks)
        np.testing.assert_array_equal(found, total.reshape(part, COLUMNS)[: len(found)])
        assert len(found) == min(part, ROWS - rank * part)


def compiled_and_eager(rank, ranks):
    mesh, targets = init_device_mesh("cpu", (ranks,)), []
    plain, eager, captured = (build(mesh) for _ in range(3))
    handles = [f8.compress_gradients(model, parameters=["!0.weight"]) for model in (eager, captured)]
    told = {w.name: w.gradient for w in f8.float8_all_gather_report(eager).weights}

    def keep(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    call = torch.compile(captured, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    found = [gradients(plain, rank), gradients(eager, rank), gradients(captured, rank, call)]
    with pytest.raises(Fp8Error, match="compressed already"):
        f8.compress_gradients(eager)
    handles[0].remove()
    removed = gradients(eager, rank)
    for settings in ({"rounding": "stochastic"}, {"error_feedback": True}):
        with pytest.raises(Fp8UnsupportedError, match="rounded to nearest without error feedback"):
            f8.compress_gradients(eager, f8.GradientCompression(**settings))
    with pytest.raises(Fp8UnsupportedError, match="nodes= are for models of fully_shard"):
        f8.compress_gradients(eager, nodes=init_device_mesh("cpu", (1, ranks)))
    return *found, removed, targets, told


def test_compiled_gradients_have_the_bits_of_eager_ones_and_the_graph_holds_the_reduction(run_ranks):
    for plain, eager, captured, removed, targets, told in run_ranks(2, compiled_and_eager, timeout=600.0):
        assert sum("all_to_all_single" in target for target in targets) == 3, "both FP8 layers and the head"
        assert sum("sum_gradients" in target for target in targets) == 3
        for name, gradient in plain.items():
            assert torch.equal(captured[name], eager[name]), name
            assert torch.equal(removed[name], gradient), name
            coded = gradient.ndim == 2 and name != "0.weight"
            assert told[name] == ("float8_e4m3fn" if coded else "float32")
            error = (eager[name] - gradient).norm() / gradient.norm()
            assert (0.001 < error < 0.05) if coded else error == 0, f"{name}: {error}"

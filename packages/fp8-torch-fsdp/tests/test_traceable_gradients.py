"""Gradients as FP8 codes in the traceable mode: the definition, the same bits compiled, and what is refused."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8_common
import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_torch_fsdp._traceable.codes import GradientCodes, Message
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
    codes = GradientCodes(ranks=place.size, shards=(Message(config=config, size=place.size, group=place.group),))
    coded = Placement(size=place.size, rank=place.rank, group=place.group, codes={"w": codes})
    return coded.finish_average(coded.start_average(torch.from_numpy(whole_gradient(rank)), "w"), ROWS, "w").numpy()


@pytest.mark.parametrize("ranks", [2, 3])
def test_averages_equal_the_definition_bit_for_bit(run_ranks, ranks):
    config, part = f8.GradientCompression(), -(-ROWS // ranks)
    padded = [np.pad(whole_gradient(rank), ((0, part * ranks - ROWS), (0, 0))) for rank in range(ranks)]
    rows = np.stack(padded).reshape(ranks, ranks, part * COLUMNS)
    for rank, found in enumerate(run_ranks(ranks, average, config)):
        total = fp8_common.sum_of_compressed(rows[:, rank], config) / np.float32(ranks)
        np.testing.assert_array_equal(found, total.reshape(part, COLUMNS)[: len(found)])
        assert len(found) == min(part, ROWS - rank * part)


def compiled(model, targets):
    def keep(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    return torch.compile(model, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))


def compiled_and_eager(rank, ranks):
    mesh, targets = init_device_mesh("cpu", (ranks,)), []
    plain, eager, captured = (build(mesh) for _ in range(3))
    handles = [f8.compress_gradients(model, parameters=["!0.weight"]) for model in (eager, captured)]
    told = {w.name: w.gradient for w in f8.float8_communication_report(eager).weights}
    found = [gradients(plain, rank), gradients(eager, rank), gradients(captured, rank, compiled(captured, targets))]
    with pytest.raises(Fp8Error, match="compressed already"):
        f8.compress_gradients(eager)
    handles[0].remove()
    removed = gradients(eager, rank)
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


# ---------------------------------------------------------------- state


SIZES = (24, 40, 17)
"""Widths of layers: rows of 40 and 17 are uneven on three ranks, and no message ends with a whole block."""
SETTINGS = [{"rounding": "stochastic", "seed": 3}, {"error_feedback": True, "format": "e5m2"}]


def plain_layers():
    torch.manual_seed(0)
    # no bias: wide elements are added in rank order by FSDP2's message, and by gloo here
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(SIZES)))


def with_fsdp2(mesh):
    model = plain_layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses(model, steps, rank, first=0, call=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(first, first + steps):
        x = torch.randn(6, SIZES[0], generator=torch.Generator().manual_seed(100 * step + rank))
        loss = ((call or model)(x) - 1).square().mean()
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().full_tensor().clone() for p in model.parameters()]


def same(one, other):
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


def both_ways(rank, ranks, settings, arrangement):
    """FSDP2 with one matrix to a group, and the traceable mode, whose messages hold one matrix each."""
    config, options, mesh = f8.GradientCompression(**settings), {}, init_device_mesh("cpu", (ranks,))
    inner = outer = mesh
    if arrangement == "nodes":
        options["nodes"] = init_device_mesh("cpu", (2, ranks // 2))
    if "replicas" in arrangement:
        options["replicas_only"] = arrangement == "between replicas alone"
        outer = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))
        inner, options["replicas"] = outer["shards"], outer.get_group(0)
    eager, traceable = with_fsdp2(inner), f8.fully_shard_traceable(plain_layers(), mesh=outer)
    handles = [f8.compress_gradients(model, config, **options) for model in (eager, traceable)]
    found = [losses(model, 5, rank) for model in (eager, traceable)]
    del handles
    return found


# in this order, so that by default errors are fed back over nodes, and uneven shards are rounded at random
@pytest.mark.matrix(
    "each",
    arrangement=["nodes", "flat", "between replicas alone", "replicas"],
    settings=[SETTINGS[1], SETTINGS[0], {}],
)
def test_gradients_have_the_bits_of_fsdp2(run_ranks, arrangement, settings):
    ranks = 3 if arrangement == "flat" else 4
    if arrangement == "between replicas alone":
        settings = settings | {"error_feedback": False}
    for eager, traceable in run_ranks(ranks, both_ways, settings, arrangement):
        assert same(eager, traceable)


def compiled_with_state(rank, ranks, settings, folder):
    mesh, config = init_device_mesh("cpu", (ranks,)), f8.GradientCompression(**settings)
    eager, captured, resumed, fresh = (f8.fully_shard_traceable(plain_layers(), mesh=mesh) for _ in range(4))
    handles = [f8.compress_gradients(model, config) for model in (eager, captured, resumed, fresh)]
    calls, targets = [None, None, None, None], []
    calls[1:3] = [compiled(model, targets) for model in (captured, resumed)]
    found = [losses(model, 3, rank, call=call) for model, call in zip((eager, captured), calls, strict=False)]
    losses(resumed, 1, rank, call=calls[2])  # its state is another than that of the checkpoint
    dcp.save({"model": captured.state_dict(), "gradients": handles[1]}, checkpoint_id=folder)
    found += [losses(model, 3, rank, 3, call) for model, call in zip((eager, captured), calls, strict=False)]
    state = {"model": resumed.state_dict(), "gradients": handles[2]}
    dcp.load(state, checkpoint_id=folder)
    for model, call in zip((resumed, fresh), calls[2:], strict=True):
        model.load_state_dict(state["model"])
        found.append(losses(model, 3, rank, 3, call))
    kept = [handle.state_dict()[f"rank {rank} of {ranks}"] for handle in handles[:3]]
    handles[0].reset()
    assert not any(residual.any() for residual in kept[0]["residuals"].values())
    handles[0].remove()
    packed = sum("pack_next_gradients" in target or "auto_functionalized" in target for target in targets)
    return found, [one["drawn"] | one["residuals"] for one in kept[1:]], packed


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_graph_goes_on_with_the_state_of_roundings_and_a_resumed_one_too(run_ranks, settings, tmp_path):
    results = run_ranks(2, compiled_with_state, settings, tmp_path / "checkpoint", timeout=600.0)
    for (eager, captured, eager_on, captured_on, resumed, fresh), (kept, again), packed in results:
        assert packed == 4, "two layers in the graphs of two models"
        assert same(captured, eager)
        assert same(captured_on, eager_on)
        assert same(resumed, captured_on)
        assert not same(fresh, captured_on), "the state matters"
        assert kept.keys() == again.keys()
        assert all(torch.equal(kept[name], again[name]) and kept[name].any() for name in kept)


class Knotted(nn.Module):
    """Layers that are used twice, once under a checkpoint, a head tied to the embedding, two bare matrices."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 32), nn.Linear(32, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.first, self.second = (nn.Parameter(torch.randn(32, 32) / 6) for _ in range(2))

    def again(self, x):
        return x + self.down(self.up(x).relu())

    def forward(self, tokens):
        x = self.again(self.embedding(tokens)) @ self.first @ self.second
        return self.head(checkpoint(self.again, x, use_reentrant=False))


def knotted(rank, ranks):
    mesh, found, targets = init_device_mesh("cpu", (ranks,)), [], []
    tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(rank))
    for captured in (False, True):
        torch.manual_seed(0)
        model = Knotted()
        f8.convert_to_float8_training(model, module_filter_fn=lambda module, name: name in ("up", "down"))
        f8.fully_shard_traceable(model, mesh=mesh)
        config = f8.GradientCompression(rounding="stochastic", error_feedback=True)
        handle = f8.compress_gradients(model, config, parameters=["!first"])
        call = compiled(model, targets) if captured else model
        for i in range(2):
            call(tokens[: 16 - 2 * i]).float().square().mean().backward()
        state = handle.state_dict()[f"rank {rank} of {ranks}"]
        gradients = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        found.append(gradients | state["drawn"] | {f"lost of {n}": r for n, r in state["residuals"].items()})
    return found


def test_ties_checkpoints_and_layers_that_are_used_again_have_the_same_bits_compiled(run_ranks):
    for eager, captured in run_ranks(2, knotted, timeout=600.0):
        assert eager.keys() == captured.keys()
        assert [name for name, one in eager.items() if not torch.equal(one, captured[name])] == []
        assert "lost of second" in eager
        assert "lost of first" not in eager, "matrices of one module may travel in different ways"
        _, offset, step = eager["up.weight 0"].tolist()
        assert offset // step == 4, "two backwards of two uses each: a recomputed forward draws nothing"


def spoiled(rank, ranks, settings):
    mesh = init_device_mesh("cpu", (ranks,))
    model = f8.fully_shard_traceable(plain_layers(), mesh=mesh)
    f8.compress_gradients(model, f8.GradientCompression(**settings))
    finite = []
    for value in (1.0, float("inf"), float("nan"), 1.0):
        x = torch.randn(6, SIZES[0], generator=torch.Generator().manual_seed(rank))
        loss = model(x).square().mean()
        (loss * value if rank == 1 else loss).backward()
        finite.append([p.grad.to_local().isfinite().all().item() for p in model.parameters()])
        model.zero_grad()
    return finite


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_gradient_that_is_not_finite_is_seen_and_forgotten(run_ranks, settings):
    for finite in run_ranks(2, spoiled, settings):
        assert finite == [[True] * 2, [False] * 2, [False] * 2, [True] * 2]


def refused_groups(rank, ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    told = []
    for options in (
        {"nodes": init_device_mesh("cpu", (2, 2))},
        {"nodes": mesh["shards"]},
        {"replicas": mesh.get_group(1)},
        {"nodes": DeviceMesh("cpu", [[0, 2], [1, 3]])},
    ):
        model = f8.fully_shard_traceable(plain_layers(), mesh=mesh)
        with pytest.raises(Fp8Error) as raised:
            f8.compress_gradients(model, **options)
        told.append(str(raised.value))
    flat = f8.fully_shard_traceable(plain_layers())
    with pytest.raises(Fp8Error, match="hand over the first dimension"):
        f8.compress_gradients(flat, replicas=mesh.get_group(0))
    assert not list(gradient_codes(model)), "a refusal leaves the model as it was"
    return told


def gradient_codes(model):
    return [w.name for w in f8.float8_communication_report(model).weights if w.gradient.startswith("float8")]


def test_groups_that_are_not_those_of_the_model_are_refused_on_all_ranks(run_ranks):
    parts = ["row by row", "two dimensions", "hand over the first dimension", "row by row"]
    for told in run_ranks(4, refused_groups):
        assert [part in text for part, text in zip(parts, told, strict=True)] == [True] * len(parts), told

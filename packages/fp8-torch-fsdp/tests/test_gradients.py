"""Gradients that travel as FP8 codes: their numbers, their bytes, their state, and what stays as it is."""

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8_common
import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common._philox import random_bits
from fp8_torch_fsdp._gradients.collectives import GradientExchange
from fp8_torch_fsdp._gradients.payload import Span, join, merged, split
from tests.helpers.collectives import CollectiveCounter

pytestmark = pytest.mark.distributed
BLOCK = 128


# ---------------------------------------------------------------- the numbers


def rows_of(rank, ranks, length, kind):
    """One rank's gradients for each rank, with blocks of every magnitude and a block of zeros."""
    generator = np.random.default_rng(100 * ranks + rank)
    rows = generator.standard_normal((ranks, length)) * 2.0 ** generator.integers(-40, 20, (ranks, 1))
    rows[:, :BLOCK] = 0
    rows[:, -1] *= 1e3
    return rows.astype(kind)


def reduce_rows(rank, ranks, length, kind, settings):
    exchange = GradientExchange(f8.GradientCompression(**settings))
    rows = rows_of(rank, ranks, length, kind)
    values = torch.from_numpy(rows.astype(np.float32)).to(torch.bfloat16 if kind != np.float32 else torch.float32)
    wide = values[:, :5].clone()
    compressed, whole = exchange.reduce_scatter((values, wide), dist.group.WORLD)
    return compressed.numpy(), whole.numpy()


def expected(ranks, length, kind, settings):
    """What the ranks compute, by the definitions in NumPy: [ranks, length] and [ranks, 5]."""
    fmt, total, whole = settings.get("format", "e4m3"), 0, 0
    for rank in range(ranks):
        rows = rows_of(rank, ranks, length, kind).astype(np.float32)
        codes, scales = fp8_common.quantize_blockwise(rows, fmt, (1, BLOCK), fp8_common.POWER_OF_2)
        if settings.get("rounding") == "stochastic":
            scaled = rows * np.repeat(scales, BLOCK, 1)[:, :length]
            # a row begins with a new block of counters
            bits = random_bits(settings["seed"] | rank << 32, (ranks, BLOCK * scales.shape[1]))[:, :length]
            codes = fp8_common.encode_stochastic(scaled, fmt, bits)
        total = total + fp8_common.dequantize_blockwise(codes, scales, fmt, (1, BLOCK))
        whole = whole + rows[:, :5]
    return total, whole


@pytest.mark.parametrize("settings", [{}, {"format": "e5m2"}, {"rounding": "stochastic", "seed": 7}], ids=str)
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_equal_the_definition_bit_for_bit(run_ranks, ranks, kind, settings):
    length = 3 * BLOCK + 17
    total, whole = expected(ranks, length, kind, settings)
    for rank, (compressed, wide) in enumerate(run_ranks(ranks, reduce_rows, length, kind, settings)):
        np.testing.assert_array_equal(compressed, total[rank])
        np.testing.assert_array_equal(wide, whole[rank])


def reduce_on_nodes(rank, ranks, length, settings):
    nodes = init_device_mesh("cpu", (2, ranks // 2))
    exchange = GradientExchange(f8.GradientCompression(**settings), nodes)
    values = torch.from_numpy(rows_of(rank, ranks, length, np.float32))
    residual = torch.zeros(values.shape, dtype=torch.bfloat16) if settings.get("error_feedback") else None
    with CollectiveCounter() as counter:
        compressed, whole = exchange.reduce_scatter((values, values[:, :5].clone()), dist.group.WORLD, residual)
    sent = [one.elements for one in counter.seen]
    return compressed.numpy(), whole.numpy(), sent, None if residual is None else residual.float().abs().sum().item()


def message_bytes(length, wide):
    """Bytes of one row: codes, scales and float32 elements, each section filled up to multiples of 16."""
    return sum(-(-nbytes // 16) * 16 for nbytes in (length, 4 * -(-length // BLOCK), 4 * wide))


@pytest.mark.parametrize("settings", [{}, {"format": "e5m2", "error_feedback": True}], ids=str)
def test_nodes_add_first_and_send_one_gradient_each(run_ranks, settings):
    length, ranks = 3 * BLOCK + 17, 4
    config = f8.GradientCompression(format=settings.get("format", "e4m3"))
    all_rows = np.stack([rows_of(rank, ranks, length, np.float32) for rank in range(ranks)]).reshape(2, 2, 2, 2, length)
    found = run_ranks(ranks, reduce_on_nodes, length, settings)
    for node in range(2):
        for local in range(2):
            # what this rank of each node adds: both of its ranks' rows for the same rank of all nodes, side by side
            sums = [fp8_common.sum_of_compressed(rows[:, :, local].reshape(2, -1), config) for rows in all_rows]
            wanted = fp8_common.sum_of_compressed(np.stack([s.reshape(2, length)[node] for s in sums]), config)
            compressed, whole, sent, residual = found[2 * node + local]
            np.testing.assert_array_equal(compressed, wanted)
            np.testing.assert_array_equal(whole, all_rows[:, :, node, local, :5].sum(1).sum(0))
            # within a node the whole gradient, between nodes half of it: a part for each of its two ranks
            assert sent == [2 * message_bytes(2 * length, 2 * 5), 2 * message_bytes(length, 5)]
            assert residual is None or residual > 0


def trains_on_nodes(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    nodes = init_device_mesh("cpu", (2, 2))
    plain, ours = (sharded(mesh) for _ in range(2))
    f8.compress_gradients(ours, nodes=nodes)
    torch.manual_seed(0)
    alone = fully_shard(nn.Linear(16, 16, bias=False), mesh=mesh)  # nothing travels wide
    f8.compress_gradients(alone, nodes=nodes)
    alone(torch.ones(2, 16)).sum().backward()
    with pytest.raises(Fp8Error, match="row by row"):
        f8.compress_gradients(sharded(mesh), nodes=DeviceMesh("cpu", [[0, 2], [1, 3]]))
    with pytest.raises(Fp8Error, match="two dimensions"):
        f8.compress_gradients(sharded(mesh), nodes=mesh)
    return losses(plain, 8), losses(ours, 8)


def test_training_on_nodes_goes_as_without(run_ranks):
    for plain, ours in run_ranks(4, trains_on_nodes):
        assert ours != plain
        np.testing.assert_allclose(ours, plain, rtol=0.02)


def test_an_element_arrives_with_the_error_that_is_stated():
    values = torch.from_numpy(rows_of(0, 4, 64 * BLOCK, np.float32))
    codes, scales = fp8_common.quantize_blockwise(values.numpy(), "e4m3", (1, BLOCK), fp8_common.POWER_OF_2)
    error = abs(fp8_common.dequantize_blockwise(codes, scales, "e4m3", (1, BLOCK)) - values.numpy())
    amax = np.repeat(abs(values.numpy()).reshape(4, -1, BLOCK).max(-1), BLOCK, 1)
    assert (error <= np.maximum(2.0**-4 * abs(values.numpy()), 2.0**-17 * amax)).all()
    assert (error > 2.0**-5 * abs(values.numpy())).any(), "the bound is not far from what happens"


def test_rows_are_cut_and_joined():
    spans = merged([Span(3, True), Span(0, False), Span(2, True), Span(4, False), Span(1, True)])
    assert spans == (Span(5, True), Span(4, False), Span(1, True))
    rows = torch.arange(20.0).view(2, 10)
    compressed, wide = split(rows, spans)
    assert compressed.tolist() == [[0, 1, 2, 3, 4, 9], [10, 11, 12, 13, 14, 19]]
    assert torch.equal(join(compressed[1], wide[1], spans), rows[1])


def average_everywhere(rank, ranks):
    exchange = GradientExchange(f8.GradientCompression())
    values, wide = torch.full((1000,), float(rank + 1)), torch.full((7,), 1.0 + rank)
    return [part.tolist() for part in exchange.all_reduce((values, wide), dist.group.WORLD, ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_reduce_averages_on_every_rank(run_ranks, ranks):
    mean = (ranks + 1) / 2
    for compressed, wide in run_ranks(ranks, average_everywhere):
        assert (compressed, wide) == ([mean] * 1000, [mean] * 7), "numbers that FP8 holds arrive exactly"


# ---------------------------------------------------------------- FSDP2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(40)
        self.up, self.down = nn.Linear(40, 96), nn.Linear(96, 40, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def sharded(mesh, *, recipe=None, reduce_dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    if recipe is not None:
        f8.convert_to_float8_training(model, recipe=recipe)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def losses(model, steps, *, first=0, spoil=None, micro_batches=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(first, first + steps):
        for micro in range(micro_batches):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
            x = torch.randn(6, 40, generator=generator)
            loss = (model(x) - x.flip(1)).square().mean()
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            (loss * float("inf") if spoil == dist.get_rank() else loss).backward()
        seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def gradients_of(model, rank):
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(rank))
    (model(x) - x.flip(1)).square().mean().backward()
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def gradients_both_ways(rank, ranks, reduce_dtype):
    mesh = init_device_mesh("cpu", (ranks,))
    plain, ours = (sharded(mesh, reduce_dtype=reduce_dtype) for _ in range(2))
    ours[0].norm.weight.requires_grad_(False)
    f8.compress_gradients(ours, f8.GradientCompression(format="e4m3"), parameters=["!1.up.weight"])
    reports = [{w.name: w.gradient for w in f8.float8_communication_report(model).weights} for model in (plain, ours)]
    ours[0].norm.weight.requires_grad_(True)
    return gradients_of(plain, rank), gradients_of(ours, rank), *reports


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_near_and_what_is_left_out_is_exact(run_ranks, reduce_dtype):
    # two ranks: the order of a sum of two makes no difference
    wide = str(reduce_dtype).removeprefix("torch.")
    for plain, ours, before, after in run_ranks(2, gradients_both_ways, reduce_dtype):
        assert set(before.values()) == {wide}, "the report says how gradients travel"
        assert after == {
            name: "" if name == "0.norm.weight" else "float8_e4m3fn" if g.ndim == 2 and name != "1.up.weight" else wide
            for name, g in plain.items()
        }
        for name, gradient in plain.items():
            compressed = gradient.ndim == 2 and name != "1.up.weight"
            assert torch.equal(gradient, ours[name]) == (not compressed) or reduce_dtype == torch.bfloat16, name
            error = (gradient - ours[name]).norm() / gradient.norm()
            assert (0.005 < error < 0.04) if compressed else error < 0.01, f"{name}: {error}"


def trains(rank, ranks, recipe, settings, micro_batches):
    mesh = init_device_mesh("cpu", (ranks,))
    plain, ours, undone = (sharded(mesh, recipe=recipe) for _ in range(3))
    f8.compress_gradients(ours, f8.GradientCompression(**settings))
    f8.compress_gradients(undone, f8.GradientCompression(**settings)).remove()
    return [losses(model, 12, micro_batches=micro_batches) for model in (plain, ours, undone)]


@pytest.mark.parametrize(
    ("recipe", "settings", "micro_batches"),
    [
        (None, {}, 1),
        ("tensorwise", {"rounding": "stochastic"}, 1),
        ("tensorwise_delayed", {"error_feedback": True}, 2),
        ("rowwise", {"format": "e5m2"}, 1),
    ],
)
def test_training_goes_as_without_and_exactly_so_when_removed(run_ranks, recipe, settings, micro_batches):
    for plain, ours, undone in run_ranks(2, trains, recipe, settings, micro_batches):
        assert undone == plain
        assert ours != plain
        np.testing.assert_allclose(ours, plain, rtol=0.02)


def count_bytes(rank, ranks, kind):
    model = sharded(init_device_mesh("cpu", (ranks,)))
    handle = f8.compress_gradients(model, f8.GradientCompression(format=kind))
    losses(model, 1)
    with CollectiveCounter() as counter:
        losses(model, 1, first=1)
    del handle
    weights = sum(p.numel() for p in model.parameters())
    return weights, [(one.kind, one.nbytes) for one in counter.seen if one.kind not in ("all_gather", "all_reduce")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gradient_sends_one_byte_and_its_share_of_a_scale(run_ranks, ranks):
    for weights, seen in run_ranks(ranks, count_bytes, "e4m3"):
        assert {kind for kind, _ in seen} == {"alltoall_base"}
        assert len(seen) == 2, "one message for each block"
        # norms and biases, 216 of them in each block, travel as float32; shards are padded to whole rows
        assert sum(nbytes for _, nbytes in seen) <= 1.06 * weights + 3 * 2 * 216


def spoiled(rank, ranks, settings):
    model = sharded(init_device_mesh("cpu", (ranks,)))
    f8.compress_gradients(model, f8.GradientCompression(**settings))
    x = torch.randn(6, 40)
    loss = model(x).square().mean()
    (loss * float("inf") if rank == 1 else loss).backward()
    assert not any(p.grad.to_local().isfinite().all() for p in model.parameters()), "seen in every shard of every rank"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    model(x).square().mean().backward()
    after = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return norm.full_tensor().item(), after.full_tensor().item()


@pytest.mark.parametrize("settings", [{}, {"rounding": "stochastic"}, {"error_feedback": True}], ids=str)
def test_a_gradient_that_is_not_finite_is_seen_and_forgotten(run_ranks, settings):
    for norm, after in run_ranks(2, spoiled, settings):
        assert not np.isfinite(norm)
        assert np.isfinite(after)


def frozen_and_unused(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    models = [sharded(mesh) for _ in range(2)]
    f8.compress_gradients(models[1])
    found = []
    for model in models:
        model[0].up.weight.requires_grad_(False)
        x = torch.randn(6, 40, generator=torch.Generator().manual_seed(rank))
        # `norm` and `up` of the second block take no part in this loss: their groups' buffers are shorter
        model[1].forward = lambda x, block=model[1]: block.down(torch.cat([x, x, x[:, :16]], dim=1))
        model(x).square().mean().backward()
        found.append({n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()})
    return found


def test_frozen_and_unused_parameters_do_not_shift_the_others(run_ranks):
    for plain, ours in run_ranks(2, frozen_and_unused):
        assert {n for n, g in ours.items() if g is None} == {n for n, g in plain.items() if g is None}
        assert torch.equal(ours["1.down.weight"], plain["1.down.weight"]), "a buffer that nobody can read stays wide"
        for name in ("0.down.weight", "0.norm.weight"):
            torch.testing.assert_close(ours[name], plain[name], rtol=0.1, atol=0.05 * plain[name].abs().max().item())


# ---------------------------------------------------------------- state


def resumed(rank, ranks, settings, folder):
    mesh, config = init_device_mesh("cpu", (ranks,)), f8.GradientCompression(**settings)
    model = sharded(mesh)
    handle = f8.compress_gradients(model, config)
    losses(model, 3)
    dcp.save({"model": model.state_dict(), "gradients": handle}, checkpoint_id=folder)
    whole = losses(model, 3, first=3)
    other = sharded(mesh)
    handle = f8.compress_gradients(other, config)
    losses(other, 1)  # its random state and residuals are others than those of the checkpoint
    state = {"model": other.state_dict(), "gradients": handle}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    again = losses(other, 3, first=3)
    fresh = sharded(mesh)
    f8.compress_gradients(fresh, config)
    fresh.load_state_dict(state["model"])
    return whole, again, losses(fresh, 3, first=3)


@pytest.mark.parametrize("settings", [{"rounding": "stochastic", "seed": 3}, {"error_feedback": True}], ids=str)
def test_a_resumed_run_continues_bit_for_bit(run_ranks, settings, tmp_path):
    for whole, again, without in run_ranks(2, resumed, settings, tmp_path / "checkpoint"):
        assert again == whole
        assert without != whole, "the state matters"


def states_of_others(rank, ranks):
    model = sharded(init_device_mesh("cpu", (ranks,)))
    handle = f8.compress_gradients(model, f8.GradientCompression(error_feedback=True))
    told = []
    for state in ({}, {f"rank {rank} of {ranks}": {"residuals": {}}}):
        with pytest.raises(Fp8Error) as raised:
            handle.load_state_dict(state)
        told.append(str(raised.value))
    return told


def test_a_state_of_other_ranks_or_another_model_is_refused(run_ranks):
    for told in run_ranks(2, states_of_others):
        assert all("Load it on as many ranks as saved it" in text for text in told)


def feedback(rank, ranks, settings):
    """The relative error of the sum of 40 reductions of one gradient."""
    exchange = GradientExchange(f8.GradientCompression(**settings))
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(ranks, 4096, generator=generator)
    residual = torch.zeros(ranks, 4096, dtype=torch.bfloat16) if settings.get("error_feedback") else None
    total = torch.zeros(4096)
    for _ in range(40):
        total += exchange.reduce_scatter((rows, rows[:, :0]), dist.group.WORLD, residual)[0]
    exact = rows.clone()
    dist.all_reduce(exact)
    return ((total / 40 - exact[rank]).norm() / exact[rank].norm()).item()


def test_feedback_and_random_rounding_make_errors_of_many_steps_cancel(run_ranks):
    nearest, stochastic, fed_back = (
        max(run_ranks(2, feedback, settings)) for settings in ({}, {"rounding": "stochastic"}, {"error_feedback": True})
    )
    assert nearest > 0.02, "one and the same error in each step"
    assert stochastic < nearest / 2
    assert fed_back < nearest / 10


# ---------------------------------------------------------------- replicas and DDP


def replicated(rank, ranks):
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("nodes", "shards"))
    plain = losses(sharded(mesh), 8)
    native, own, between = sharded(mesh), sharded(mesh["shards"]), sharded(mesh["shards"])
    f8.compress_gradients(native)
    f8.compress_gradients(own, replicas=mesh["nodes"].get_group())
    handle = f8.compress_gradients(between, replicas=mesh["nodes"].get_group(), replicas_only=True)
    with pytest.raises(Fp8Error, match="compressed already"):
        f8.compress_gradients(between)
    with pytest.raises(Fp8UnsupportedError, match="replicated by FSDP2"):
        f8.compress_gradients(sharded(mesh), replicas=mesh["nodes"].get_group())
    with CollectiveCounter() as counter:
        alone = losses(between, 1)
    kinds = [one.kind for one in counter.seen]
    assert kinds.count("alltoall_base") == 2, "one message for each block, between replicas"
    assert sum("reduce_scatter" in kind for kind in kinds) == 2, "within a replica FSDP2's own"
    handle.remove()
    found = losses(native, 8), losses(own, 8), alone + losses(between, 7, first=1)
    equal = [torch.empty(2) for _ in range(2)]
    weight = own[0].up.weight.to_local().flatten()[:2].contiguous()
    dist.all_gather(equal, weight, group=mesh["nodes"].get_group())
    return plain, *found, torch.equal(*equal)


def test_replicas_are_averaged_as_codes_too(run_ranks):
    for plain, native, own, between, equal in run_ranks(4, replicated):
        np.testing.assert_allclose(between[:2], plain[:2], rtol=0.02)
        np.testing.assert_allclose(native, plain, rtol=0.02)
        np.testing.assert_allclose(own, plain, rtol=0.02)
        assert equal, "copies stay copies"


def distributed(rank, ranks):
    def model():
        torch.manual_seed(0)
        return DistributedDataParallel(nn.Sequential(Block(), Block()))

    plain, ours = model(), model()
    handle = f8.compress_gradients(ours, parameters=lambda parameter, name: "down" in name)
    with pytest.raises(Fp8UnsupportedError, match="for good"):
        handle.remove()
    with pytest.raises(Fp8UnsupportedError, match="error_feedback"):
        f8.compress_gradients(model(), f8.GradientCompression(error_feedback=True))
    return losses(plain, 8), losses(ours, 8), [p.detach().clone() for p in ours.parameters()]


def test_ddp_reduces_as_codes_and_ranks_stay_equal(run_ranks):
    (plain, ours, first), (_, _, second) = run_ranks(2, distributed)
    np.testing.assert_allclose(ours, plain, rtol=0.02)
    assert ours != plain
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


# ---------------------------------------------------------------- bad input


def refusals(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    told = []

    def refused(function):
        with pytest.raises((Fp8Error, Fp8UnsupportedError)) as raised:
            function()
        told.append(str(raised.value))

    refused(lambda: f8.compress_gradients(nn.Linear(4, 4)))
    model = sharded(mesh)
    f8.compress_gradients(model)
    refused(lambda: f8.compress_gradients(model))
    refused(lambda: f8.compress_gradients(sharded(mesh), parameters=["*", "!*.weight", "*.weight"]))
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(7.0)
    refused(lambda: losses(model, 1))
    for settings in ({"format": "e3m4"}, {"rounding": "up"}, {"block": 0}, {"seed": 2**32}):
        refused(lambda settings=settings: f8.GradientCompression(**settings))
    return told


def test_what_cannot_be_done_is_one_sentence_on_all_ranks(run_ranks):
    first, second = run_ranks(2, refusals)
    assert first == second
    parts = [
        "Call fully_shard",
        "compressed already",
        "contradict",
        "set_force_sum_reduction_for_comms",
        "format",
        "rounding",
        "block",
        "seed",
    ]
    assert [part in text for part, text in zip(parts, first, strict=True)] == [True] * len(parts), first

"""Gradients that travel as FP8 codes: their numbers, their bytes, their state, and what stays as it is."""

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8_common
import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common._reference.rounding import random_bits
from fp8_torch_fsdp.reduce_scatter import RandomState, join, reduce_rows, split
from tests.helpers.collectives import CollectiveCounter

pytestmark = pytest.mark.distributed
BLOCK, NEAREST = 128, {"rounding": "nearest"}


# ---------------------------------------------------------------- the numbers


def rows_of(rank, ranks, length, kind):
    """One rank's gradients for each rank, with blocks of every magnitude and a block of zeros."""
    generator = np.random.default_rng(100 * ranks + rank)
    rows = generator.standard_normal((ranks, length)) * 2.0 ** generator.integers(-40, 20, (ranks, 1))
    rows[:, :BLOCK] = 0
    rows[:, -1] *= 1e3
    return rows.astype(kind)


def reduce_on_ranks(rank, ranks, length, kind, settings):
    handle = RandomState(f8.GradientCompression(**settings))
    rows = rows_of(rank, ranks, length, kind)
    values = torch.from_numpy(rows.astype(np.float32)).to(torch.bfloat16 if kind != np.float32 else torch.float32)
    wide = values[:, :5].clone()
    compressed, whole = reduce_rows(handle, values, wide, dist.group.WORLD)
    return compressed.numpy(), whole.numpy()


def expected(ranks, length, kind, settings):
    """What the ranks compute, by the definitions in NumPy: [ranks, length] and [ranks, 5]."""
    fmt, total, whole = settings.get("format", "e4m3"), 0, 0
    for rank in range(ranks):
        rows = rows_of(rank, ranks, length, kind).astype(np.float32)
        codes, scales = fp8_common.quantize_blockwise(rows, fmt, (1, BLOCK), fp8_common.POWER_OF_2)
        if settings.get("rounding") != "nearest":
            scaled = rows * np.repeat(scales, BLOCK, 1)[:, :length]
            # a row begins with a new block of counters
            bits = random_bits(settings.get("seed", 0) | rank << 32, (ranks, BLOCK * scales.shape[1]))[:, :length]
            codes = fp8_common.encode_stochastic(scaled, fmt, bits)
        total = total + fp8_common.dequantize_blockwise(codes, scales, fmt, (1, BLOCK))
        whole = whole + rows[:, :5]
    return total, whole


@pytest.mark.parametrize("settings", [{}, {"format": "e5m2", "seed": 7}, NEAREST], ids=str)
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_equal_the_definition_bit_for_bit(run_ranks, ranks, kind, settings):
    length = 3 * BLOCK + 17
    total, whole = expected(ranks, length, kind, settings)
    for rank, (compressed, wide) in enumerate(run_ranks(ranks, reduce_on_ranks, length, kind, settings)):
        np.testing.assert_array_equal(compressed, total[rank])
        np.testing.assert_array_equal(wide, whole[rank])


def test_an_element_arrives_with_the_error_that_is_stated():
    values = torch.from_numpy(rows_of(0, 4, 64 * BLOCK, np.float32))
    codes, scales = fp8_common.quantize_blockwise(values.numpy(), "e4m3", (1, BLOCK), fp8_common.POWER_OF_2)
    error = abs(fp8_common.dequantize_blockwise(codes, scales, "e4m3", (1, BLOCK)) - values.numpy())
    amax = np.repeat(abs(values.numpy()).reshape(4, -1, BLOCK).max(-1), BLOCK, 1)
    assert (error <= np.maximum(2.0**-4 * abs(values.numpy()), 2.0**-17 * amax)).all()
    assert (error > 2.0**-5 * abs(values.numpy())).any(), "the bound is not far from what happens"


def test_rows_are_cut_and_joined():
    parts = [3, 0, 2, 4, 1], [True, False, True, False, True]
    rows = torch.arange(20.0).view(2, 10)
    compressed, wide = split(rows, *parts)
    assert compressed.tolist() == [[0, 1, 2, 3, 4, 9], [10, 11, 12, 13, 14, 19]]
    assert torch.equal(join(compressed[1], wide[1], *parts), rows[1])


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


def compress(model, settings, **options):
    return f8.compress_communication(model, weights=False, gradients=f8.GradientCompression(**settings), **options)


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
    compress(ours, NEAREST, parameters=["!1.up.weight"])
    reports = [{w.name: w.gradient for w in f8.float8_report(model).weights} for model in (plain, ours)]
    ours[0].norm.weight.requires_grad_(True)
    return gradients_of(plain, rank), gradients_of(ours, rank), *reports


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_near_and_what_is_left_out_is_exact(run_ranks, reduce_dtype):
    # two ranks: the order of a sum of two makes no difference
    for plain, ours, before, after in run_ranks(2, gradients_both_ways, reduce_dtype):
        assert set(before.values()) == {""}, "what FSDP2 reduces, its own policy says"
        assert after == {
            name: "float8_e4m3fn" if g.ndim == 2 and name != "1.up.weight" else "" for name, g in plain.items()
        }
        for name, gradient in plain.items():
            compressed = gradient.ndim == 2 and name != "1.up.weight"
            assert torch.equal(gradient, ours[name]) == (not compressed) or reduce_dtype == torch.bfloat16, name
            error = (gradient - ours[name]).norm() / gradient.norm()
            assert (0.005 < error < 0.04) if compressed else error < 0.01, f"{name}: {error}"


def trains(rank, ranks, recipe, settings, micro_batches):
    mesh = init_device_mesh("cpu", (ranks,))
    plain, ours, undone = (sharded(mesh, recipe=recipe) for _ in range(3))
    compress(ours, settings)
    compress(undone, settings).remove()
    return [losses(model, 12, micro_batches=micro_batches) for model in (plain, ours, undone)]


@pytest.mark.parametrize(
    ("recipe", "settings", "micro_batches"),
    [
        (None, NEAREST, 1),
        ("tensorwise", {}, 1),
        ("tensorwise_delayed", NEAREST, 2),
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
    handle = compress(model, {"format": kind})
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
    compress(model, settings)
    x = torch.randn(6, 40)
    loss = model(x).square().mean()
    (loss * float("inf") if rank == 1 else loss).backward()
    assert not any(p.grad.to_local().isfinite().all() for p in model.parameters()), "seen in every shard of every rank"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    model(x).square().mean().backward()
    after = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return norm.full_tensor().item(), after.full_tensor().item()


@pytest.mark.parametrize("settings", [{}, NEAREST], ids=str)
def test_a_gradient_that_is_not_finite_is_seen_and_forgotten(run_ranks, settings):
    for norm, after in run_ranks(2, spoiled, settings):
        assert not np.isfinite(norm)
        assert np.isfinite(after)


def frozen_and_unused(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    models = [sharded(mesh) for _ in range(2)]
    compress(models[1], {})
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
    mesh = init_device_mesh("cpu", (ranks,))
    model = sharded(mesh)
    handle = compress(model, settings)
    losses(model, 3)
    dcp.save({"model": model.state_dict(), "gradients": handle}, checkpoint_id=folder)
    whole = losses(model, 3, first=3)
    other = sharded(mesh)
    handle = compress(other, settings)
    losses(other, 1)  # its random state and residuals are others than those of the checkpoint
    state = {"model": other.state_dict(), "gradients": handle}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    again = losses(other, 3, first=3)
    fresh = sharded(mesh)
    compress(fresh, settings)
    fresh.load_state_dict(state["model"])
    return whole, again, losses(fresh, 3, first=3)


@pytest.mark.parametrize("settings", [{"seed": 3}], ids=str)
def test_a_resumed_run_continues_bit_for_bit(run_ranks, settings, tmp_path):
    for whole, again, without in run_ranks(2, resumed, settings, tmp_path / "checkpoint"):
        assert again == whole
        assert without != whole, "the state matters"


def states_of_others(rank, ranks):
    model = sharded(init_device_mesh("cpu", (ranks,)))
    handle = compress(model, {})
    told = []
    for state in ({}, None, 3, {f"rank {rank} of {ranks}": {"residuals": {}}}):
        with pytest.raises(Fp8Error) as raised:
            handle.load_state_dict(state)
        told.append(str(raised.value))
    return told


def test_a_state_of_other_ranks_or_another_model_is_refused(run_ranks):
    for told in run_ranks(2, states_of_others):
        assert all("Load it on as many ranks as saved it" in text for text in told)


def repeated(rank, ranks, settings):
    """The relative error of the sum of 40 reductions of one gradient."""
    handle = RandomState(f8.GradientCompression(**settings))
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(ranks, 4096, generator=generator)
    total = torch.zeros(4096)
    for _ in range(40):
        total += reduce_rows(handle, rows, rows[:, :0], dist.group.WORLD)[0]
    exact = rows.clone()
    dist.all_reduce(exact)
    return ((total / 40 - exact[rank]).norm() / exact[rank].norm()).item()


def test_random_rounding_makes_errors_of_many_steps_cancel(run_ranks):
    nearest, stochastic = (max(run_ranks(2, repeated, settings)) for settings in (NEAREST, {}))
    assert nearest > 0.02, "one and the same error in each step"
    assert stochastic < nearest / 2


# ---------------------------------------------------------------- bad input


def refusals(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    told = []

    def refused(function):
        with pytest.raises((Fp8Error, Fp8UnsupportedError)) as raised:
            function()
        told.append(str(raised.value))

    refused(lambda: f8.compress_communication(sharded(mesh), gradients=NEAREST))
    model = sharded(mesh)
    compress(model, {})
    refused(lambda: compress(model, {}))
    refused(lambda: compress(sharded(mesh), {}, parameters=["*", "!*.weight", "*.weight"]))
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(7.0)
    refused(lambda: losses(model, 1))
    for settings in ({"format": "e3m4"}, {"rounding": "up"}, {"seed": 2**32}):
        refused(lambda settings=settings: f8.GradientCompression(**settings))
    return told


def test_what_cannot_be_done_is_one_sentence_on_all_ranks(run_ranks):
    first, second = run_ranks(2, refusals)
    assert first == second
    parts = [
        "or a GradientCompression",
        "compressed already",
        "contradict",
        "set_force_sum_reduction_for_comms",
        "format",
        "rounding",
        "seed",
    ]
    assert [part in text for part, text in zip(parts, first, strict=True)] == [True] * len(parts), first

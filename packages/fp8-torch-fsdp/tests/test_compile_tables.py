"""Every row of the compile tables, and what a captured graph must still refuse."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_common.torch.linear import matmul
from fp8_torch_fsdp.traceable import linear
from tests.helpers import compile_rows as rows

VOCABULARIES = (32, 2256, 2257)


@pytest.mark.distributed
# in this order, so that by default Inductor compiles blocks, which share a graph
@pytest.mark.matrix("each", row=list(rows.ROWS), scaling=list(rows.RECIPES), backend=list(reversed(rows.BACKENDS)))
@pytest.mark.timeout(900)
def test_row(run_ranks, row, scaling, backend):
    expected = rows.ROWS[row]
    for result in run_ranks(expected.world_size, rows.run_row, row, scaling, backend, timeout=800.0):
        assert 1 <= result["graphs"] <= expected.graphs
        assert result["recompiles"] == 0, "Dynamo captured another graph after the first step"
        assert result["fp8_gathers_in_forward"] == expected.gathers, "the graph holds the collective"
        assert result["fp8_gathers_in_backward"] == expected.gathers, "resharding really happened"
        assert (result["reduce_scatters_in_backward"] > 0) == (expected.gathers > 0)
        assert result["whole_weights_kept"] == 0
        assert result["fp8_matrices"] > 0
        assert result["scales"] > 0
        assert result["same_fp8_matrices"]
        assert result["same_scales"]
        assert result["same_delayed_state"]
        assert result["loss_gap"] <= rows.LOSS_BAND


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("rowwise", [False, True])
def test_output_projection_has_shapes_that_gpus_accept_or_says_what_to_do(vocab, pad, rowwise):
    x, weight, grad = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((48, 64), (vocab, 64), (48, vocab)))
    options = matmul.MatmulOptions(torch.float32, emulate=False, pad_inner=pad, pad_outer=pad)
    matmuls = ((x, weight), (grad, weight.t().contiguous()), (grad.t().contiguous(), x.t().contiguous()))
    for number, (a, b) in enumerate(matmuls):
        scale = torch.rand(1, b.shape[0]) if rowwise else torch.rand(())
        if vocab % 16 and not pad and number < 2:
            with pytest.raises(Fp8Error, match="set pad_inner_dim=True"):
                matmul._aligned(a, b, scale, options)
            continue
        padded_a, padded_b, padded_scale = matmul._aligned(a, b, scale, options)
        assert not padded_a.shape[1] % 16
        assert not padded_b.shape[0] % 16
        full = (padded_a.double() @ padded_b.double().t()) * padded_scale
        assert torch.equal(full[:, : b.shape[0]], (a.double() @ b.double().t()) * scale)


def test_default_weights_compile_without_fsdp():
    twins = [rows.build("none", "delayed", gather=True, blocks=1) for _ in range(2)]
    recorder = rows.Recorder("aot_eager")
    call = torch.compile(twins[1], backend=recorder, fullgraph=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in twins]
    for step in range(3):
        losses = rows.loss_of(twins[0], 0, step), rows.loss_of(call, 0, step)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
    assert recorder.frames == 1


@pytest.mark.parametrize("backend", rows.BACKENDS)
def test_compiled_layers_refuse_delayed_scales_that_nobody_synchronized(backend, full):
    if backend == "inductor" and not full:
        pytest.skip("the check is in the graph whatever compiles it: run it with --full")
    model = rows.build("none", "delayed", blocks=1)
    rows.compiled(model, rows.ROWS["block"], backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        rows.loss_of(model, 0, step).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="was not synchronized after the last optimizer step"):
        model.blocks[0](torch.randn(2, 20, rows.DIM))


def stale_part(rank, world_size, backend):
    torch._dynamo.reset()
    model = rows.build("traceable", "dynamic")
    rows.compiled(model, rows.ROWS["traceable_block"], backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows.loss_of(model, rank, 0).backward()
    model.blocks[0](torch.randn(2, 20, rows.DIM))
    optimizer.step()
    try:
        model.blocks[0](torch.randn(2, 20, rows.DIM))
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
def test_compiled_parts_refuse_a_stale_scale(run_ranks):
    for message in run_ranks(2, stale_part, "aot_eager", timeout=300.0):
        assert "stale" in message


def other_recipes(rank, world_size, recipe, copies=1, vocab=rows.VOCAB, blocks=1):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (copies, world_size // copies) if copies > 1 else (world_size,))
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        model = f8.convert_to_float8_training(rows.Model(vocab=vocab, blocks=blocks), recipe=recipe)
        twins.append(f8.fully_shard_traceable(model, mesh=mesh))
    recorder = rows.Recorder("aot_eager")
    call = torch.compile(twins[1], backend=recorder, fullgraph=True)
    losses = rows.loss_of(twins[0], rank, 0, vocab), rows.loss_of(call, rank, 0, vocab)
    for loss in losses:
        loss.backward()
    gradients = [[p.grad.to_local() for p in model.parameters()] for model in twins]
    return recorder.frames, torch.equal(*losses), all(map(torch.equal, *gradients))


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_other_recipes_are_captured_whole(run_ranks, recipe):
    assert run_ranks(2, other_recipes, recipe, timeout=300.0) == [(1, True, True)] * 2


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "copies"), [(2, 1), (4, 2)])
def test_uneven_shards_and_hsdp_are_captured_whole(run_ranks, world_size, copies):
    """63 rows of embedding and output projection on two shards, alone and in two copies."""
    # without blocks, whose shards are even
    results = run_ranks(world_size, other_recipes, "tensorwise", copies, 63, 0, timeout=300.0)
    assert results == [(1, True, True)] * world_size


def merged_gathers(rank, world_size):
    original, linear.copy_in_backward = linear.copy_in_backward, lambda shard, grad: shard
    try:
        result = rows.run_row(rank, world_size, "traceable_block", "dynamic", "aot_eager")
    finally:
        linear.copy_in_backward = original
    return result["fp8_gathers_in_forward"], result["fp8_gathers_in_backward"]


@pytest.mark.distributed
def test_a_merged_gather_is_noticed(run_ranks):
    """The table's counts differ when the second gather reads what the first one read."""
    for forward, backward in run_ranks(2, merged_gathers, timeout=300.0):
        assert backward == 0, "the weights would stay gathered from the forward to the backward"
        assert forward in (2, 3)  # of the four that are then in the forward, torch 2.13 merges two and 2.15 one


def test_subclasses_name_themselves_for_the_caches_of_compilers():
    sharded = [rows.build("none", "dynamic", gather=True).output.weight for _ in range(2)]
    other = rows.build("none", "delayed", gather=True).output.weight
    assert sharded[0]._stable_hash_for_caching() == sharded[1]._stable_hash_for_caching()
    assert sharded[0]._stable_hash_for_caching() != other._stable_hash_for_caching()
    codes = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    gathered = [f8.GatheredWeight(codes, torch.full((), s), "e4m3", torch.float32) for s in (1.0, 2.0)]
    half = f8.GatheredWeight(codes, torch.ones(()), "e4m3", torch.bfloat16)
    assert gathered[0]._stable_hash_for_caching() == gathered[1]._stable_hash_for_caching()
    assert gathered[0]._stable_hash_for_caching() != half._stable_hash_for_caching()


@pytest.mark.matrix(
    vocab=list(VOCABULARIES), pad=[False, True], scaling=list(rows.RECIPES), backend=list(rows.BACKENDS)
)
def test_output_projection(vocab, pad, scaling, backend):
    result = rows.run_projection(scaling, backend, vocab, pad)
    assert result["graphs"] == 1
    assert result["recompiles"] == 0
    assert result["same_as_eager"]


class Chain(nn.Sequential):
    """A root whose forward is PyTorch's own: Dynamo traces the hooks of such roots."""


def traced_hooks(rank, world_size, how, scaling):
    torch._dynamo.reset()
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        chain = Chain(nn.Embedding(rows.VOCAB, rows.DIM), rows.Block(), nn.Linear(rows.DIM, rows.VOCAB))
        twins.append(f8.fully_shard_traceable(f8.convert_to_float8_training(chain, recipe=rows.RECIPES[scaling])))
    recorder = rows.Recorder("aot_eager")
    call = twins[1]
    if how == "torch.compile(model)":
        call = torch.compile(call, backend=recorder)
    else:
        call.compile(backend=recorder)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in twins]
    same, frames = True, []
    for step in range(3):
        losses = rows.loss_of(twins[0], rank, step), rows.loss_of(call, rank, step)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        same = same and torch.equal(*losses)
        frames.append(recorder.frames)
    gathers = [counts["all_gather_into_tensor uint8"] for counts in recorder.collectives.values()]
    return same, frames[-1] - frames[0], gathers


@pytest.mark.distributed
@pytest.mark.matrix("each", scaling=list(rows.RECIPES), how=["torch.compile(model)", "model.compile()"])
def test_roots_whose_hooks_are_traced_break_the_graph_there_and_nowhere_else(run_ranks, how, scaling):
    """The gathers stay in graphs, and the scales are those of eager mode."""
    assert run_ranks(2, traced_hooks, how, scaling, timeout=300.0) == [(True, 0, [3, 3])] * 2

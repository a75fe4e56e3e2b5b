"""Gradients that travel as FP8 codes: their numbers, what training loops do with them, their state."""

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_common._reference.gradient_messages import round_gradients, sum_rounded
from fp8_torch_fsdp.reduce_scatter import RandomState, reduce_rows
from fsdp_models import Block, converted, decoded, mesh_of, seeded, shard
from fsdp_training import batch, loss_of, sgd, train
from tests.helpers.ranks import on_ranks

BLOCK, NEAREST = 128, {"rounding": "nearest"}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# ---------------------------------------------------------------- the numbers


def rows_of(rank, ranks, length, kind):
    """One rank's gradients for each rank, with blocks of every magnitude and a block of zeros."""
    generator = np.random.default_rng(100 * ranks + rank)
    rows = generator.standard_normal((ranks, length)) * 2.0 ** generator.integers(-40, 20, (ranks, 1))
    rows[:, :BLOCK] = 0
    rows[:, -1] *= 1e3
    return rows.astype(kind)


def expected(ranks, length, kind, settings):
    """What the ranks compute, by the definitions in NumPy: [ranks, length] and [ranks, 5]."""
    fmt = settings.get("format", "e4m3")
    rows = [rows_of(r, ranks, length, kind).astype(np.float32) for r in range(ranks)]
    random = [None if settings.get("rounding") else (settings.get("seed", 0) | r << 32, 0) for r in range(ranks)]
    sent = [round_gradients(own, fmt, random=bits) for own, bits in zip(rows, random, strict=True)]
    codes, scales = (np.stack([getattr(one, name) for one in sent], 1) for name in ("data", "scale"))
    totals = [sum_rounded(own, scale, fmt, 1) for own, scale in zip(codes, scales, strict=True)]
    return np.stack(totals), sum(own[:, :5] for own in rows)


@pytest.mark.matrix(settings=[{}, {"format": "e5m2", "seed": 7}, NEAREST], kind=[np.float32, ml_dtypes.bfloat16])
@on_ranks(3)
def test_sums_equal_the_definition_bit_for_bit(rank, kind, settings):
    length = 3 * BLOCK + 17
    total, whole = expected(3, length, kind, settings)
    handle, rows = RandomState(f8.GradientCompression(**settings)), rows_of(rank, 3, length, kind)
    values = torch.from_numpy(rows.astype(np.float32)).to(torch.bfloat16 if kind != np.float32 else torch.float32)
    compressed, wide = reduce_rows(handle, values, values[:, :5].clone(), dist.group.WORLD)
    np.testing.assert_array_equal(compressed.numpy(), total[rank])
    np.testing.assert_array_equal(wide.numpy(), whole[rank])


@on_ranks(2)
def test_random_rounding_makes_errors_of_many_steps_cancel(rank):
    rows, errors = batch(rank, 0, (2, 4096)), []
    exact = rows.clone()
    dist.all_reduce(exact)
    for settings in (NEAREST, {}):
        handle = RandomState(f8.GradientCompression(**settings))
        total = sum(reduce_rows(handle, rows, rows[:, :0], dist.group.WORLD)[0] for _ in range(40))
        errors.append((total / 40 - exact[rank]).norm() / exact[rank].norm())
    assert errors[0] > 0.02, "one and the same error in each step"
    assert errors[1] < errors[0] / 2


# ---------------------------------------------------------------- whatever the loop does


def blocks(kind=Block):
    return nn.Sequential(*(kind(40, 96) if kind is Block else kind() for _ in range(2)))


def compress(model, settings, **options):
    return f8.compress_communication(model, weights=False, gradients=f8.GradientCompression(**settings), **options)


def inputs(rank, step):
    return batch(rank, step, (6, 40))


def backward(model, rank, step=0):
    loss_of(model, inputs(rank, step)).backward()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(40, 40, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).relu())


class Narrow(nn.Module):
    """Ranks without any row of a weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(40, 2), nn.Linear(2, 40, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x))


class Images(nn.Module):
    """Tokens as images of 4 x 2 x 5; a row of the convolution has 36 values, no multiple of 32."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x.view(-1, 4, 2, 5)).view(x.shape)


class Stack(nn.Module):
    """Matrices [experts, out, in] of a user's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 40, 40) / 6)

    def forward(self, x):
        return torch.cat([nn.functional.linear(part, own) for part, own in zip(x.chunk(6), self.weight, strict=True)])


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(67, 40), nn.Linear(40, 67)

    def forward(self, x):
        return self.head(self.embedding(x.argmax(-1)))[:, :40] + x


def accumulate(model, rank):
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        backward(model, rank, i)


def reduce_each(model, rank):
    for i in range(3):
        backward(model, rank, i)


def use_twice(model, rank):
    model(model(inputs(rank, 0))).square().mean().backward()


def use_less(block):
    """Let `norm` and `up` of a block take no part: their groups' buffers are shorter."""
    block.forward = lambda x: block.down(torch.cat([x, x, x[:, :16]], dim=1))


def use_less_on_one_rank(model, rank):
    model.set_reduce_scatter_unused_params(True)
    if rank == 0:
        use_less(model[1])
    backward(model, rank)


def frozen_and_unused(model, rank):
    model[0].up.weight.requires_grad_(False)
    use_less(model[1])
    backward(model, rank)


def compile_blocks(model, rank):
    for block in model:
        block.compile(backend="aot_eager")
    backward(model, rank)


SITUATIONS = {
    "accumulation without reductions": (accumulate, {}),
    "accumulation of reductions": (reduce_each, {}),
    "modules that are used twice": (use_twice, {}),
    "a weight that two layers share": (backward, {"kind": Tied}),
    "ranks without rows": (backward, {"kind": Narrow}),
    "convolutions": (backward, {"kind": Images}),
    "stacks of matrices": (backward, {"kind": Stack}),
    "embeddings and heads that are asked for": (backward, {"kind": Words}),
    "parameters without a gradient on one rank": (use_less_on_one_rank, {}),
    "frozen and unused parameters": (frozen_and_unused, {}),
    "bfloat16 weights, float32 reduction": (backward, {"mp_policy": HALF}),
    "a reduction in bfloat16": (backward, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}),
    "shards on the host": (backward, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "shards of columns": (backward, {"kind": Tied, "shard_placement_fn": lambda parameter: Shard(1)}),
    "compiled blocks": (compile_blocks, {}),
    "an integer reshard_after_forward": (backward, {"reshard_after_forward": 2}),
}


def decode(model, options, ranks):
    """Give a model the weights that a gather in FP8 would give its layers."""
    half = options.get("mp_policy") is HALF
    for own in model.parameters():
        if own.ndim > 1:
            parts = own.data.chunk(ranks, dim=1) if "shard_placement_fn" in options else [own.data]
            own.data = torch.cat([decoded(part.bfloat16() if half else part) for part in parts], dim=1)


LACKS = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason=f"torch {torch.__version__} cannot be told that a rank may lack gradients",
)


@pytest.mark.parametrize(
    "situation", [pytest.param(one, marks=[LACKS] if "on one rank" in one else []) for one in SITUATIONS]
)
@on_ranks(lambda given: 4 if "integer" in given["situation"] or "columns" in given["situation"] else 3)
def test_weights_change_nothing_else_and_gradients_are_near_whatever_the_loop_does(rank, situation):
    """With decoded weights, with weights gathered in FP8, and with gradients that travel so too."""
    run, options = SITUATIONS[situation]
    options, found = dict(options), []
    kind, weights = options.pop("kind", Block), "reshard_after_forward" not in options  # with an integer it cannot
    for way in ("decoded", "weights", "everything"):
        model = seeded(lambda: blocks(kind))
        if way == "decoded" and weights:
            decode(model, options, dist.get_world_size())
        shard(model, **options)
        if way == "everything" or (way == "weights" and weights):
            f8.compress_communication(model, weights=weights, gradients=way == "everything", parameters=["*"])
        run(model, rank)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({name: g.full_tensor().to("cpu", torch.float32) for name, g in gradients.items()})
    plain, same, ours = found
    assert plain.keys() == ours.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, same[name]), f"{name}: gathered weights are the decoded ones"
        error = ((gradient - ours[name]).norm() / gradient.norm()).item()
        # a buffer that nobody can read, for a part of its parameters takes no part, stays wide; what travels wide
        # differs by the norm that all gradients were clipped by, and by the order of a sum
        wide = gradient.ndim < 2 or (situation == "frozen and unused parameters" and name == "1.down.weight")
        assert error < (0.01 if "reduction in" in situation else 0.003) if wide else 0.002 < error < 0.06, name


@pytest.mark.parametrize(
    ("recipe", "settings", "micro_batches"),
    [(None, NEAREST, 1), ("tensorwise_delayed", NEAREST, 2), ("rowwise", {"format": "e5m2"}, 1)],
)
@on_ranks(2)
def test_training_goes_as_without_and_exactly_so_when_removed(rank, recipe, settings, micro_batches):
    models = [shard(seeded(blocks) if recipe is None else converted(seeded(blocks), recipe)) for _ in range(3)]
    compress(models[1], settings)
    f8.compress_communication(models[2]).remove()
    plain, ours, undone = (train(one, rank, 8, inputs=inputs, microbatches=micro_batches) for one in models)
    assert undone == plain
    assert ours != plain
    np.testing.assert_allclose(ours, plain, rtol=0.02)


@pytest.mark.parametrize("settings", [{}, NEAREST], ids=str)
@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_seen_skipped_and_forgotten(rank, settings):
    """One rank's gradients are infinite in the second step."""
    found = []
    for compressed in (False, True):
        model = shard(seeded(blocks))
        if compressed:
            compress(model, settings)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**16)
        for step in range(4):
            loss = loss_of(model, inputs(rank, step))
            scaler.scale(loss * float("inf") if step == 1 and rank == 0 else loss).backward()
            if step == 1:
                assert not any(p.grad.to_local().isfinite().all() for p in model.parameters()), "seen in every shard"
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((scaler.get_scale(), loss.item()))
    scales, losses = zip(*found, strict=True)
    assert scales[:4] == scales[4:] == (2.0**16, *[2.0**15] * 3)
    assert losses[4:] == pytest.approx(losses[:4], rel=0.01)


# ---------------------------------------------------------------- state


@on_ranks(2)
def test_a_resumed_run_continues_bit_for_bit_and_a_state_of_others_raises(rank, tmp_path):
    def start():
        model = shard(seeded(blocks), mesh_of())
        return model, compress(model, {"seed": 3}), sgd(model.parameters())

    (model, handle, _), (other, others, _), (fresh, _, _) = start(), start(), start()
    train(model, rank, inputs=inputs)
    dcp.save({"model": model.state_dict(), "gradients": handle}, checkpoint_id=tmp_path)
    train(other, rank, 1, inputs=inputs)  # its random state is another than that of the checkpoint
    state = {"model": other.state_dict(), "gradients": others}
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state["model"])
    fresh.load_state_dict(state["model"])
    for wrong in ({}, None, 3, {f"rank {rank} of 2": {"residuals": {}}}):
        with pytest.raises(Fp8Error, match="Load it on as many ranks as saved it"):
            others.load_state_dict(wrong)
    whole, again, without = (train(one, rank, first=3, inputs=inputs) for one in (model, other, fresh))
    assert again == whole
    assert without != whole, "the state matters"

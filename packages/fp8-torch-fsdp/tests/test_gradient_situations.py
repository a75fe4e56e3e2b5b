"""FP8 communication in what training loops do: decoded weights, and gradients near those of FSDP2's own reduction."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fp8_torch_fsdp as f8
from fp8_common.torch import dequantize_mx, quantize_mx

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(40)
        self.up, self.down = nn.Linear(40, 96), nn.Linear(96, 40, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


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


def sharded(model, mesh, **options):
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(rank, i=0):
    return torch.randn(6, 40, generator=torch.Generator().manual_seed(10 * i + rank))


def backward(model, rank, i=0):
    model(batch(rank, i)).square().mean().backward()


def accumulate(model, rank):
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        backward(model, rank, i)


def reduce_each(model, rank):
    for i in range(3):
        backward(model, rank, i)


def use_twice(model, rank):
    model(model(batch(rank))).square().mean().backward()


def use_less_on_one_rank(model, rank):
    model.set_reduce_scatter_unused_params(True)
    if rank == 0:
        model[1].forward = lambda x: model[1].down(torch.cat([x, x, x[:, :16]], dim=1))
    backward(model, rank)


def compile_blocks(model, rank):
    for block in model:
        block.compile(backend="aot_eager")
    backward(model, rank)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SITUATIONS = {
    "accumulation without reductions": (accumulate, {}),
    "accumulation of reductions": (reduce_each, {}),
    "modules that are used twice": (use_twice, {}),
    "a weight that two layers share": (backward, {"kind": Tied}),
    "ranks without rows": (backward, {"kind": Narrow}),
    "parameters without a gradient on one rank": (use_less_on_one_rank, {}),
    "bfloat16 weights, float32 reduction": (backward, {"mp_policy": HALF}),
    "shards on the host": (backward, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "shards of columns": (backward, {"kind": Tied, "shard_placement_fn": lambda parameter: Shard(1)}),
    "compiled blocks": (compile_blocks, {}),
    "an integer reshard_after_forward": (backward, {"reshard_after_forward": 2}),
}


def decode(model, options, ranks):
    """Give a model the weights that a gather in FP8 would give its layers."""
    half = options.get("mp_policy") is HALF
    for own in model.parameters():
        if own.ndim == 2:
            parts = own.data.chunk(ranks, dim=1) if "shard_placement_fn" in options else [own.data]
            codes = [quantize_mx((part.bfloat16() if half else part).contiguous(), "e4m3") for part in parts]
            own.data = torch.cat([dequantize_mx(*one, "e4m3") for one in codes], dim=1)


def both(rank, ranks, situation):
    """Return gradients with decoded weights, with weights gathered in FP8, and with gradients that travel so too."""
    run, options = SITUATIONS[situation]
    weights = "reshard_after_forward" not in options  # with an integer, weights cannot
    mesh, found = init_device_mesh("cpu", (ranks,)), []
    for kind in ("decoded", "weights", "everything"):
        torch.manual_seed(0)
        model = nn.Sequential(*(options.get("kind", Block)() for _ in range(2)))
        if kind == "decoded" and weights:
            decode(model, options, ranks)
        model = sharded(model, mesh, **{name: value for name, value in options.items() if name != "kind"})
        if kind == "everything" or (kind == "weights" and weights):
            f8.compress_communication(model, weights=weights, gradients=kind == "everything")
        run(model, rank)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append({n: p.grad.full_tensor().to("cpu", torch.float32) for n, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("situation", SITUATIONS)
def test_weights_change_nothing_else_and_gradients_are_near_whatever_the_loop_does(run_ranks, situation):
    if SITUATIONS[situation][0] is use_less_on_one_rank and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip(f"torch {torch.__version__} cannot be told that a rank may lack gradients")
    ranks = 4 if "integer" in situation or "columns" in situation else 3
    for plain, weights, ours in run_ranks(ranks, both, situation):
        for name, gradient in plain.items():
            assert torch.equal(gradient, weights[name]), f"{name}: gathered weights are the decoded ones"
            error = ((gradient - ours[name]).norm() / gradient.norm()).item()
            # what travels wide differs by the norm that all gradients were clipped by, and by the order of a sum
            assert (0.002 < error < 0.06) if gradient.ndim == 2 else error < 0.003, f"{name}: {error}"


def scaled(rank, ranks):
    mesh, found = init_device_mesh("cpu", (ranks,)), []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = sharded(nn.Sequential(Block(), Block()), mesh)
        if compressed:
            f8.compress_communication(model, weights=False)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**16)
        for i in range(4):
            loss = model(batch(rank, i)).square().mean()
            scaler.scale(loss * float("inf") if i == 1 and rank == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((scaler.get_scale(), loss.item()))
    return found


def test_a_scaler_skips_the_step_that_it_would_skip(run_ranks):
    for found in run_ranks(2, scaled):
        plain, ours = found[:4], found[4:]
        assert [scale for scale, _ in ours] == [scale for scale, _ in plain] == [2.0**16, *[2.0**15] * 3]
        assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in plain], rel=0.01)

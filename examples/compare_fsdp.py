"""Train a language model under FSDP2 with bf16 and with FP8, and compare held-out loss, bytes and speed.

    python -m examples.compare_fsdp [--quick] [--seeds 3] [--recipe rowwise] [--gradients fp8]

It reads the source of Python's standard library, byte by byte. Both runs of a seed have the same initial weights and
the same batches. The ranks are processes of this machine; they use its GPUs if there are enough.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from examples._report import Corpus, leave, load_corpus, options, parsed, save, spread, table
from fp8_torch_fsdp import GradientCompression, compress_communication, convert_to_float8_training
from tests.helpers.collectives import CollectiveCounter

VOCABULARY, DIM, LAYERS, HEAD_DIM = 256, 256, 3, 32
ROWS, LENGTH, HELD_OUT_BATCHES = 8, 128, 16
LEARNING_RATE, WARM_UP, LAST_RATE = 1.5e-3, 0.05, 0.1
COUNTED_STEP = 1
"""The bytes of this step are counted. In step 0 FSDP2 and the FP8 weights set themselves up."""


class Block(nn.Module):
    """Attention, then two linear layers, each on a normalized input and added to its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return (rows, length, dim) for the same; `bias` is added to the scores, (rows * heads, length, length)."""
        x = x + self.out(self.attend(self.qkv(norm(x)), bias))
        return x + self.down(F.silu(self.up(norm(x))))

    def attend(self, qkv: Tensor, bias: Tensor) -> Tensor:
        """Return what each position reads; written out, because bf16's fused backward is three times slower on CPUs."""
        rows, length, width = qkv.shape
        heads = width // 3 // HEAD_DIM
        q, k, v = qkv.view(rows, length, 3, heads, HEAD_DIM).permute(2, 0, 3, 1, 4).flatten(1, 2).unbind()
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=HEAD_DIM**-0.5)
        read = torch.bmm(torch.softmax(scores, dim=-1), v)
        return read.view(rows, heads, length, HEAD_DIM).transpose(1, 2).flatten(2)


class ByteModel(nn.Module):
    """A decoder-only transformer that predicts the next byte; its norms have no weights."""

    bias: Tensor

    def __init__(self, dim: int = DIM, layers: int = LAYERS, length: int = LENGTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.register_buffer("bias", distance_bias(dim // HEAD_DIM, length), persistent=False)
        for name, weight in self.named_parameters():
            # what is added to the stream, or ends in logits, starts small: the first loss is near ln 256
            small = 0.25 if name.endswith(("out.weight", "down.weight", "head.weight")) else 1.0
            nn.init.normal_(weight, std=1.0 if "embedding" in name else small * weight.shape[1] ** -0.5)

    def forward(self, codes: Tensor) -> Tensor:
        """Return float32 logits of the next byte, shape (rows, length, 256), for integers (rows, length)."""
        x = self.embedding(codes)
        bias = self.bias.to(x.dtype).repeat(len(codes), 1, 1)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(norm(x)).float()


def norm(x: Tensor) -> Tensor:
    """Return `x` with mean 0 and variance 1 over its last dimension."""
    return F.layer_norm(x, x.shape[-1:])


def distance_bias(heads: int, length: int) -> Tensor:
    """Return ALiBi's bias (Press et al. 2021), float32 (heads, length, length): minus infinity for what is to come."""
    position = torch.arange(length)
    distance = position[:, None] - position
    slopes = 2.0 ** -(torch.arange(heads) % 8 + 1.0)
    return torch.where(distance < 0, -torch.inf, -slopes[:, None, None] * distance)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte for integers (rows, length + 1)."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: a short linear rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / max(1, round(WARM_UP * steps)))
    return LEARNING_RATE * rise * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2)


@dataclass(kw_only=True, slots=True)
class Run:
    """What one run measured; bytes are received by a rank from others in one step.

    Attributes:
        losses: Training loss of each step, mean over ranks.
        seconds: Duration of each step.
        gathered: Bytes of all weights.
        reduced: Bytes of all gradients.
        amax_all_reduces: All-reduces of int32 keys of amax.
        held_out: Loss on held-out text after the last step.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gathered: int = 0
    reduced: int = 0
    amax_all_reduces: int = 0
    held_out: float = math.nan


def build(chosen: argparse.Namespace, fp8: bool, seed: int, mesh: DeviceMesh) -> ByteModel:
    """Return the sharded model: equal initial weights for equal seeds."""
    torch.manual_seed(seed)
    model = ByteModel().to(mesh.device_type)
    if fp8:
        # the head stays in bf16, as is usual: it is small, and the loss is most sensitive to it
        convert_to_float8_training(model, recipe=chosen.recipe, module_filter_fn=lambda _, name: name != "head")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if fp8 and chosen.gradients == "fp8":
        nearest = GradientCompression(rounding="nearest")
        compress_communication(model, weights=False, gradients=nearest, parameters=["*"])  # embedding and head, too
    return model


def train(chosen: argparse.Namespace, corpus: Corpus, fp8: bool, seed: int, mesh: DeviceMesh) -> Run:
    """Train one model."""
    model, run, ranks, rank = build(chosen, fp8, seed, mesh), Run(), mesh.size(), mesh.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def mean(value: Tensor) -> float:
        dist.all_reduce(value)
        return value.item() / ranks

    for step in range(chosen.steps):
        codes = corpus.batch(seed=seed, step=step, rank=rank, rows=ROWS, length=LENGTH)
        windows = torch.from_numpy(codes).long().to(mesh.device_type)
        optimizer.param_groups[0]["lr"] = learning_rate(step, chosen.steps)
        start = time.perf_counter()
        with CollectiveCounter() as counter:
            loss = loss_of(model, windows)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(mean(loss.detach()))
        run.seconds.append(time.perf_counter() - start)
        if step == COUNTED_STEP:
            run.gathered = counter.nbytes("all_gather") * (ranks - 1)
            sent = counter.nbytes("reduce_scatter") + counter.nbytes("alltoall_base")
            run.reduced = sent * (ranks - 1) // ranks
            run.amax_all_reduces = counter.dtypes("all_reduce").count(torch.int32)
        if rank == 0 and (step + 1) % max(1, chosen.steps // 5) == 0:
            print(f"{'FP8' if fp8 else 'bf16'}, seed {seed}, step {step + 1}: loss {run.losses[-1]:.4f}", flush=True)
    with torch.no_grad():
        share = {"batches": HELD_OUT_BATCHES, "rank": rank, "ranks": ranks, "rows": ROWS, "length": LENGTH}
        batches = [torch.from_numpy(codes).long() for codes in corpus.held_out_batches(**share)]
        run.held_out = mean(torch.stack([loss_of(model, codes.to(mesh.device_type)) for codes in batches]).mean())
    return run


def compared(bf16: list[Run], fp8: list[Run], chosen: argparse.Namespace) -> str:
    """Return the comparison as a table, and what it cannot say."""
    differences = ", ".join(f"{b.held_out / a.held_out - 1:+.2%}" for a, b in zip(bf16, fp8, strict=True))
    rates = [
        ROWS * LENGTH * chosen.ranks / min(seconds for run in runs for seconds in run.seconds) for runs in (bf16, fp8)
    ]
    megabytes = [[getattr(runs[0], name) / 1e6 for runs in (bf16, fp8)] for name in ("gathered", "reduced")]
    rows = [
        (f"{chosen.steps} steps, {chosen.ranks} ranks, recipe {chosen.recipe}", "bf16", "FP8"),
        *(
            (f"{what} that a rank receives in a step", f"{wide:.2f} MB", f"{narrow:.2f} MB, {narrow / wide:.3f}x")
            for what, (wide, narrow) in zip(("weights", "gradients"), megabytes, strict=True)
            if wide
        ),
        ("all-reduces of amax in a step", str(bf16[0].amax_all_reduces), str(fp8[0].amax_all_reduces)),
        ("held-out loss, nats per byte", *(spread([run.held_out for run in runs]) for runs in (bf16, fp8))),
        ("the same, against bf16 of the same seed", "", differences),
        ("tokens per second, fastest step", f"{rates[0]:,.0f}", f"{rates[1]:,.0f}, {rates[1] / rates[0]:.2f}x"),
    ]
    said = [] if chosen.seeds > 1 else ["One seed does not tell how far seeds lie apart: take --seeds 3."]
    if not torch.cuda.is_available():
        said.append("A CPU emulates FP8 matmuls, so the last row is a cost that GPUs with FP8 do not have.")
    return "\n\n".join([table(rows), " ".join(said)]).strip()


def main() -> NoReturn:
    """Start the ranks; on each of them train every run, and on the first one write the report."""
    parser = options(__doc__, steps=160, quick=20)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--recipe", default="tensorwise", help="of the FP8 run (default %(default)s)")
    parser.add_argument("--gradients", choices=["float32", "fp8"], default="float32", help="what FP8 runs reduce")
    chosen = parsed(parser)
    if not dist.is_torchelastic_launched():
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={chosen.ranks}"]
        command = [sys.executable, *launcher, "-m", "examples.compare_fsdp", *sys.argv[1:]]
        # one thread each, as torchrun would choose, and say
        sys.exit(subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode)
    device = "cuda" if torch.cuda.device_count() >= chosen.ranks else "cpu"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh, corpus = init_device_mesh(device, (chosen.ranks,)), load_corpus()
    pairs = [[train(chosen, corpus, fp8, seed, mesh) for fp8 in (False, True)] for seed in range(chosen.seeds)]
    if mesh.get_rank() == 0:
        bf16, fp8 = map(list, zip(*pairs, strict=True))
        result = {
            "settings": {name: str(value) for name, value in vars(chosen).items()},
            "parameters": sum(weight.numel() for weight in ByteModel().parameters()),
            "held_out": {"bf16": [run.held_out for run in bf16], "FP8": [run.held_out for run in fp8]},
            "seconds_per_step": {"bf16": fmean(bf16[0].seconds), "FP8": fmean(fp8[0].seconds)},
            "losses": {"bf16": bf16[0].losses, "FP8": fp8[0].losses},
        }
        save(chosen.out, "compare_fsdp", result, compared(bf16, fp8, chosen))
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()

"""One training process: what it trains, in which order, and what it tells the process that started it.

torchrun starts it once per rank. Rank 0 prints one JSON object per line; everything else goes to stderr. Its standard
input is a pipe that nobody writes to: when it ends, the process that started the run is gone, and so is this one.
"""

import json
import math
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from demos.common.corpus import Corpus, load_corpus
from demos.common.leave import leave
from demos.torch_fsdp.checkpointing import Checkpoints, Record, state_digest
from demos.torch_fsdp.counting import LINEAR, CollectiveCounter, Counts, label_gathers
from demos.torch_fsdp.model import ByteModel, loss_of
from demos.torch_fsdp.options import Options
from fp8_common import Fp8Error, Fp8UnsupportedError

RUNS = ("bf16", "fp8")
ROWS, LENGTH = 8, 128
HELD_OUT_BATCHES = 16
LEARNING_RATE, WARM_UP, LAST_RATE = 1.5e-3, 0.05, 0.1
# Counting slows a step by a few percent, so after the first few only every tenth is counted and the others are timed.
COUNT_ALL, COUNT_EVERY = 3, 10


@dataclass(kw_only=True, slots=True)
class Trainer:
    """A model in training on this rank.

    Attributes:
        corpus: what it reads.
        seed: of the weights and of the order of the data.
        steps: how many there will be.
        mesh: the ranks that share it.
        model: sharded.
        optimizer: of its parameters.
        counter: sees its collectives.
        rows: windows of a rank in a step.
    """

    corpus: Corpus
    seed: int
    steps: int
    mesh: DeviceMesh
    model: ByteModel
    optimizer: torch.optim.Optimizer
    counter: CollectiveCounter
    rows: int = ROWS
    fresh: bool = True

    def step(self, index: int, record: Record) -> None:
        """Make an optimizer step and add its loss, its duration and perhaps its counts to `record`."""
        codes = self.corpus.batch(seed=self.seed, step=index, rank=self.mesh.get_rank(), rows=self.rows, length=LENGTH)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(index, self.steps) * group["width_factor"]
        counted = self.fresh or index < COUNT_ALL or index % COUNT_EVERY == 0
        start = time.perf_counter()
        if counted:
            casts = weight_casts(self.model)
            self.counter.clear()
            with self.counter:
                loss = self.forward_backward(codes)
            record.counts.append(self.counts(index, weight_casts(self.model) - casts).to_dict())
        else:
            loss = self.forward_backward(codes)
        self.optimizer.step()
        self.optimizer.zero_grad()
        record.losses.append(self.mean(loss))
        record.seconds.append(time.perf_counter() - start)
        self.fresh = False

    def forward_backward(self, codes: np.ndarray) -> Tensor:
        """Return the loss on this rank, after the gradients were added up."""
        loss = self.loss(codes)
        loss.backward()
        return loss.detach()

    def loss(self, codes: np.ndarray) -> Tensor:
        """Return the loss on windows of uint8 bytes, shape (rows, length + 1)."""
        windows = torch.from_numpy(codes.astype(np.int64)).to(self.mesh.device_type)
        return loss_of(self.model(windows[:, :-1]), windows[:, 1:])

    def counts(self, index: int, casts: int) -> Counts:
        """Return what was counted since the counter was cleared."""
        received = self.counter.received
        return Counts(
            step=index,
            linear_bytes=received[LINEAR],
            gathered_bytes=sum(received.values()),
            gradient_bytes=self.counter.gradients,
            amax_all_reduces=self.counter.amax_all_reduces,
            casts=casts / len(linear_weights(self.model)),
            first=self.fresh,
        )

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over all ranks' held-out windows."""
        self.model.eval()
        batches = self.corpus.held_out_batches(
            batches=HELD_OUT_BATCHES,
            rank=self.mesh.get_rank(),
            ranks=self.mesh.size(),
            rows=ROWS,
            length=LENGTH,
        )
        return self.mean(torch.stack([self.loss(codes) for codes in batches]).mean())

    def mean(self, value: Tensor) -> float:
        """Return the mean of a scalar over the ranks."""
        total = value.clone()
        dist.all_reduce(total)
        return total.item() / self.mesh.size()


def build(options: Options, corpus: Corpus, run: str, seed: int, mesh: DeviceMesh) -> Trainer:
    """Make the model of one run: equal weights for equal seeds, sharded by block, in FP8 if the run is."""
    torch.manual_seed(seed)
    model = ByteModel(options.dim, options.layers, LENGTH).to(options.device)
    if run == "fp8":
        from fp8_torch_fsdp import convert_to_float8_training

        # The head stays in bf16, as is usual: it is small, and the loss is most sensitive to it.
        convert_to_float8_training(
            model, recipe=options.recipe, module_filter_fn=lambda _, name: name.startswith("blocks.")
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if run == "fp8" and options.gradients == "fp8":
        from fp8_torch_fsdp import compress_gradients

        compress_gradients(model)
    counter = CollectiveCounter()
    label_gathers(model, counter)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for group in optimizer.param_groups:
        group["width_factor"] = min(1.0, 256 / options.dim)
    return Trainer(
        corpus=corpus,
        seed=seed,
        steps=options.steps,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        counter=counter,
    )


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: a short linear rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / max(1, round(WARM_UP * steps)))
    return LEARNING_RATE * rise * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2)


def linear_weights(model: ByteModel) -> list[Tensor]:
    """Return the weights that the FP8 run converts: those of the blocks' linear layers."""
    return [layer.weight for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]


def weight_casts(model: nn.Module) -> int:
    """Return how often this rank has cast a weight of `model` to FP8 so far."""
    from fp8_torch_fsdp import cast_count

    return cast_count(model)


def train(options: Options, corpus: Corpus, run: str, seed: int, mesh: DeviceMesh) -> None:
    """Train one model from its newest checkpoint, or from the start, and tell how it went."""
    name = {"run": run, "seed": seed}
    checkpoints = Checkpoints(options.checkpoint / f"{run}-seed{seed}" if options.checkpoint else None)
    if record := checkpoints.finished():
        tell("end", **name, record=asdict(record))
        return
    trainer = build(options, corpus, run, seed, mesh)
    record = checkpoints.load(trainer.model, trainer.optimizer)
    tell("begin", **name, done=len(record.losses))
    for step in range(len(record.losses), options.steps):
        trainer.step(step, record)
        speed = ROWS * LENGTH * mesh.size() / float(np.mean(record.seconds[-10:]))
        gathered = record.counts[-1]["gathered_bytes"]
        tell("step", done=step + 1, loss=record.losses[-1], tokens_per_s=speed, bytes_per_step=gathered)
        if (step + 1) % options.checkpoint_every == 0:
            checkpoints.save(trainer.model, trainer.optimizer, record)
    record.digest = state_digest(trainer.model, trainer.optimizer)
    record.val_loss = trainer.held_out_loss()
    checkpoints.finish(record)
    tell("end", **name, record=asdict(record))


def train_all(options: Options, digest: str) -> None:
    """Train every model that `options` ask for.

    Raises:
        Fp8Error: the data are not those that the run was started with.
    """
    corpus = load_corpus(options.data)
    if corpus.digest != digest:
        raise Fp8Error(f"The data {corpus.label!r} changed while the demo was starting; start it again.")
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
        torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    mesh = init_device_mesh(options.device, (options.ranks,))
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    params = sum(weight.numel() for weight in ByteModel(options.dim, options.layers, LENGTH).parameters())
    tell("start", device=name, params=params, tokens_per_step=ROWS * LENGTH * options.ranks)
    for seed in range(options.seeds):
        for run in RUNS:
            train(options, corpus, run, seed, mesh)
    dist.destroy_process_group()


def tell(event: str, **fields: Any) -> None:
    """Send an event to the process that started the run; only rank 0 does."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"event": event, **fields}), flush=True)


def leave_with_parent() -> None:
    """End this process, whatever it is doing, as soon as the process that started the run is gone."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def main() -> int:
    """Train as the two arguments say: the options as JSON, and the digest of the data."""
    threading.Thread(target=leave_with_parent, daemon=True).start()
    options, digest = Options.from_json(sys.argv[1]), sys.argv[2]
    try:
        train_all(options, digest)
    except (Fp8Error, Fp8UnsupportedError) as error:
        tell("refused", message=str(error))
        return 2
    return 0


if __name__ == "__main__":
    leave(main())

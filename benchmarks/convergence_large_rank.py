"""One rank of a run of convergence_large.py, started by torchrun; rank 0 prints one JSON object at the end."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from demos.common.corpus import load_corpus
from demos.common.leave import leave
from demos.torch_fsdp import train
from demos.torch_fsdp.checkpointing import Checkpoints
from demos.torch_fsdp.options import Options

OUTLIERS, GAIN = 4, 64.0
SPIKES, SPIKE_STEPS, SPIKE = 5, 10, 20.0


def plant_outliers(model: nn.Module, dim: int) -> None:
    """Make a few channels of the inputs of each block's first layers much larger, in every way alike."""
    gains = torch.ones(dim)
    gains[torch.randperm(dim, generator=torch.Generator().manual_seed(0))[:OUTLIERS]] = GAIN

    def enlarge(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * gains.to(inputs[0]), *inputs[1:])

    for name, layer in model.named_modules():
        if name.endswith(("qkv", "up")):
            layer.register_forward_pre_hook(enlarge)


def rate_factor(step: int, steps: int, regime: str) -> float:
    """Return what the learning rate of a step is multiplied by; spikes divide a run into equal parts."""
    part = max(steps // (SPIKES + 1), 1)
    spiked = regime == "spikes" and step >= part and step % part < SPIKE_STEPS
    return SPIKE if spiked else 1.0


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Train from the newest checkpoint until the end, a loss that is not finite, or the time that is given."""
    _, regime, way, seed = task["name"].split("/")
    options = Options(
        steps=task["steps"],
        seeds=1,
        ranks=task["ranks"],
        recipe="tensorwise" if way == "bf16" else way,
        data=task["data"],
        device="cpu",
        dim=task["dim"],
        layers=task["layers"],
        out=Path(),
        checkpoint=None,
        checkpoint_every=task["checkpoint_every"],
        resume=True,
    )
    corpus, mesh = load_corpus(task["data"]), init_device_mesh("cpu", (task["ranks"],))
    trainer = train.build(options, corpus, "bf16" if way == "bf16" else "fp8", int(seed), mesh)
    trainer.rows = task["rows"]
    if regime == "outliers":
        plant_outliers(trainer.model, options.dim)
    checkpoints = Checkpoints(Path(task["folder"]) / task["name"].replace("/", "-"))
    usual = [group["width_factor"] for group in trainer.optimizer.param_groups]
    record = checkpoints.load(trainer.model, trainer.optimizer)
    for step in range(len(record.losses), options.steps):
        if step == task["stop_at"] or (step % options.checkpoint_every == 0 and is_late(task["end"])):
            return {"done": False, "step": step}
        for group, factor in zip(trainer.optimizer.param_groups, usual, strict=True):
            group["width_factor"] = factor * rate_factor(step, options.steps, regime)
        trainer.step(step, record)
        if not math.isfinite(record.losses[-1]):
            break
        if (step + 1) % options.checkpoint_every == 0:
            checkpoints.save(trainer.model, trainer.optimizer, record)
    diverged = not math.isfinite(record.losses[-1])
    return {
        "done": True,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "losses": [round(loss, 5) for loss in record.losses[: len(record.losses) - diverged]],
        "diverged_at": len(record.losses) if diverged else None,
        "val_loss": None if diverged else trainer.held_out_loss(),
        "seconds": round(sum(record.seconds)),
    }


def is_late(end: float) -> bool:
    """Whether the time is up on any rank: all of them stop at the same step."""
    late = torch.tensor(float(time.time() > end))
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return bool(late)


def main() -> int:
    """Run the task of the command line."""
    dist.init_process_group("gloo")
    found = run(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main())

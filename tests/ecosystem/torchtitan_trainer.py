"""torchtitan's own trainer on CPUs: `python -m tests.ecosystem.torchtitan_trainer FOLDER RECIPE ...`, on every rank.

torchtitan looks for an accelerator when it is imported. Here it finds the CPU, whose module of torch has no memory to
report and stands in with none; attention is the one without masks, because flex attention has no backward on CPUs. All
else is torchtitan's: trainer, model, initialisation from the meta device, FSDP2, checkpoints. The last line is JSON: of
each recipe an uninterrupted run and one that was resumed in the middle.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

stand_ins = {
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "current_device": lambda: 0,
}
for name, function in stand_ins.items():
    setattr(torch.cpu, name, function)
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda timeout, group: None  # torchtitan 0.3 calls it after a step; torch 2.13 has none
with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
    importlib.import_module("torchtitan.tools.utils")

from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import fp8_torch_fsdp as f8
from examples._report import leave
from fp8_torch_fsdp.integrations.torchtitan import Float8Converter

LENGTH, VOCABULARY = 16, 2048


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **rest):
        super().__init__()

    def encode(self, *args, **kwargs):
        return []

    def decode(self, *args, **kwargs):
        return ""

    def get_vocab_size(self):
        return VOCABULARY


class Counting(torch.utils.data.IterableDataset):
    """Sequences that go on by a step of their own; it goes on where its state says."""

    def __init__(self, rank):
        self.rank, self.index = rank, 0

    def __iter__(self):
        while True:
            self.index += 1
            tokens = torch.arange(LENGTH + 1) * (self.index % 3 + 1) + self.rank
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH)}, tokens[1:]

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


class Loader(ParallelAwareDataloader):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **rest):
        super().__init__(Counting(dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size)


def configuration(recipe, folder):
    spec = model_registry("debugmodel", attn_backend="flex", converters=[Float8Converter.Config(recipe=recipe)])
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        model_spec=spec,
        dump_folder=folder,
        tokenizer=NoTokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, total_steps=10),
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, steps=4, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        activation_checkpoint=None,
    )


def run(recipe, folder):
    """Train for four steps, from the newest checkpoint in `folder` if there is one, and return what came of it."""
    torch.manual_seed(0)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # the store of the run before may still listen
    trainer = configuration(recipe, str(folder)).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo adds, and does not multiply before
    losses, log = {}, trainer.metrics_processor.log

    def noted(step, average, *rest, **more):
        losses[step] = float(average)
        log(step, average, *rest, **more)

    with mock.patch.object(trainer.metrics_processor, "log", noted):
        trainer.train()
    model = trainer.model_parts[0]
    local = {name: getattr(value, "_local_tensor", value) for name, value in model.state_dict().items()}
    wires = [w.wire for w in f8.float8_report(model).weights]
    trainer.close()
    dist.destroy_process_group()
    return {
        "losses": [losses[step] for step in sorted(losses)],
        "digest": hashlib.sha256(b"".join(x.clone().numpy().tobytes() for x in local.values())).hexdigest(),
        "layers": sum(isinstance(m, f8.Float8Linear) for m in model.modules()),
        "gathered": sum(wire.startswith("float8") for wire in wires),
    }


def main():
    """Train, then once more from the checkpoint of the second step."""
    found, folder = {}, Path(sys.argv[1])
    for recipe in sys.argv[2:]:
        whole = run(recipe, folder / recipe)
        if os.environ["RANK"] == "0":
            shutil.copytree(folder / recipe / "checkpoint/step-2", folder / f"{recipe}-resumed/checkpoint/step-2")
            (folder / f"{recipe}-copied").touch()
        while not (folder / f"{recipe}-copied").exists():  # there is no process group between two trainers
            time.sleep(0.1)
        found[recipe] = {"whole": whole, "resumed": run(recipe, folder / f"{recipe}-resumed")}
    print(json.dumps(found), flush=True)
    leave()


if __name__ == "__main__":
    main()

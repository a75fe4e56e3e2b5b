"""torchtitan's own trainer on CPUs: `torchrun -m tests.ecosystem.torchtitan_trainer FOLDER RECIPE ...`.

torchtitan looks for an accelerator when it is imported. Here it finds the CPU, whose memory nobody monitors; attention
is the one without masks, because flex attention has no backward on CPUs. All else is torchtitan's: trainer, model,
initialisation from the meta device, FSDP2, checkpoints. FOLDER/RANK.json says what came of each recipe in an
uninterrupted run and in one that goes on from its middle.
"""

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

torch.cpu.current_device = lambda: 0
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda timeout, group: None  # torchtitan 0.3 calls it after a step; torch 2.13 has none
with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
    importlib.import_module("torchtitan.tools.utils")

from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import fp8_torch_fsdp as f8
from examples._report import leave
from fp8_torch_fsdp.integrations.torchtitan import Float8Converter

LENGTH, VOCABULARY = 16, 2048


class Counting(BaseDataLoader):
    """Two sequences a step that go on by a step of their own; it goes on where its state says."""

    def __init__(self, dp_rank, **rest):
        self.rank, self.index = dp_rank, 0

    def __iter__(self):
        while True:
            self.index += 1
            tokens = torch.stack([torch.arange(LENGTH + 1) * (self.index % 3 + more) + self.rank for more in (1, 2)])
            yield {"input": tokens[:, :-1], "positions": torch.arange(LENGTH).expand(2, -1)}, tokens[:, 1:]

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


def configuration(recipe, folder, start):
    spec = model_registry("debugmodel", attn_backend="flex", converters=[Float8Converter.Config(recipe=recipe)])
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    checkpoint = {"interval": 2, "last_save_model_only": False, "initial_load_model_only": False}
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        model_spec=spec,
        dump_folder=folder,
        tokenizer=SimpleNamespace(build=lambda **rest: None),
        dataloader=SimpleNamespace(build=Counting),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, total_steps=10),
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, steps=4, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, initial_load_path=start, **checkpoint),
        activation_checkpoint=None,
    )


def run(recipe, folder, start=None):
    """Train until the fourth step, from the checkpoint `start` if there is one, and return what came of it."""
    torch.manual_seed(0)
    # the store of the run before may still listen
    os.environ |= {"MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    trainer, losses = configuration(recipe, folder, start).build(), []
    model = trainer.model_parts[0]
    trainer.checkpointer.states["fp8"] = f8.DelayedState(model)
    trainer.metrics_processor.log = lambda step, average, *rest, **more: losses.append(float(average))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo adds, and does not multiply before
    trainer.train()
    local = [getattr(value, "_local_tensor", value).clone() for value in model.state_dict().values()]
    wires = [weight.wire for weight in f8.float8_report(model).weights]
    trainer.close()
    dist.destroy_process_group()
    return {
        "losses": losses,
        "digest": hashlib.sha256(b"".join(x.numpy().tobytes() for x in local)).hexdigest(),
        "layers": sum(isinstance(module, f8.Float8Linear) for module in model.modules()),
        "gathered": sum(wire.startswith("float8") for wire in wires),
    }


if __name__ == "__main__":
    memory = mock.MagicMock(device_name="CPU", **{"get_peak_stats.return_value": metrics.DeviceMemStats(*[0] * 6)})
    metrics.build_device_memory_monitor = lambda: memory
    found = {}
    for recipe in sys.argv[2:]:
        whole = f"{sys.argv[1]}/{recipe}"
        runs = run(recipe, whole), run(recipe, f"{whole}-resumed", f"{whole}/checkpoint/step-2")
        found[recipe] = dict(zip(("whole", "resumed"), runs, strict=True))
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    leave()

"""torchtitan's own `main` on CPUs: `torchrun -m tests.ecosystem.torchtitan_main OPTIONS`, those of `torchtitan.train`.

What stands in for a GPU, for data and for a tokenizer is that of `torchtitan_trainer`; sequences are as short as there.
"""

import importlib
from types import SimpleNamespace
from unittest import mock

stand_in = importlib.import_module("tests.ecosystem.torchtitan_trainer")  # before all of torchtitan

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan import train
from torchtitan.components import metrics
from torchtitan.config import ConfigManager
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

import fp8_torch_fsdp as f8

parse_args, train_steps = ConfigManager.parse_args, Trainer.train


def parsed(manager):
    """Return the configuration of the command line, for CPUs."""
    config = parse_args(manager)
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer = SimpleNamespace(build=lambda **rest: None)
    config.dataloader = SimpleNamespace(build=stand_in.Counting)
    config.training.local_batch_size, config.training.seq_len = 2, stand_in.LENGTH
    config.validator.enable = False
    return config


def watched(trainer):
    """Train, and print losses and what was converted on the first rank: lines of several would mix."""
    lines = []
    model = trainer.model_parts[0]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo adds, and does not multiply before
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: lines.append(
        f"step {step} loss {float(loss):.4f}"
    )
    train_steps(trainer)
    lines.append(f8.float8_report(model).headline)
    if dist.get_rank() == 0:
        print("\n" + "\n".join(lines), flush=True)


if __name__ == "__main__":
    memory = mock.MagicMock(device_name="CPU", **{"get_peak_stats.return_value": metrics.DeviceMemStats(*[0] * 6)})
    metrics.build_device_memory_monitor = lambda: memory
    ConfigManager.parse_args, Trainer.train = parsed, watched
    train.main()

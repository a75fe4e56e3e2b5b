"""Lightning with FP8: `configure_model` converts, and shards where there is a mesh.

python examples/lightning_module.py                # one process
python examples/lightning_module.py --devices 2    # FSDP2 over two processes
"""

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from fp8_torch_fsdp import Float8Linear, convert_to_float8_training


class Model(lightning.LightningModule):
    """A regression that learns to reverse its input."""

    def __init__(self, recipe: str, sharded: bool) -> None:
        super().__init__()
        self.recipe, self.sharded = recipe, sharded
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Convert, then shard; Lightning calls this before it makes the optimizer, and may call it twice."""
        if isinstance(self.layers[0], Float8Linear):
            return
        convert_to_float8_training(self.layers, recipe=self.recipe)
        if self.sharded:
            mesh: Any = self.device_mesh
            for layer in (self.layers[0], self.layers[2]):
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self.layers, mesh=mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        x = batch[0]
        loss = (self.layers(x) - x.flip(-1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train and print the first and the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--recipe", default="tensorwise")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = Model(arguments.recipe, sharded=arguments.devices > 1)
    data = DataLoader(TensorDataset(torch.randn(64, 32)), batch_size=16)
    sharding = ModelParallelStrategy(data_parallel_size=arguments.devices, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=arguments.devices,
        strategy=sharding if arguments.devices > 1 else "auto",
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    print(f"{model.layers[0]}\nfirst loss {model.losses[0]:.4f}  last loss {model.losses[-1]:.4f}")


if __name__ == "__main__":
    main()

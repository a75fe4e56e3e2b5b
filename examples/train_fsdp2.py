"""Train a small transformer with FSDP2 and FP8 all-gather on any number of processes and nodes.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py --steps 20
    sbatch examples/train_fsdp2.sbatch

On GPUs it uses NCCL, without them gloo. `--replicas 2` shards within each of two groups and copies between them (HSDP).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8_torch_fsdp import auto_filter_for_recipe, convert_to_float8_training, float8_report


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, sequence, dim] for the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, blocks, output projection."""

    def __init__(self, vocabulary: int, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=4) for _ in range(layers))
        self.output = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, sequence, vocabulary] for tokens [batch, sequence]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def build(arguments: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """Return the sharded model."""
    torch.manual_seed(0)
    model = Transformer(arguments.vocabulary, arguments.dim, arguments.layers).to(mesh.device_type)
    keep = auto_filter_for_recipe(arguments.recipe, ["output"]) if arguments.dim >= 2048 else lambda m, n: n != "output"
    convert_to_float8_training(model, recipe=arguments.recipe, module_filter_fn=keep)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main() -> None:
    """Train and print losses on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=128)
    parser.add_argument("--replicas", type=int, default=1)
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    world, replicas = dist.get_world_size(), arguments.replicas
    shape, names = ((replicas, world // replicas), ("replicate", "shard")) if replicas > 1 else ((world,), ("shard",))
    mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=names)
    model = build(arguments, mesh)
    if dist.get_rank() == 0:
        print(float8_report(model), flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(arguments.steps):
        # each sequence counts upwards from a random token
        first = torch.randint(arguments.vocabulary, (8, 1), generator=generator)
        tokens = ((first + torch.arange(33)) % arguments.vocabulary).to(mesh.device_type)
        logits = model(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

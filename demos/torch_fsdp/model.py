"""The model: a decoder-only transformer that reads and predicts bytes.

The norms have no weights and the layers no biases, so the parameters of a block are the weights of its linear layers
and nothing else: what FSDP2 gathers for a block is what the demo measures.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demos.torch_fsdp.options import HEAD_DIM

BYTES = 256


class Block(nn.Module):
    """Attention, then two linear layers, each on a normalized input and added to its input.

    Args:
        dim: width, a multiple of 32.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = dim // HEAD_DIM
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the block's output.

        Args:
            x: shape (rows, length, dim).
            bias: what is added to the attention scores, shape (rows * heads, length, length).
        """
        x = x + self.out(self.attend(self.qkv(_norm(x)), bias))
        return x + self.down(F.silu(self.up(_norm(x))))

    def attend(self, qkv: Tensor, bias: Tensor) -> Tensor:
        """Return what each position reads, shape (rows, length, dim), from `qkv` of shape (rows, length, 3 * dim).

        Written out: the backward pass of `scaled_dot_product_attention` takes three times as long in bf16 on a
        CPU, and on a GPU its fastest kernels add in an order that differs between two equal runs.
        """
        rows, length, _ = qkv.shape
        heads = qkv.view(rows, length, 3, self.heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k, v = heads.reshape(3, rows * self.heads, length, HEAD_DIM).unbind()
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=HEAD_DIM**-0.5)
        read = torch.bmm(torch.softmax(scores, dim=-1), v)
        return read.view(rows, self.heads, length, HEAD_DIM).transpose(1, 2).reshape(rows, length, -1)


class ByteModel(nn.Module):
    """A language model over bytes.

    Args:
        dim: width, a multiple of 32.
        layers: number of blocks.
        length: bytes in a window.
    """

    bias: Tensor

    def __init__(self, dim: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, BYTES, bias=False)
        self.register_buffer("bias", distance_bias(dim // HEAD_DIM, length), persistent=False)
        nn.init.normal_(self.embedding.weight)
        for name, weight in self.named_parameters():
            if name.endswith(("qkv.weight", "up.weight")):
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            elif "embedding" not in name:
                # What is added to the stream, or ends in logits, starts small: the first loss is near ln 256.
                nn.init.normal_(weight, std=0.25 * weight.shape[1] ** -0.5)

    def forward(self, codes: Tensor) -> Tensor:
        """Return float32 logits of the next byte, shape (rows, length, 256), for integer codes (rows, length)."""
        x = self.embedding(codes)
        bias = self.bias.to(x.dtype).repeat(len(codes), 1, 1)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(_norm(x)).float()


def distance_bias(heads: int, length: int) -> Tensor:
    """Return ALiBi's bias (Press et al. 2021): minus slope times distance, and minus infinity for what is to come.

    Slopes are powers of two, so that bf16 holds the products exactly up to a distance of 256.

    Args:
        heads: number of heads; slopes 1/2, 1/4, ..., 1/256 and again from 1/2.
        length: bytes in a window.

    Returns:
        float32, shape (heads, length, length).
    """
    position = torch.arange(length)
    distance = position[:, None] - position
    slopes = 2.0 ** -(torch.arange(heads) % 8 + 1.0)
    return torch.where(distance < 0, -torch.inf, -slopes[:, None, None] * distance)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte, a float32 scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])

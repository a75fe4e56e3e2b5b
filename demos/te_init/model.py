"""The model: a byte-level language model of a few linear layers, all of them FP8 primary weights."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256
EMBEDDING_STD = 0.02  # as in GPT-2: the byte table also makes the logits, and with 1 the first loss would be 60 nats


class Block(nn.Module):
    """Causal attention with one head, then a perceptron.

    Args:
        width: Size of the residual stream.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, width]."""
        q, k, v = self.qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))


class ByteModel(nn.Module):
    """Predicts the next byte.

    Args:
        width: Size of the residual stream.
        layers: Number of blocks.
        length: Longest sequence.
    """

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=EMBEDDING_STD)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, length, 256] for int64 bytes [batch, length]."""
        x = self.bytes(codes) + self.places.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.layer_norm(x, x.shape[-1:]) @ self.bytes.weight.t()


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats per byte for windows [batch, length + 1]."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

"""The models that `benchmarks.convergence` trains: one over bytes, and small ones of published architectures."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_torch_fsdp import ExpertLayout

LENGTH, HEAD_DIM = 128, 32
EXPERTS, CHOSEN = 4, 2


class Block(nn.Module):
    """Attention and a SwiGLU, each on a normalized input and added to its input.

    Args:
        dim: Width, a multiple of 128.
        outlier: k: the first channel that enters `down` is 2^k; 0 leaves the block as it is.
    """

    def __init__(self, dim: int, outlier: int) -> None:
        super().__init__()
        hidden = 11 * dim // 4
        self.heads = dim // HEAD_DIM
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)
        self.outlier = outlier

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the block's output for x [rows, length, dim]; `bias` is added to scores [rows * heads, ...]."""
        x = x + self.out(self.attend(self.qkv(_norm(x)), bias))
        return x + self.transform(_norm(x))

    def transform(self, y: Tensor) -> Tensor:
        """Return what each position adds to itself, of the normalized input."""
        hidden = F.silu(self.gate(y)) * self.up(y)
        if self.outlier:
            # Its weights are and stay 0 (`Training.step`): in bf16 this changes nothing, in FP8 only scales.
            hidden = torch.cat([torch.full_like(hidden[..., :1], 2.0**self.outlier), hidden[..., 1:]], dim=-1)
        return self.down(hidden)

    def attend(self, qkv: Tensor, bias: Tensor) -> Tensor:
        """Return what each position reads; written out, because the fused backward is slow in bf16 on CPUs."""
        rows, length, _ = qkv.shape
        heads = qkv.view(rows, length, 3, self.heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k, v = heads.reshape(3, rows * self.heads, length, HEAD_DIM).unbind()
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=HEAD_DIM**-0.5)
        read = torch.bmm(torch.softmax(scores, dim=-1), v)
        return read.view(rows, self.heads, length, HEAD_DIM).transpose(1, 2).reshape(rows, length, -1)


class Experts(nn.Module):
    """A SwiGLU for each expert, for rows [rows, dim] that are sorted by expert and the ends of their groups."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * dim, dim))
        self.down = nn.Parameter(torch.empty(EXPERTS, dim, dim))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return [rows, dim]; written out, because the grouped matmul is slow in bf16 on CPUs."""
        ends = offsets.tolist()
        parts = []
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            gate, up = (x[start:end] @ self.gate_up[expert].mT).chunk(2, dim=-1)
            parts.append(F.silu(gate) * up @ self.down[expert].mT)
        return torch.cat(parts)


def _experts_in_fp8(experts: Any, x: Tensor, offsets: Tensor) -> Tensor:
    gate, up = experts.expert_matmul("gate_up", x, offsets).chunk(2, dim=-1)
    return experts.expert_matmul("down", F.silu(gate) * up, offsets)


LAYOUTS = {Experts: ExpertLayout(forward=_experts_in_fp8, weights=("gate_up", "down"))}
"""Where the weights of `Experts` are, for a conversion."""


class MixtureBlock(Block):
    """A block of which a router sends each position to `CHOSEN` of `EXPERTS` experts."""

    def __init__(self, dim: int, outlier: int) -> None:
        super().__init__(dim, outlier)
        del self.gate, self.up, self.down
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = Experts(dim)

    def transform(self, y: Tensor) -> Tensor:
        """Return the sum of the chosen experts, weighted by their scores."""
        tokens = y.flatten(0, -2)
        scores, chosen = self.router(tokens).float().softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        offsets = chosen.flatten().bincount(minlength=EXPERTS).cumsum(0).int()
        routed = self.experts(tokens[order // CHOSEN], offsets) * scores.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, routed.to(tokens.dtype)).view_as(y)


class ByteModel(nn.Module):
    """A decoder over bytes: ALiBi's distances as positions, norms without weights, layers without biases."""

    bias: Tensor

    def __init__(self, dim: int, layers: int, outlier: int, *, mixture: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        block = MixtureBlock if mixture else Block
        self.blocks = nn.ModuleList(block(dim, outlier) for _ in range(layers))
        self.head = nn.Linear(dim, 256, bias=False)
        position, heads = torch.arange(LENGTH), dim // HEAD_DIM
        distance, slopes = position[:, None] - position, 2.0 ** -(torch.arange(heads) % 8 + 1.0)
        bias = torch.where(distance < 0, -torch.inf, -slopes[:, None, None] * distance)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits [rows, length, 256] of the next byte for integer codes [rows, length]."""
        x = self.embedding(codes)
        bias = self.bias.to(x.dtype).repeat(len(codes), 1, 1)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(_norm(x))


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


class Published(nn.Module):
    """A small model of an architecture of Transformers, its layers and forward those of the published ones."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        decoder = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        sizes: dict[str, dict[str, Any]] = {
            "Mamba2": {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 32,
                       "state_size": 32, "n_groups": 1, "chunk_size": 32},
            "Gemma4": decoder | heads | {"head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 32,
                       "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 0},
            "Olmoe": decoder | heads | {"num_experts": 4, "num_experts_per_tok": 2},
        }  # fmt: skip
        prefix = {"Gemma4": "Gemma4Text"}.get(name, name)
        config = getattr(transformers, f"{prefix}Config")(**(sizes[name] | special))
        self.model = getattr(transformers, f"{name}ForCausalLM")(config)
        self.blocks = next(m for m in self.model.modules() if isinstance(m, nn.ModuleList))

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits [rows, length, 256]."""
        return self.model(input_ids=codes, use_cache=False).logits


class Bfloat16Matmuls(TorchDispatchMode):
    """Computes matmuls of bfloat16 CPU matrices as float32 matmuls of the same numbers, rounded once to bfloat16.

    Processors without bfloat16 units take five to ten times as long for the bfloat16 ones.
    """

    matmuls = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if func.overloadpacket not in self.matmuls or args[-1].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        return func(*(arg.float() for arg in args), **kwargs).bfloat16()

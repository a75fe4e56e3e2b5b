"""Parts of the models that are priced, and timed where there is a GPU.

A torch that was built for CUDA chooses how a GPU normalizes and attends. One that was not, and believes in a GPU that
is not there, would choose other operators: it is told their names.
"""

import torch
from torch import nn
from torch.nn import functional

HEAD = 128
CHOOSES = torch.backends.cuda.is_built()
"""Whether this torch chooses itself for tensors on "cuda"; `pretend_gpu` says no."""


class Norm(nn.RMSNorm):
    """RMSNorm as CUDA computes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        if CHOOSES or not x.is_cuda:
            return super().forward(x)
        return torch.ops.aten._fused_rms_norm(x, self.normalized_shape, self.weight, self.eps)[0]


def attention(
    w: nn.ModuleDict,
    n: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: nn.Module | None = None,
    k_norm: nn.Module | None = None,
) -> torch.Tensor:
    """Return what attention adds to [1, tokens, width], of the normalized input; `w` has q, k, v and o."""
    q, k, v = (w[name](n).unflatten(-1, (-1, HEAD)) for name in "qkv")
    q, k = (x if norm is None else norm(x) for x, norm in ((q, q_norm), (k, k_norm)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    if CHOOSES or not q.is_cuda:
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return w["o"](y.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of features by the angle of their position."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

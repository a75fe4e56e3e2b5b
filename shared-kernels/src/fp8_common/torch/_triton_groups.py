"""The kernels on rows in groups, launched with PyTorch tensors; unrun on a GPU.

The group of each row is int32 [rows] and never falls; rows of no group have the number of groups.
"""

import torch

from fp8_common._formats import Format
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._rounding import torch_dtype


def group_amax(x: torch.Tensor, group: torch.Tensor, count: int, *, columns: bool) -> torch.Tensor:
    """Return max |x| of each group, float32 [count], or of its columns, [count, columns]; 0 without rows, NaN wins."""
    m, n = x.shape
    # an amax has no sign, so its key is its bits
    keys = torch.zeros((count, n) if columns else (count,), dtype=torch.int32, device=x.device)
    plan = triton_backend.plans().group_amax(m, n, count, _name(x), columns=columns)
    triton_backend.run(plan, x.device, x_ptr=x.contiguous(), group_ptr=group, amax_ptr=keys)
    return keys.view(torch.float32)


def group_cast(x: torch.Tensor, group: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return RN_fmt(RN32(x * scale)) with the float32 scale of each row's group, [count] or [count, columns].

    Rows of no group are as the memory was.
    """
    (m, n), count = x.shape, scale.shape[0]
    y = torch.empty((m, n), dtype=torch_dtype(fmt), device=x.device)
    plan = triton_backend.plans().group_cast(m, n, count, _name(x), fmt, columns=scale.ndim == 2)
    given = {"x_ptr": x.contiguous(), "group_ptr": group, "scale_ptr": scale.contiguous()}
    triton_backend.run(plan, x.device, **given, y_ptr=y)
    return y


def turn_rows(codes: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return [columns, p] of codes [rows, columns] in the order of int32 `source` [p], 0 where it is negative."""
    p, n = source.shape[0], codes.shape[1]
    turned = torch.empty((n, p), dtype=torch.uint8, device=codes.device)
    given = {"q_ptr": codes.contiguous().view(torch.uint8), "source_ptr": source}
    triton_backend.run(triton_backend.plans().turn_rows(p, n), codes.device, **given, t_ptr=turned)
    return turned.view(codes.dtype)


def clear_rows(y: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Write zeros to what belongs to the entries of contiguous `y` whose bool in `keep` [n] is False; return `y`."""
    n = keep.shape[0]
    if y.numel():
        triton_backend.run(
            triton_backend.plans().clear_rows(n, y.numel() // n, _name(y)),
            y.device,
            y_ptr=y,
            keep_ptr=keep.view(torch.uint8),
        )
    return y


def _name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")

"""The Triton kernels on torch tensors, and the rule for which tensors they handle.

Same functions and results as `fp8_common.torch.quantize` and `amax`; shapes without a kernel (scales that broadcast,
other axes, batched blocks) go to these references. `FP8_COMMON_BACKEND` chooses: "auto" takes the kernels for CUDA
tensors on compute capability 8.9 and newer, "triton" refuses where it cannot, "reference" never does.
"""

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch

from fp8_common._blocks import Block, block_grid
from fp8_common._env import backend
from fp8_common._errors import Fp8UnsupportedError
from fp8_common._formats import Format, get_data_format
from fp8_common._hardware import KERNEL_CAPABILITY, has_kernels
from fp8_common._policy import ScalePolicy
from fp8_common._quantize import MX_BLOCK
from fp8_common.torch import _capture as capture
from fp8_common.torch import _quantize
from fp8_common.torch._compat import FakeTensor
from fp8_common.torch._quantize import Cast
from fp8_common.torch._rounding import torch_dtype


def applies(x: torch.Tensor, fmt: str | Format | None = None, policy: ScalePolicy | None = None) -> bool:
    """Return whether `x` goes to the kernels; fake tensors, which FakeTensorMode makes, go to the references.

    Raises:
        Fp8UnsupportedError: FP8_COMMON_BACKEND=triton, and they cannot run on the device of `x`.
    """
    # The environment is read at every call, so that tests and users can change it; the device is looked up once.
    choice = backend()
    if choice == "reference" or isinstance(x, FakeTensor):
        return False
    obstacle = _obstacle(x.device)
    if obstacle is not None and choice != "triton":
        return False
    if fmt is not None and not has_kernels(fmt, policy):
        return False
    if obstacle is not None:
        raise Fp8UnsupportedError(
            f"FP8_COMMON_BACKEND=triton, but {obstacle}. Unset it to use PyTorch's own operations there."
        )
    return True


@cache
def plans() -> ModuleType:
    """Return the module of the kernels' plans; it imports Triton, which nothing before the first launch needs."""
    return importlib.import_module("fp8_common._kernels")


def run(plan: Any, device: torch.device, **tensors: torch.Tensor) -> None:
    """Run a launch on tensors named like its pointers, on their device."""
    if device.type != "cuda":
        plans().run(plan, tensors)
        return
    # Triton launches on the current device, not on that of its arguments.
    with torch.cuda.device(device):
        refusal = capture.refusal(f"the kernel {plan.name}") if capture.is_capturing(device) else None
        plans().run(plan, tensors, refusal=refusal)


def launch(plan: Any, device: torch.device, **given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Run a launch and return its outputs in order: those that are given, and the others, which are made here.

    Args:
        plan: The `Launch`.
        device: Where it runs.
        given: Tensors named like its pointers; None for those that are left out.
    """
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, out in plan.outputs.items():
        if name not in tensors:
            make = torch.zeros if out.zeroed else torch.empty
            tensors[name] = make(out.shape, dtype=getattr(torch, out.dtype), device=device)
    run(plan, device, **tensors)
    return tuple(tensors[name] for name in plan.outputs)


def amax_all(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| over all elements as a float32 scalar tensor."""
    return amax_key(x).view(torch.float32).view(())


def amax_key(x: torch.Tensor) -> torch.Tensor:
    """Return the int32 key [1] of max |x|; 0 for an empty tensor."""
    (key,) = launch(plans().amax(x.numel(), _name(x.dtype)), x.device, x_ptr=_dense(x))
    return key


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: Format, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Return RN_fmt(RN32(x * scale)); one scale for the whole tensor has a kernel. `amax` saves nothing here."""
    # A scale [1, 1] for x [n] makes the result a matrix by broadcasting, which only the reference does.
    if scale.numel() != 1 or scale.ndim > x.ndim:
        return _quantize.quantize(x, scale, fmt)
    y = torch.empty_like(x, dtype=torch_dtype(fmt))
    plan = plans().cast(x.numel(), _name(x.dtype), fmt)
    launch(plan, x.device, x_ptr=_dense(x), scale_ptr=_scale(scale), y_ptr=y)
    return y


def quantize_with_amax(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `quantize(x, scale, fmt)` and max |x| (float32 scalar) from one pass: delayed scaling."""
    return cast_with_amax(x, scale, fmt)[:2]


def cast_with_amax(
    x: torch.Tensor, scale: torch.Tensor, fmt: Format, *, both: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return `quantize(x, scale, fmt)`, max |x|, and with `both` the codes transposed, all from one pass."""
    if both and x.ndim == 2 and x.is_contiguous():
        plan = plans().cast_transpose(*x.shape, _name(x.dtype), fmt, with_amax=True)
        y, transposed, key = launch(plan, x.device, x_ptr=x, scale_ptr=_scale(scale))
    else:
        plan, transposed = plans().cast(x.numel(), _name(x.dtype), fmt, with_amax=True), None
        y = torch.empty_like(x, dtype=torch_dtype(fmt))
        _, key = launch(plan, x.device, x_ptr=_dense(x), scale_ptr=_scale(scale), y_ptr=y)
    return y, key.view(torch.float32).view(()), transposed


def quantize_tensorwise(x: torch.Tensor, fmt: Format, policy: ScalePolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and the float32 scalar scale from the tensor's own amax: two launches."""
    return cast_tensorwise(x, fmt, policy)[:2]


def cast_tensorwise(x: torch.Tensor, fmt: Format, policy: ScalePolicy, *, both: bool = False) -> Cast:
    """Return data and scales from the tensor's own amax, and with `both` the codes of a matrix transposed."""
    dense = _dense(x)
    (key,) = launch(plans().amax(x.numel(), _name(x.dtype)), x.device, x_ptr=dense)
    if both and x.ndim == 2 and x.is_contiguous():
        y, transposed, scale, scale_inv = _cast_by_key(x, key, fmt, policy)
        return Cast(y, scale, scale_inv, transposed)
    y, scale = torch.empty_like(x, dtype=torch_dtype(fmt)), _scale_of_empty(x)
    plan = plans().cast(x.numel(), _name(x.dtype), fmt, policy=policy)
    _, scale = launch(plan, x.device, x_ptr=dense, scale_ptr=key, y_ptr=y, scale_out_ptr=scale)
    return Cast(y, scale.view(()), torch.reciprocal(scale).view(()))


def cast_by_amax(
    x: torch.Tensor, amax: torch.Tensor, fmt: Format, policy: ScalePolicy
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return data of a matrix, its transpose, and the scales into and back from FP8 that follow from its float32 amax.

    The amax is that of `amax`, without a sign.
    """
    # an amax has no sign, so its bits are its key
    return _cast_by_key(x.contiguous(), amax.view(torch.int32).reshape(1), fmt, policy)


def _cast_by_key(
    x: torch.Tensor, key: torch.Tensor, fmt: Format, policy: ScalePolicy
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return data of a contiguous matrix, its transpose and both scales, from the int32 key [1] of its amax."""
    plan = plans().cast_transpose(*x.shape, _name(x.dtype), fmt, policy=policy)
    given = {"scale_out_ptr": _scale_of_empty(x), "scale_inv_ptr": _scale_of_empty(x)}
    y, transposed, scale, scale_inv = launch(plan, x.device, x_ptr=x, scale_ptr=key, **given)
    return y, transposed, scale.view(()), scale_inv.view(())


def _scale_of_empty(x: torch.Tensor) -> torch.Tensor | None:
    """Return the scale 1 of an empty tensor, for which nothing is launched; None for others: the kernel writes it."""
    return None if x.numel() else torch.ones(1, dtype=torch.float32, device=x.device)


def quantize_rowwise(x: torch.Tensor, fmt: Format, dim: int, policy: ScalePolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and scales, one for each slice along `dim`; the last dimension has a kernel."""
    if dim % x.ndim != x.ndim - 1:
        return _quantize.quantize_rowwise(x, fmt, dim, policy)
    return cast_rowwise(x, None, fmt, policy)[:2]


def quantize_folded(
    x: torch.Tensor, fold: torch.Tensor | None, fmt: Format, policy: ScalePolicy
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row-wise data and scales [..., 1] of float32(x) * fold; `fold` is float32 [N]."""
    return cast_rowwise(x.contiguous(), fold, fmt, policy)[:2]


def cast_rowwise(
    x: torch.Tensor, fold: torch.Tensor | None, fmt: Format, policy: ScalePolicy, groups: torch.Tensor | None = None
) -> Cast:
    """Return data and scales [..., 1] of x, or of float32(x) * fold, `fold` being float32 [N].

    With `groups`, int32 [M], which names a row of `fold` for each row of x [M, N], it is [groups, N].
    """
    if x.numel() == 0 or (fold is None and not x.is_contiguous()):
        return _quantize.cast_rowwise(x, None, fmt, policy)  # rows without columns have scales, and no program
    x = x.contiguous()
    given = {"fold": fold is not None, "groups": groups is not None}
    plan = plans().rowwise(*_matrix(x), _name(x.dtype), fmt, policy, **given)
    folds = None if fold is None else fold.contiguous()
    y, *scales = launch(plan, x.device, x_ptr=x, fold_ptr=folds, group_ptr=groups)
    return Cast(y.view(x.shape), *(scale.view(*x.shape[:-1], 1) for scale in scales))


def cast_both(x: torch.Tensor, fold: torch.Tensor | None, fmt: Format, policy: ScalePolicy) -> tuple[Cast, Cast]:
    """Return `cast_rowwise(x, fold)` and that of the columns of x, turned: two reads of a contiguous x [4 m, n]."""
    m, n = x.shape
    # One buffer, so that the scales of rows and columns are one launch.
    keys = torch.zeros(m + n, dtype=torch.int32, device=x.device)
    given = {"x_ptr": x, "fold_ptr": None if fold is None else fold.contiguous()}
    plan = plans().amax_both(m, n, _name(x.dtype), fold=fold is not None)
    launch(plan, x.device, **given, row_ptr=keys[:m], column_ptr=keys[m:])
    # an amax has no sign, so its key is its bits
    scales = scales_of_amax(keys.view(torch.float32), fmt, policy)
    (rows, columns), (rows_inv, columns_inv) = (one[:, None].split((m, n)) for one in scales)
    plan = plans().cast_both(m, n, _name(x.dtype), fmt, fold=fold is not None)
    y, transposed = launch(plan, x.device, **given, row_ptr=rows, column_ptr=columns)
    return Cast(y, rows, rows_inv), Cast(transposed, columns, columns_inv)


def quantize_blockwise(
    x: torch.Tensor, fmt: Format, block: Block, policy: ScalePolicy
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and scales per block; 1x128 on any number of dimensions and 128x128 on matrices have kernels."""
    return cast_blockwise(x, fmt, block, policy)[:2]


def cast_blockwise(x: torch.Tensor, fmt: Format, block: Block, policy: ScalePolicy) -> Cast:
    """Return data and the scales per block into and back from FP8; kernels as for `quantize_blockwise`."""
    rows, columns = block
    if columns != 128 or rows not in (1, 128) or (rows == 128 and x.ndim != 2) or not _regular(x):
        return _quantize.cast_blockwise(x, fmt, block, policy)
    y, *scales = launch(plans().blockwise(*_matrix(x), _name(x.dtype), fmt, rows, policy), x.device, x_ptr=x)
    grid = block_grid(tuple(x.shape), block)
    return Cast(y.view(x.shape), *(scale.view(grid) for scale in scales))


def quantize_mx(x: torch.Tensor, fmt: Format, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return MX data [..., N] and E8M0 scales [..., ceil(N / 32)] in torch.float8_e8m0fnu."""
    if not _regular(x):
        return _quantize.quantize_mx(x, fmt, mode)
    plan = plans().mx(*_matrix(x), _name(x.dtype), fmt, mode)
    y, codes = launch(plan, x.device, x_ptr=x)
    return y.view(x.shape), codes.view(block_grid(tuple(x.shape), MX_BLOCK)).view(torch.float8_e8m0fnu)


def dequantize(q: torch.Tensor, scale: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return q * RN32(1 / scale) in `dtype`; one scale, or one per row, has a kernel."""
    rowwise = scale.ndim == q.ndim and scale.shape == (*q.shape[:-1], 1)
    if not _regular(q) or not (rowwise or (scale.numel() == 1 and scale.ndim <= q.ndim)):
        return _quantize.dequantize(q, scale, fmt, dtype)
    m, n = _matrix(q)
    # A block as large as the matrix stands for one scale; at least 1, as a matrix may be empty.
    return _dequantize(q, scale, fmt, dtype, (1 if rowwise else max(m, 1), max(n, 1)))


def dequantize_blockwise(
    q: torch.Tensor, scale: torch.Tensor, fmt: Format, block: Block, dtype: torch.dtype
) -> torch.Tensor:
    """Undo `quantize_blockwise`; blocks of 128 columns have a kernel."""
    # Scales of another shape go to the reference, which raises the error.
    whole = tuple(scale.shape) == block_grid(tuple(q.shape), block)
    if not whole or block[1] != 128 or (block[0] > 1 and q.ndim != 2) or not _regular(q):
        return _quantize.dequantize_blockwise(q, scale, fmt, block, dtype)
    return _dequantize(q, scale, fmt, dtype, block)


def dequantize_mx(q: torch.Tensor, codes: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Undo `quantize_mx`."""
    if not _regular(q) or tuple(codes.shape) != block_grid(tuple(q.shape), MX_BLOCK):
        return _quantize.dequantize_mx(q, codes, fmt, dtype)
    plan = plans().dequantize_mx(*_matrix(q), fmt, _name(dtype))
    (y,) = launch(plan, q.device, q_ptr=_native(q, fmt), code_ptr=codes.view(torch.uint8).contiguous())
    return y.view(q.shape)


def _dequantize(q: torch.Tensor, scale: torch.Tensor, fmt: Format, dtype: torch.dtype, block: Block) -> torch.Tensor:
    plan = plans().dequantize(*_matrix(q), fmt, _name(dtype), block)
    (y,) = launch(plan, q.device, q_ptr=_native(q, fmt), scale_ptr=_scale(scale))
    return y.view(q.shape)


def scales_of_amax(amax: torch.Tensor, fmt: Format, policy: ScalePolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 scales into and back from FP8, of the shape of float32 `amax`: one launch."""
    plan = plans().scales_of_amax(amax.numel(), fmt, policy)
    scale, scale_inv = launch(plan, amax.device, amax_ptr=amax.contiguous())
    return scale.view(amax.shape), scale_inv.view(amax.shape)


def delayed_current(
    scale: torch.Tensor, late: torch.Tensor | None, own_key: torch.Tensor | None, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a delayed scale and its reciprocal, and observe an amax: one launch for one operand.

    Args:
        scale: float32 scalar, which the result is a copy of.
        late: bool scalar; where it is set the result is NaN. None asks nothing.
        own_key: int32 scalar that is raised to the amax if that is finite; None observes nothing.
        amax: float32 scalar without a sign.
    """
    plan = plans().delayed_current(record=own_key is not None, check=late is not None)
    observed = {} if own_key is None else {"key_ptr": amax.view(torch.int32), "own_key_ptr": own_key}
    flag = None if late is None else late.view(torch.uint8)
    *_, current, inverse = launch(plan, scale.device, scale_ptr=scale, late_ptr=flag, **observed)
    return current, inverse


def delayed_update(
    history: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, fmax: torch.Tensor, policy: ScalePolicy
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move delayed scaling on by a step for all tensors of a model in one launch.

    Args:
        history: float32 [L, T].
        amax: float32 [T]: what this step saw.
        scale: float32 [T]: the scales into FP8 of this step.
        fmax: float32 [T]: numerators, from `scale_rule(fmt, policy)[0]` of each tensor's format.
        policy: The rule; its `algo` reduces the history.

    Returns:
        The rolled history [L, T], the next step's scales [T] and their reciprocals [T], float32.
    """
    length, tensors = history.shape
    plan = plans().delayed_update(tensors, length, policy)
    given = {"history_ptr": history, "amax_ptr": amax, "scale_ptr": scale}
    rolled, following, inverse = launch(
        plan, history.device, **{name: tensor.contiguous() for name, tensor in given.items()}, fmax_ptr=fmax
    )
    return rolled, following, inverse


def pack_gradients(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    fmt: Format,
    random: tuple[int, int] | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Write codes [n, c] and scales [n, blocks] of x [n, c] into a message; see `sharding.gradients`."""
    rows, columns = x.shape
    plan = plans().pack_gradients(
        rows,
        columns,
        (x.stride(0), codes.stride(0)),
        _name(x.dtype),
        fmt,
        random=random,
        residual=residual is not None,
    )
    kept = {} if residual is None else {"residual_ptr": residual}
    run(plan, x.device, x_ptr=x, y_ptr=codes, scale_ptr=scales, **kept)


def sum_gradients(codes: torch.Tensor, scales: torch.Tensor, fmt: Format, divisor: float) -> torch.Tensor:
    """Return the float32 sum [c] over ranks of codes [n, c] with scales [n, blocks] in a message, divided."""
    ranks, columns = codes.shape
    plan = plans().sum_gradients(ranks, columns, codes.stride(0), fmt, "float32", divisor)
    (total,) = launch(plan, codes.device, q_ptr=codes, scale_ptr=scales)
    return total


def module_for(x: torch.Tensor, fmt: str | Format, policy: ScalePolicy | None = None) -> ModuleType:
    """Return the module whose functions handle `x`: this one, or the references."""
    return sys.modules[__name__] if applies(x, fmt, policy) else _quantize


@cache
def _obstacle(device: torch.device) -> str | None:
    """Say what keeps the kernels from a device; None if nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if interpreting():  # the interpreter runs the kernels on CPU tensors
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"the kernels need an NVIDIA GPU, and the tensor is on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < KERNEL_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no FP8 conversion (8.9 and newer do)"
    return None


@cache
def interpreting() -> bool:
    """Return whether Triton interprets kernels on the CPU in this process."""
    return plans().interpreting()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _scale(scale: torch.Tensor) -> torch.Tensor:
    return scale.float().contiguous()


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return x in the memory order that `torch.empty_like(x)` has, so that elementwise kernels see flat memory."""
    # `empty_like` keeps the order of dimensions of dense tensors and drops gaps and overlaps. Reading x in that order
    # lets a transposed matrix be cast without a copy, into data that are transposed the same way.
    if x.is_contiguous():  # nearly always, and asked first: the comparison needs memory of the size of x
        return x
    order = torch.empty_like(x)
    return x if order.stride() == x.stride() else order.copy_(x)


def _regular(x: torch.Tensor) -> bool:
    """Whether kernels that work on rows can read x: contiguous, and not a scalar."""
    return x.is_contiguous() and x.ndim >= 1


def _matrix(x: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of x, all dimensions but the last counted as rows."""
    n = x.shape[-1]
    return (x.numel() // n if n else 0), n


def _native(q: torch.Tensor, fmt: Format) -> torch.Tensor:
    return q.view(torch_dtype(get_data_format(fmt)))

"""`TensorwiseCast`: the launches that cast tensors of one shape with one scale, of their own amax or of earlier steps.

Layers keep it (`linear.plan`): a cast is then its kernels and nothing else, with delayed scaling, too.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from fp8_common.formats import Format
from fp8_common.policy import ScalePolicy
from fp8_common.torch import _triton
from fp8_common.torch._triton import dense, name_of, plans, takes
from fp8_common.torch.numerics import torch_dtype
from fp8_common.torch.quantized import Quantized


class ScaleState(Protocol):
    """The state of delayed scaling of one tensorwise operand, or of one for each group: scalars are then [groups]."""

    @property
    def always_ready(self) -> bool:
        """Whether `scale` is the one to use, whatever the operand holds: amax and cast are then one pass."""

    @property
    def scale(self) -> torch.Tensor:
        """float32 scalar into FP8, from earlier steps."""

    @property
    def must_fit(self) -> bool:
        """Whether `scale` is used only where it fits the amax of the operand."""

    def current(self, amax: torch.Tensor, record: bool, present: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scale to use now for an operand of float32 scalar `amax`, and record it if asked to.

        Of groups, those that are not `present`, bool [groups], are not recorded.
        """

    def pointers(self, record: bool) -> dict[str, torch.Tensor]:
        """Return what kernels read of it and, with `record`, write, by the names of their arguments.

        `scale_ptr` is the scale that is used whatever the operand holds. Without, `delayed_ptr` is the one to use where
        `ready_ptr` is set.
        """


class TensorwiseCast:
    """The launches that cast tensors of one shape with one scale.

    Args:
        shape: Of the tensors; with `both` [M, N].
        dtype: Of the tensors.
        fmt: The format.
        policy: The rule for the scale.
        both: Whether contiguous matrices are cast both ways.
        with_scale: Whether the scale into FP8 is wanted, too.
        one: Shape of a scale: () or (1,), which Inductor does not copy where a kernel writes it.

    Attributes:
        shape: As given.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: Format,
        policy: ScalePolicy,
        *,
        both: bool = True,
        with_scale: bool,
        one: tuple[int, ...] = (),
    ) -> None:
        self.shape = torch.Size(shape)
        self._turned = tuple(shape)[::-1] if both else None
        self._fmt, self._policy, self._one, self._with_scale = fmt, policy, one, with_scale
        self._name, self._codes = name_of(dtype), torch_dtype(fmt)
        size = self.shape.numel()
        self._amax = plans().amax(size, self._name)
        # of an empty tensor, for which nothing is launched, the scale is 1
        self._new = torch.empty if size else torch.ones
        self._casts: dict = {}

    def __call__(self, x: torch.Tensor, state: ScaleState | None = None, record: bool = False) -> Quantized:
        """Cast a tensor.

        Args:
            x: With `both` contiguous.
            state: Of delayed scaling: x is not empty then.
            record: Whether delayed scaling observes x.
        """
        given = {} if state is None else state.pointers(record)
        if "scale_ptr" not in given:
            given["scale_ptr"] = bits = torch.zeros(1, dtype=torch.int32, device=x.device)
            _triton.run(self._amax, x.device, x_ptr=x, amax_ptr=bits)
        elif record:
            given["amax_ptr"] = torch.zeros(2, dtype=torch.int32, device=x.device)
        return self.by(x, given, state is not None and state.must_fit)

    def by(self, x: torch.Tensor, given: dict[str, torch.Tensor], fits: bool = False) -> Quantized:
        """Cast a tensor whose amax is known by its int32 bits [1], `scale_ptr`, or as `ScaleState.pointers` says."""
        device, new = x.device, self._new
        names = *given, fits
        launch = self._casts.get(names)
        if launch is None:
            launch = self._casts[names] = self._decided(given, fits)
        transposed = None
        if self._turned is None:
            given["y_ptr"] = codes = torch.empty_like(x, dtype=self._codes)
        else:
            given["y_ptr"] = codes = torch.empty(self.shape, dtype=self._codes, device=device)
            given["yt_ptr"] = transposed = torch.empty(self._turned, dtype=self._codes, device=device)
        given["scale_inv_ptr"] = scale_inv = new(self._one, dtype=torch.float32, device=device)
        scale = None
        if self._with_scale:
            given["scale_out_ptr"] = scale = new(self._one, dtype=torch.float32, device=device)
        _triton.run(launch, device, x_ptr=x, **given)
        fmt = self._fmt
        turned = None if transposed is None else Quantized(transposed, scale_inv, fmt, scale=scale)
        return Quantized(codes, scale_inv, fmt, None, turned, scale)

    def _decided(self, given: dict[str, torch.Tensor], fits: bool) -> object:
        known, record, check = given["scale_ptr"].dtype == torch.float32, "own_key_ptr" in given, "late_ptr" in given
        delayed = plans().Delayed(fits, record, check) if known or "delayed_ptr" in given else None
        rule = {"policy": None if known else self._policy, "delayed": delayed}
        if self._turned is None:
            return plans().cast(self.shape.numel(), self._name, self._fmt, **rule)
        return plans().cast_transpose(*self.shape, self._name, self._fmt, **rule, with_scale=self._with_scale)


def tensorwise_cast(x: torch.Tensor, shape: Sequence[int], fmt: Format, policy: ScalePolicy) -> TensorwiseCast | None:
    """Return what casts contiguous matrices [M, N] that are else like x both ways; None where no kernel does."""
    if len(shape) != 2 or 0 in shape or policy.formula == "e8m0" or not takes(x, fmt, policy):
        return None
    return TensorwiseCast(shape, x.dtype, fmt, policy, with_scale=False)


def quantize_delayed(
    x: torch.Tensor, state: ScaleState, fmt: Format, policy: ScalePolicy, *, record: bool, both: bool
) -> Quantized | None:
    """Return codes made with a scale of earlier steps, and the scales; None where no kernel does."""
    if not x.numel() or not takes(x, fmt, policy):
        return None
    both = both and x.ndim == 2 and x.is_contiguous()
    cast = TensorwiseCast(x.shape, x.dtype, fmt, policy, both=both, with_scale=True)
    return cast(x if both else dense(x), state, record)

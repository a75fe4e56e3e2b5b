"""A step of AdamW on numbers that are kept as a code and three more bytes, in one pass that torch.compile makes.

The bits are those of torch's own `AdamW` on whole float32 numbers; the first use compares with it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fp8_common._adamw import AdamWStep
from fp8_common._formats import Format
from fp8_common.torch import _remainder as reference
from fp8_common.torch._remainder_compiled import MAGNITUDE, join_of, with_own_code, write_bytes

Function = Callable[..., torch.Tensor]
# torch's own kernels are compiled like that, which joins products and sums in two places.
_OPTIONS = {"cpp.enable_floating_point_contract_flag": "fast"}
_SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class CompiledAdamW:
    """Steps of AdamW.

    Args:
        fmt: E4M3 or E5M2, the format of the codes.
        fused: Whether bits are those of `AdamW(fused=True)`, or those of its loop, whose root is torch's `sqrt`.
    """

    def __init__(self, fmt: Format, *, fused: bool) -> None:
        self._fused, self._fmt = fused, fmt
        options: dict[str, Any] = {"dynamic": True, "fullgraph": True, "options": _OPTIONS}
        self._moments = torch.compile(_moments, **options)
        self._apply = torch.compile(with_own_code(_apply_of(fmt, fused=fused)), **options)

    @torch.no_grad()
    def step(
        self,
        codes: torch.Tensor,
        inverse: torch.Tensor,
        lower: torch.Tensor,
        gradient: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
        numbers: torch.Tensor,
    ) -> torch.Tensor:
        """Step numbers that codes and lower bytes give back; all tensors are contiguous.

        Args:
            codes: uint8 [n]; the highest bytes of the numbers after the step are written to them.
            inverse: float32 [], what `usable_inverse` makes of the scale.
            lower: uint8 [3, n], written.
            gradient: bfloat16 or float32 [n].
            moments: Both float32 [n], written.
            numbers: float32 [7], the `AdamWStep`.

        Returns:
            int32 [], the key of the largest magnitude after the step.
        """
        first, second = moments
        if self._fused:
            return self._apply(codes, inverse, *lower, gradient, first, second, numbers)
        self._moments(gradient, first, second, numbers)
        return self._apply(codes, inverse, *lower, first, second.sqrt(), numbers)

    def is_torchs(self) -> bool:
        """Compare with torch's `AdamW` for three steps; False where the compiler makes other bits, or cannot work."""
        try:
            return all(self._same(dtype) for dtype in (torch.bfloat16, torch.float32))
        except Exception:
            # torch has no class of its own for all that may be missing: an option, a compiler, a writable cache.
            return False

    def _same(self, dtype: torch.dtype) -> bool:
        generator = torch.Generator().manual_seed(0)
        shape = (1 << 14,)
        # far enough from zero for codes and bytes to give them back in each step, which the last line checks
        x = torch.randn(shape, generator=generator).exp2() + 0.5
        exponents = torch.randint(-60, 4, shape, generator=generator)
        gradients = [(torch.randn(shape, generator=generator) * 2.0**exponents).to(dtype) for _ in range(3)]
        scale = torch.tensor(448 / 32.0) if self._fmt.max > 400 else torch.tensor(1.0)
        inverse = reference.usable_inverse(scale)
        whole = torch.nn.Parameter(x.clone())
        optimizer = torch.optim.AdamW([whole], fused=self._fused, foreach=False, **_SETTINGS)
        first, second = torch.zeros(shape), torch.zeros(shape)
        for step, gradient in enumerate(gradients, 1):
            whole.grad = gradient.float()
            optimizer.step()
            codes, lower = _cast(x, scale, self._fmt), reference.lower_bytes(x)
            numbers = torch.tensor(AdamWStep.of(step, **_SETTINGS))
            key = self.step(codes, inverse, lower, gradient, (first, second), numbers)
            x = reference.join_bytes(codes, lower)
            state = optimizer.state[whole]
            pairs = (x, whole.detach()), (first, state["exp_avg"]), (second, state["exp_avg_sq"])
            if not all(torch.equal(a, b) for a, b in pairs):
                return False
            if not torch.equal(key.view(torch.float32), x.abs().max()):
                return False
        return True


@cache
def compiled_adamw(fmt: Format, *, fused: bool) -> CompiledAdamW | None:
    """Return the compiled step for a format; None where the compiler at hand makes other bits than torch's `AdamW`.

    Compiling takes seconds, once for each process.
    """
    made = CompiledAdamW(fmt, fused=fused)
    return made if made.is_torchs() else None


def _cast(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    from fp8_common.torch._quantize import quantize

    return quantize(x, scale, fmt).view(torch.uint8)


def _rounded(product: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a product in a form that no compiler joins with a sum that follows: it is compared, too."""
    return torch.where(product == product, product, other)


def _next_moments(
    gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: AdamWStep
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = gradient.to(torch.float32)
    # Each sum is joined with the product that stands before it.
    return (
        first + numbers.first * (gradient - first),
        _rounded(second * numbers.keep_second, second) + numbers.second * gradient * gradient,
    )


def _moments(gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: torch.Tensor) -> None:
    after = _next_moments(gradient, first, second, AdamWStep._make(numbers.unbind()))
    first.copy_(after[0])
    second.copy_(after[1])


def _apply_of(fmt: Format, *, fused: bool) -> Function:
    join = join_of(fmt)

    def apply(
        codes: torch.Tensor,
        inverse: torch.Tensor,
        low: torch.Tensor,
        middle: torch.Tensor,
        high: torch.Tensor,
        *rest: torch.Tensor,
    ) -> torch.Tensor:
        numbers = AdamWStep._make(rest[-1].unbind())
        x = join(codes, inverse, low, middle, high)
        if fused:
            gradient, first, second = rest[:3]
            after = _next_moments(gradient, first, second, numbers)
            first.copy_(after[0])
            second.copy_(after[1])
            moment, root = after[0], after[1].sqrt()
        else:
            moment, root = rest[:2]
        x = _rounded(x * numbers.keep, x) + numbers.size * moment / (root / numbers.root + numbers.eps)
        bits = x.view(torch.int32)
        write_bytes(bits, low, middle, high, codes)
        return (bits & MAGNITUDE).amax()

    return apply

"""`Advice`: the estimates of all configurations, and the one to take, with the reason."""

import dataclasses
from collections.abc import Sequence

from fp8_common.advise._choices import CHOICES, Choice
from fp8_common.advise._estimate import Estimate, Job, estimate

WORTH, SAME = 1.05, 0.02
"""Speed-up from which FP8 is recommended; and the share of time within which the simpler of two configurations is."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What `advise` returns.

    Attributes:
        estimates: Of every configuration, in the order given; the first is what speed-ups are measured against.
        best: The configuration to take.
        reason: Why, in one or two sentences.
    """

    estimates: tuple[Estimate, ...]
    best: Estimate
    reason: str

    @property
    def best_bf16(self) -> Estimate:
        """The fastest estimate without FP8: with bf16 matmuls, gathers and no codes of gradients."""
        wide = [one for one in self.estimates if one.choice.is_wide]
        return min(wide, key=lambda one: one.seconds, default=self.estimates[0])

    def speed_up(self, one: Estimate) -> float:
        """Return how many times faster than the first configuration one is."""
        return self.estimates[0].seconds / one.seconds


def advise(job: Job, choices: Sequence[Choice] = CHOICES) -> Advice:
    """Estimate every configuration and recommend one.

    Args:
        job: What is trained where.
        choices: The configurations, from the simplest to the one that changes most; the first is the comparison.

    Raises:
        Fp8Error: bf16 was measured to be faster than the model says.
    """
    estimates = tuple(estimate(job, choice) for choice in choices)
    base, fastest = estimates[0], min(estimates, key=lambda one: one.seconds)
    best = next(one for one in estimates if one.seconds <= fastest.seconds * (1 + SAME))
    if base.seconds < WORTH * best.seconds:
        reason = (
            f"Nothing is {100 * (WORTH - 1):.0f} % faster than {base.choice.name}: matmuls take "
            f"{_share(base.products, base)} of its step, communication that nothing hides {_share(base.exposed, base)}."
        )
        return Advice(estimates=estimates, best=base, reason=reason)
    advice = Advice(estimates=estimates, best=best, reason="")
    wide = advice.best_bf16
    over = f" ({wide.seconds / best.seconds:.2f}x over {wide.choice.name})" if wide is not base else ""
    reason = (
        f"{base.seconds / best.seconds:.2f}x over {base.choice.name}{over}: matmuls "
        f"{_milliseconds(base.products, best.products)}, exposed communication "
        f"{_milliseconds(base.exposed, best.exposed)}, casts {1e3 * best.casts:.0f} ms more."
    )
    if best.seconds > 1.0005 * fastest.seconds:
        reason += f" {fastest.choice.name} would be {100 * (best.seconds / fastest.seconds - 1):.1f} % faster."
    return dataclasses.replace(advice, reason=reason)


def _share(part: float, whole: Estimate) -> str:
    return f"{part / whole.seconds:.0%}"


def _milliseconds(before: float, after: float) -> str:
    return f"{1e3 * before:.0f} -> {1e3 * after:.0f} ms"

"""Intervals of differences between recipes: log loss = seed + recipe + residual, one residual for a comparison.

All runs of a comparison estimate the residual together, so its t distribution has (recipes - 1) * (seeds - 1) degrees
of freedom instead of seeds - 1. Several controls of a seed, which differ by their first bits alone, are averaged: the
mean has the weight of their number. Differences are 100 times those of log losses, percent as long as they are small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import ncf, t

CONTROL, TWIN = "bf16", ", twin "
LEVEL = 0.95
Losses = Mapping[str, Mapping[int, float]]
"""Final loss by recipe and seed; infinite where a run diverged. Names of further controls end with ", twin N"."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A difference of log losses.

    Attributes:
        mean: Percent.
        error: Its standard error, percent.
        freedom: Degrees of freedom of the residual.
    """

    mean: float
    error: float
    freedom: int

    def half(self, comparisons: int = 1) -> float:
        """Return half of the 95 % interval; with `comparisons` intervals, all of them hold at once (Šidák)."""
        return quantile(self.freedom, comparisons) * self.error


def quantile(freedom: int, comparisons: int = 1) -> float:
    """Return how many standard errors a two-sided interval reaches; infinite without degrees of freedom."""
    return float(t.ppf((1 + LEVEL ** (1 / comparisons)) / 2, freedom)) if freedom > 0 else float("inf")


class Fit:
    """The two-way model, fitted to the seeds whose control ended well; recipes that diverged are left out.

    Args:
        losses: What is compared.

    Attributes:
        names: Recipes that are in the model.
        seeds: Number of seeds.
        controls: Mean number of controls of a seed.
        residual: Standard deviation of the residual of one run, percent.
        freedom: Its degrees of freedom.
    """

    def __init__(self, losses: Losses) -> None:
        diverged = {name for name, of in losses.items() if float("inf") in of.values()} - {CONTROL}
        cells: dict[tuple[str, int], list[float]] = {}
        for name, of in losses.items():
            for seed, loss in of.items():
                if name not in diverged and losses.get(CONTROL, {}).get(seed, float("inf")) < float("inf"):
                    cells.setdefault((name.partition(TWIN)[0], seed), []).append(100 * float(np.log(loss)))
        self.names = list(dict.fromkeys(name for name, _ in cells))
        seeds = sorted({seed for _, seed in cells})
        self.seeds = len(seeds)
        controls = [len(cells[CONTROL, seed]) for seed in seeds]
        self.controls = sum(controls) / max(1, len(controls))
        design = np.zeros((len(cells), len(seeds) + len(self.names)))
        for row, (name, seed) in enumerate(cells):
            design[row, seeds.index(seed)] = design[row, len(seeds) + self.names.index(name)] = 1
        weights = np.sqrt([len(values) for values in cells.values()])
        values = np.array([np.mean(values) for values in cells.values()])
        self._weighted = design * weights[:, None]
        inverse = np.linalg.pinv(self._weighted)
        self._effects = inverse @ (values * weights)
        self._covariance = inverse @ inverse.T
        rest = values * weights - self._weighted @ self._effects
        self.freedom = len(cells) - len(seeds) - len(self.names) + 1 if cells else 0
        self.residual = float(np.sqrt(rest @ rest / self.freedom)) if self.freedom > 0 else float("nan")

    def above(self, recipes: Sequence[str]) -> Estimate:
        """Return how far recipes, on average, end above the control."""
        contrast = np.zeros(len(self._effects))
        offset = self.seeds
        for name in recipes:
            contrast[offset + self.names.index(name)] += 1 / len(recipes)
        contrast[offset + self.names.index(CONTROL)] -= 1
        error = self.residual * float(np.sqrt(contrast @ self._covariance @ contrast))
        return Estimate(float(contrast @ self._effects), error, self.freedom)

    def seeds_for(self, width: float, comparisons: int = 1) -> int:
        """Return the number of seeds with which half of a recipe's interval is at most `width` percent."""
        return seeds_for(width, self.residual, len(self.names), self.controls, comparisons)


def seeds_for(width: float, residual: float, recipes: int, controls: float = 1, comparisons: int = 1) -> int:
    """Return the number of seeds with which half of a recipe's interval is at most `width`.

    Args:
        width: Percent.
        residual: Standard deviation of the residual, percent.
        recipes: Number of recipes, the control among them.
        controls: Controls of a seed.
        comparisons: Number of intervals that hold at once.
    """
    error = residual * (1 + 1 / controls) ** 0.5

    def wide(seeds: int) -> bool:
        return quantile((recipes - 1) * (seeds - 1), comparisons) * error / seeds**0.5 > width

    high = 2
    while wide(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if wide(middle) else (low, middle)
    return high


def power(effect: float, estimate: Estimate, comparisons: int = 1) -> float:
    """Return the probability that an interval as wide as the estimate's excludes 0 if `effect` is the difference."""
    # by F, which is t squared: SciPy's noncentral t is NaN for some large effects
    reach, shift = quantile(estimate.freedom, comparisons), effect / estimate.error
    return float(ncf.sf(reach**2, 1, estimate.freedom, max(shift**2, 1e-9)))  # which it does not take as 0

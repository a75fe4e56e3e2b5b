"""Optimizers of optax for variables with overwritten leaves."""

from fp8_jax_owg.optax._bypass import bypass_owg
from fp8_jax_owg.optax._multi_steps import MultiSteps, MultiStepsState

__all__ = ["MultiSteps", "MultiStepsState", "bypass_owg"]

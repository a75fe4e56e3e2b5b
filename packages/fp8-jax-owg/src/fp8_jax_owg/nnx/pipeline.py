"""Pipelines of an NNX module: copies of a stage with stacked variables.

Which variables are overwritten with their gradient, their type tells: `OverwriteWithGradient`.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from fp8_jax_owg.pipeline import PipelineOptions, Schedule, pipeline, refuse_changes


class LayerwiseShardablePipelined(nnx.Module):
    """Runs microbatches through `num_stages` copies of a module, each with variables of its own.

    The result equals running each microbatch through one copy after the other. A stage that changes variables when it
    is called (batch statistics, counters of random numbers, sown values) is refused: microbatches of several stages
    run at once, in an order of their own.

    Attributes:
        stages: The module, with variables [num_stages, ...], or [circular_repeat, num_stages, ...].
    """

    def __init__(
        self,
        make_stage: Callable[[nnx.Rngs], nnx.Module],
        num_stages: int,
        num_microbatches: int,
        *,
        rngs: nnx.Rngs,
        circular_repeat: int = 1,
        options: PipelineOptions | None = None,
    ) -> None:
        """Make the stages.

        Args:
            make_stage: Returns one stage; called with activations, it returns activations of the same shapes.
            num_stages: Number of stages.
            num_microbatches: Number of microbatches.
            rngs: For the initializers; every stage draws its own.
            circular_repeat: How often a microbatch goes through all stages, with other variables in each round.
            options: How stages run.

        Raises:
            Fp8Error: A number is below 1.
        """
        self.schedule = Schedule(stages=num_stages, microbatches=num_microbatches, rounds=circular_repeat)
        self.options = options or PipelineOptions()
        make = _stack(make_stage, num_stages)
        self.stages = (_stack(make, circular_repeat) if circular_repeat > 1 else make)(rngs)

    def __call__(self, x: Any) -> Any:
        """Return what the last stage returns.

        Args:
            x: Activations, a tree with leaves [num_microbatches, ...].

        Raises:
            Fp8Error: The leading length is another.
            Fp8UnsupportedError: The stage changes variables.
        """
        graph, state = nnx.split(self.stages)

        def stage(state: Any, h: Any, key: jax.Array | None) -> Any:
            before = set(map(id, jax.tree.leaves(state)))
            module = nnx.merge(graph, state)
            out = module(h)
            refuse_changes(before, nnx.state(module))
            return out

        return pipeline(stage, state, x, self.schedule, self.options)


def _stack(make: Callable[[nnx.Rngs], nnx.Module], size: int) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(size))

"""Pipelines of an NNX module: copies of a stage with stacked variables.

Overwritten variables are recognized by their type: `OverwriteWithGradient`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from fp8_jax_owg.pipeline import PipelineOptions, Schedule, batch_of, divide, pipeline, refuse_changes


class LayerwiseShardablePipelined(nnx.Module):
    """Runs microbatches through `num_stages` copies of a module, with separate variables.

    The result equals running each microbatch through one copy after the other. A stage that changes variables when it
    is called (batch statistics, counters of random numbers, sown values) raises: microbatches of several stages run
    concurrently, in another order.

    Attributes:
        stages: The module, with variables [num_stages, ...], or [circular_repeat, num_stages, ...].
    """

    def __init__(
        self,
        make_stage: Callable[[nnx.Rngs], nnx.Module],
        num_stages: int,
        num_microbatches: int | None = None,
        *,
        rngs: nnx.Rngs,
        circular_repeat: int = 1,
        options: PipelineOptions | None = None,
        microbatch_size: int | None = None,
    ) -> None:
        """Make the stages.

        Args:
            make_stage: Returns one stage; called with activations and broadcast inputs, it returns activations of the
                same shapes and dtypes.
            num_stages: Number of stages.
            num_microbatches: Number of microbatches. Inputs with this leading length are divided already; a batch of
                another length is divided into this number. None takes the leading length of inputs that are divided.
            rngs: For the initializers; every stage draws its own.
            circular_repeat: How often a microbatch goes through all stages, with other variables in each round.
            options: How stages run.
            microbatch_size: Rows of a microbatch: inputs are batches, and are divided.

        Raises:
            Fp8Error: A number is below 1.
        """
        number = 1 if num_microbatches is None else num_microbatches
        self.schedule = Schedule(stages=num_stages, microbatches=number, rounds=circular_repeat)
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        self.options = options or PipelineOptions()
        make = _stack(make_stage, num_stages)
        self.stages = (_stack(make, circular_repeat) if circular_repeat > 1 else make)(rngs)

    def __call__(self, x: Any, *broadcast_inputs: Any, **broadcast_kwargs: Any) -> Any:
        """Return the last stage's outputs, divided into microbatches if `x` is.

        Args:
            x: Activations, a tree with leaves [num_microbatches, ...] or [batch, ...].
            *broadcast_inputs: Further inputs of every stage, divided like `x`: masks, segment ids, paddings. A stage
                gets its microbatch's. Scalars and Python values are the same for all.
            **broadcast_kwargs: The same by name.

        Raises:
            Fp8Error: Shapes do not fit.
            Fp8UnsupportedError: The stage changes variables.
        """
        batch = batch_of(x, self.num_microbatches, self.microbatch_size)
        schedule = dataclasses.replace(self.schedule, microbatches=batch.microbatches)
        arrays, rebuild = divide((broadcast_inputs, broadcast_kwargs))
        graph, state = nnx.split(self.stages)

        def stage(state: Any, h: Any, key: jax.Array | None, arrays: list[Any]) -> Any:
            before = set(map(id, jax.tree.leaves(state)))
            module = nnx.merge(graph, state)
            args, kwargs = rebuild(arrays)
            out = module(h, *args, **kwargs)
            refuse_changes(before, nnx.state(module))
            return out

        x, arrays = batch.split(x, "Activations"), batch.split(arrays, "Broadcast inputs")
        return batch.join(pipeline(stage, state, x, schedule, self.options, broadcast=(arrays,)))


def _stack(make: Callable[[nnx.Rngs], nnx.Module], size: int) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(size))

"""Pipelines of an NNX module: copies of a stage with stacked variables.

Overwritten variables are recognized by their type, `OverwriteWithGradient`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from fp8_jax_owg.pipeline import PipelineOptions, Schedule, batch_of, divide, pipeline, refuse_changes


class LayerwiseShardablePipelined(nnx.Module):
    """Pipeline of `num_stages` copies of a module, with separate variables.

    The result is the same as running each microbatch through one copy after the other. A stage that changes variables
    when it is called (batch statistics, counters of random numbers, sown values) raises, because several stages run
    concurrently, on different microbatches.

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
        """Create the stages.

        Args:
            make_stage: Function that returns one stage. A stage, called with activations and broadcast inputs, returns
                activations of the same shapes and dtypes.
            num_stages: Number of stages.
            num_microbatches: Number of microbatches. Inputs with this leading length are divided already; a batch of
                another length is divided into this number. None: inputs are divided already, and their leading length
                is the number.
            rngs: Random numbers for the initializers; each stage draws separate ones.
            circular_repeat: Number of times that a microbatch passes all stages, with separate variables each time.
            options: Settings of the execution.
            microbatch_size: Rows of a microbatch, instead of `num_microbatches`: inputs are batches, and are divided.

        Raises:
            Fp8Error: If a number of stages, microbatches or rounds is below 1.
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
                gets the part of its microbatch. Scalars and Python values are the same for all microbatches.
            **broadcast_kwargs: The same, by name.

        Raises:
            Fp8Error: If the shapes do not match.
            Fp8UnsupportedError: If the stage changes variables.
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

"""Pipelines of a Linen module: its variables get a stage axis, `apply` keeps its signature.

Which variables are overwritten with their gradient, their collection or their names tell, or `value_and_grad` has
shared them already.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from fp8_jax_owg.gradients import refuse_layers_of_flax
from fp8_jax_owg.pipeline import PipelineOptions, Schedule, pipeline, refuse_changes
from fp8_jax_owg.state.pairs import COLLECTION

STAGE, ROUND = "stage", "round"
"""Names of the added axes in the metadata of partitioned parameters."""


class LayerwiseShardablePipelined(nn.Module):
    """Runs microbatches through `num_stages` copies of a module, each with variables of its own.

    The result equals running each microbatch through one copy after the other. Variables of the body get a leading
    axis [num_stages, ...]; shard it over devices to pipeline. A body that would change variables (batch statistics)
    or sow values is refused: microbatches of several stages run at once, in an order of their own.

    Attributes:
        body: One stage; called with activations, returns activations of the same shapes and dtypes.
        num_stages: Number of stages.
        num_microbatches: Number of microbatches.
        circular_repeat: How often a microbatch goes through all stages, with other variables in each round: from 2 on
            variables get leading axes [circular_repeat, num_stages, ...], and bubbles shrink by that number.
        remat: Recompute activations of stages in the backward.
        remat_policy: What to keep nevertheless, one of `jax.checkpoint_policies`.
        stage_axis: Mesh axis that stages are sharded over; None leaves it to the compiler.
        rng_collections: Random numbers the body draws when applied.
    """

    body: nn.Module
    num_stages: int
    num_microbatches: int
    circular_repeat: int = 1
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    stage_axis: str | None = None
    rng_collections: Sequence[str] = ("dropout",)

    @property
    def schedule(self) -> Schedule:
        """The numbers, checked."""
        return Schedule(stages=self.num_stages, microbatches=self.num_microbatches, rounds=self.circular_repeat)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return what the last stage returns.

        Args:
            x: Activations, a tree with leaves [num_microbatches, ...].

        Raises:
            Fp8Error: The leading length is another, variables are missing, or layers of flax compute in FP8.
            Fp8UnsupportedError: The body would change variables, or sow values that were asked for.
        """
        schedule = self.schedule
        if self.is_initializing():
            self._make_variables(jax.tree.map(lambda h: h[0], x), schedule)
        return self._run(x, schedule)

    def _make_variables(self, one: Any, schedule: Schedule) -> None:
        run = _add_axis(lambda module, h: module(h), STAGE)
        shape: tuple[int, ...] = (schedule.stages,)
        if schedule.rounds > 1:
            run, shape = _add_axis(run, ROUND), (schedule.rounds, *shape)
        run(self.body, jax.tree.map(lambda h: jnp.broadcast_to(h, (*shape, *jnp.shape(h))), one))

    def _run(self, x: Any, schedule: Schedule) -> Any:
        body, variables = self.body.unbind()
        axes = (ROUND, STAGE) if schedule.rounds > 1 else (STAGE,)
        for name in axes:
            # The stage sees its variables without the added axes, so their partitioning must not name these.
            variables = meta.remove_axis(variables, 0, {nn.PARTITION_NAME: name})
        drawn = [name for name in self.rng_collections if self.has_rng(name)]
        key = self.make_rng(drawn[0]) if drawn else None
        # those that it reads only are not; "intermediates" comes into being when a module is applied
        kinds = {*variables, "intermediates"} - {"params", COLLECTION}
        changing = [name for name in kinds if self.is_mutable_collection(name)]

        def stage(variables: Mapping[str, Any], h: Any, key: jax.Array | None) -> Any:
            rngs = {} if key is None else dict(zip(drawn, jax.random.split(key, len(drawn)), strict=True))
            out, after = body.apply(variables, h, rngs=rngs, mutable=changing)
            refuse_changes(set(map(id, jax.tree.leaves(variables))), after)
            return out

        options = PipelineOptions(remat=self.remat, policy=self.remat_policy, stage_axis=self.stage_axis)
        try:
            return pipeline(stage, variables, x, schedule, options, key=key)
        except Exception as error:
            refuse_layers_of_flax(error)
            raise


def _add_axis(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    return nn.vmap(
        run,
        in_axes=0,
        out_axes=0,
        variable_axes={True: 0},
        split_rngs={True: True},
        metadata_params={nn.PARTITION_NAME: name},
    )

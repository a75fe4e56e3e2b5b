"""Pipelines of Linen modules: copies of a stage with stacked variables.

Overwritten variables are recognized by their collection or their names, or because `value_and_grad` has shared them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.core.scope import subtract_filters

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_jax_owg.differentiate import refuse_layers_of_flax
from fp8_jax_owg.pipeline import PipelineOptions, Schedule, batch_of, divide, pipeline, refuse_changes
from fp8_jax_owg.state.pairs import COLLECTION

STAGE, ROUND = "stage", "round"
"""Names of the added axes in the metadata of partitioned parameters."""


PRAXIS = {
    "checkpoint_policy": "use remat and remat_policy",
    "weight_split_dims_mapping": "use stage_axis",
    "unpack_summaries": "values of sown_collections have the axes [num_stages, num_microbatches, ...]",
    "collect_intermediate_outputs": "values of sown_collections have the axes [num_stages, num_microbatches, ...]",
    "pipeline_broadcast_inputs": "make these inputs a part of the activations",
    "optimizer_dims_mapping": "read the names of the added axes from the metadata of parameters",
    "stream_io": "inputs and outputs stay where the compiler puts them",
    "polluting_bubbles_with_nan": "stages without work compute on a constant",
    "share_weights": "each round has separate variables",
    "enable_async_circular_transfer": "the compiler schedules transfers",
}
"""Options of praxis's pipelines that this pipeline lacks, and their replacements."""


class LayerwiseShardablePipelined(nn.Module):
    """Pipeline of `num_stages` copies of a module, with separate variables.

    The result is the same as running each microbatch through one copy after the other. Variables of the body get a
    leading axis [num_stages, ...]; shard it over devices to pipeline. A body that changes variables (batch statistics)
    raises, because several stages run concurrently, on different microbatches.

    Attributes:
        body: One stage. Called with activations and broadcast inputs, it returns activations of the same shapes and
            dtypes.
        num_stages: Number of stages.
        num_microbatches: Number of microbatches. Inputs with this leading length are divided already; a batch of
            another length is divided into this number. None: inputs are divided already, and their leading length is
            the number.
        circular_repeat: Number of times that a microbatch passes all stages, with separate variables each time. From 2
            on, variables get leading axes [circular_repeat, num_stages, ...], and bubbles shrink by this factor.
        remat: Whether to recompute activations of stages in the backward.
        remat_policy: Values to save nevertheless, one of `jax.checkpoint_policies`; implies `remat`.
        stage_axis: Mesh axis over which stages are sharded; None leaves it to the compiler.
        rng_collections: Names of the random numbers that the body draws in `apply`.
        microbatch_size: Rows of a microbatch, instead of `num_microbatches`: inputs are batches, and are divided.
        sown_collections: Collections into which the body may sow, such as the losses of a router. If `mutable` of
            `apply` names one, its values have leading axes [num_stages, num_microbatches, ...], or [circular_repeat,
            num_stages, num_microbatches, ...]. They begin empty in each call, and `init` creates none.
        bf16_accum_in_fp32: Whether to add the gradients of bfloat16 parameters over microbatches in float32.
        single_stage_body: Alternative to `body`, under its name in praxis.
    """

    body: nn.Module | None = None
    num_stages: int = 1
    num_microbatches: int | None = None
    circular_repeat: int = 1
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    stage_axis: str | None = None
    rng_collections: Sequence[str] = ("dropout",)
    microbatch_size: int | None = None
    sown_collections: Sequence[str] = ("intermediates", "losses", "aux_loss")
    bf16_accum_in_fp32: bool = False
    single_stage_body: nn.Module | None = None

    def __post_init__(self) -> None:
        """Accept the body under either name."""
        if (self.body is None) == (self.single_stage_body is None):
            raise Fp8Error("A pipeline needs one module as body, or as single_stage_body.")
        # Set before `super().__post_init__()`, after which flax freezes attributes.
        if self.body is None:
            self.body, self.single_stage_body = self.single_stage_body, None
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Any, *broadcast_inputs: Any, **broadcast_kwargs: Any) -> Any:
        """Return the last stage's outputs, divided into microbatches if `x` is.

        Args:
            x: Activations, a tree with leaves [num_microbatches, ...] or [batch, ...].
            *broadcast_inputs: Further inputs of every stage, divided like `x`: masks, segment ids, paddings. A stage
                gets the part of its microbatch. Scalars and Python values are the same for all microbatches.
            **broadcast_kwargs: The same, by name.

        Raises:
            Fp8Error: If the shapes do not match, the FP8 state is missing, or flax's own FP8 operations read the state.
            Fp8UnsupportedError: If the body changes variables.
        """
        batch = batch_of(x, self.num_microbatches, self.microbatch_size)
        schedule = Schedule(stages=self.num_stages, microbatches=batch.microbatches, rounds=self.circular_repeat)
        arrays, rebuild = divide((broadcast_inputs, broadcast_kwargs))
        x, arrays = batch.split(x, "Activations"), batch.split(arrays, "Broadcast inputs")
        if self.is_initializing():
            example = jax.tree.map(lambda h: h[0], (x, arrays))
            self._make_variables(example[0], rebuild(example[1]), schedule)
        return batch.join(self._run(x, arrays, rebuild, schedule))

    def _make_variables(self, microbatch: Any, broadcast: Any, schedule: Schedule) -> None:
        args, kwargs = broadcast
        run = self._add_axis(lambda module, h: module(h, *args, **kwargs), STAGE)
        shape: tuple[int, ...] = (schedule.stages,)
        if schedule.rounds > 1:
            run, shape = self._add_axis(run, ROUND), (schedule.rounds, *shape)
        run(self.body, jax.tree.map(lambda h: jnp.broadcast_to(h, (*shape, *jnp.shape(h))), microbatch))

    def _add_axis(self, run: Callable[..., Any], name: str) -> Callable[..., Any]:
        return nn.vmap(
            run,
            in_axes=0,
            out_axes=0,
            variable_axes={nn.DenyList(tuple(self.sown_collections)): 0},
            split_rngs={True: True},
            metadata_params={nn.PARTITION_NAME: name},
        )

    def _run(self, x: Any, arrays: list[Any], rebuild: Callable[..., Any], schedule: Schedule) -> Any:
        bound: Any = self.body
        scope: Any = self.scope
        body, variables = bound.unbind()
        variables = {name: tree for name, tree in variables.items() if name not in self.sown_collections}
        axes = (ROUND, STAGE) if schedule.rounds > 1 else (STAGE,)
        for name in axes:
            # A stage sees its variables without the added axes, so their partitioning must not name these axes.
            variables = meta.remove_axis(variables, 0, {nn.PARTITION_NAME: name})
        drawn = [name for name in self.rng_collections if self.has_rng(name)]
        key = self.make_rng(drawn[0]) if drawn else None
        # Other mutable collections are mutable in a stage as well, so that changes raise and are not dropped.
        fixed = ["params", COLLECTION, *(self.sown_collections if self.is_initializing() else ())]
        mutable = subtract_filters(scope.mutable, fixed)

        def stage(variables: Mapping[str, Any], h: Any, key: jax.Array | None, arrays: list[Any]) -> Any:
            rngs = {} if key is None else dict(zip(drawn, jax.random.split(key, len(drawn)), strict=True))
            args, kwargs = rebuild(arrays)
            out, after = body.apply(variables, h, *args, **kwargs, rngs=rngs, mutable=mutable)
            sown = {name: after[name] for name in after if name in self.sown_collections}
            others = {name: after[name] for name in after if name not in sown}
            refuse_changes(set(map(id, jax.tree.leaves(variables))), others)
            return out, sown

        options = PipelineOptions(
            remat=self.remat,
            policy=self.remat_policy,
            stage_axis=self.stage_axis,
            bf16_accum_in_fp32=self.bf16_accum_in_fp32,
        )
        try:
            y, sown = pipeline(stage, variables, x, schedule, options, key=key, broadcast=(arrays,), sows=True)
        except Exception as error:
            refuse_layers_of_flax(error)
            raise
        for name, tree in sown.items():
            self.put_variable(name, bound.name, tree)
        return y


# A dataclass raises a TypeError for an unknown option, without a remedy.
def _refusing_options_of_praxis(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in PRAXIS.keys() & kwargs.keys():
            raise Fp8UnsupportedError(f"This pipeline has no option {name!r} of praxis: {PRAXIS[name]}.")
        init(self, *args, **kwargs)

    return run


LayerwiseShardablePipelined.__init__ = _refusing_options_of_praxis(LayerwiseShardablePipelined.__init__)

"""Pipelines of stacked stages: vmap over stages, scan over time.

Compilers turn `vmap` over a sharded stage axis into stages on separate devices, and the roll into a permutation between
neighbors (Xu et al., GSPMD, arXiv:2105.04663, section 3.3). In a circular pipeline each stage holds several groups of
layers, and a microbatch passes all stages several times (rounds).

At time t, stage s works on item w = t - s: microbatch w % P in round w // P, where P is `Schedule.period`. Without such
an item, in a bubble, the stage computes on a constant. Observations of bubbles are dropped by `gate`, and so are their
gradients of parameters, even if they are NaN. Overwritten leaves are shared once, outside of the scan.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_jax_owg.dots.operands import refuse_explicit_axes
from fp8_jax_owg.state.cotangents import is_shared, share_leaf
from fp8_jax_owg.state.pairs import owg_flags
from fp8_jax_owg.state.share import gate, share, unshare

BUBBLE = 0.0
"""Value of the inputs of stages without work."""
Stage = Callable[..., Any]
"""Function `stage(variables, activations, key, *broadcast)` that returns activations of the same shapes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Schedule of a pipeline: the item of each stage at each time.

    Attributes:
        stages: Number of stages.
        microbatches: Number of microbatches.
        rounds: Number of times that a microbatch passes all stages.
    """

    stages: int
    microbatches: int
    rounds: int = 1

    def __post_init__(self) -> None:
        """Validate the fields."""
        for name in ("stages", "microbatches", "rounds"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise Fp8Error(f"{name} of a pipeline must be an integer from 1 on, got {number!r}.")

    @property
    def period(self) -> int:
        """Time between rounds of a microbatch; with one round, the microbatch count."""
        return self.microbatches if self.rounds == 1 else max(self.microbatches, self.stages)

    @property
    def iterations(self) -> int:
        """Length of the scan."""
        return self.period * self.rounds + self.stages - 1

    def work(self, time: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return whether each stage has work, its round, and its item.

        Args:
            time: Integer scalar.

        Returns:
            Three arrays [stages]: booleans, rounds from 0 to `rounds - 1`, and item numbers.
        """
        item = time - jnp.arange(self.stages)
        in_time = (item >= 0) & (item < self.period * self.rounds)
        valid = in_time & (item % self.period < self.microbatches)
        return valid, jnp.clip(item // self.period, 0, self.rounds - 1), item


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """Settings of the stages' execution.

    Attributes:
        remat: Whether to recompute activations of stages in the backward.
        policy: Values to save nevertheless, one of `jax.checkpoint_policies`; implies `remat`.
        stage_axis: Mesh axis over which stages are sharded; None leaves it to the compiler.
        bf16_accum_in_fp32: Whether to add the gradients of bfloat16 parameters over microbatches in float32.
    """

    remat: bool = False
    policy: Callable[..., bool] | None = None
    stage_axis: str | None = None
    bf16_accum_in_fp32: bool = False


class Batch(NamedTuple):
    """Division of a pipeline's inputs into microbatches.

    Attributes:
        microbatches: Number of microbatches.
        is_split: Whether inputs have the shapes [microbatches, ...] already, instead of [batch, ...].
    """

    microbatches: int
    is_split: bool

    def split(self, tree: Any, what: str) -> Any:
        """Divide inputs into microbatches.

        If the inputs are a batch, microbatch m has the rows m, m + microbatches, m + 2 * microbatches and so on.

        Args:
            tree: Inputs, leaves [batch, ...], or [microbatches, ...] if `is_split`.
            what: Name of the inputs in errors.

        Returns:
            A tree with leaves [microbatches, rows, ...]; `tree` itself if `is_split`.

        Raises:
            Fp8Error: If leaves have another leading length, or a batch does not divide into this number.
        """
        if self.is_split:
            _check_leading(tree, (self.microbatches,), what, "[microbatches, ...]")
            return tree
        for leaf in jax.tree.leaves(tree):
            if jnp.ndim(leaf) == 0 or leaf.shape[0] % self.microbatches:
                raise Fp8Error(
                    f"{what} of this pipeline must have shapes [batch, ...] with a batch that divides into "
                    f"{self.microbatches} microbatches, got {jnp.shape(leaf)}."
                )
        # Rows of a microbatch are strided: otherwise a sharded batch would shard the axis of microbatches.
        return jax.tree.map(lambda x: x.reshape(-1, self.microbatches, *x.shape[1:]).swapaxes(0, 1), tree)

    def join(self, tree: Any) -> Any:
        """Return results in the shape of the inputs: undo `split`."""
        return tree if self.is_split else jax.tree.map(lambda y: y.swapaxes(0, 1).reshape(-1, *y.shape[2:]), tree)


def batch_of(x: Any, microbatches: int | None, size: int | None) -> Batch:
    """Return the division of a pipeline's inputs.

    Without `microbatches` and `size`, inputs are divided already.

    Args:
        x: Activations.
        microbatches: Number of microbatches. Inputs of another leading length are batches.
        size: Rows of a microbatch; inputs are batches.

    Raises:
        Fp8Error: If there are no activations, or the numbers do not divide the batch.
    """
    shapes = list(map(jnp.shape, jax.tree.leaves(x)))
    if not shapes or not shapes[0]:
        raise Fp8Error("A pipeline needs activations with shapes [microbatches, ...] or [batch, ...].")
    length = shapes[0][0]
    if size is None:
        known = length if microbatches is None else microbatches
        return Batch(known, type(known) is not int or known < 1 or length == known or length % known != 0)
    if type(size) is not int or size < 1 or length % size or microbatches not in (None, length // size):
        raise Fp8Error(
            f"A batch of {length} does not divide into microbatches with microbatch_size={size!r} and "
            f"num_microbatches={microbatches!r}. Pass one of the two, a divisor of the batch."
        )
    return Batch(length // size, False)


def divide(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Split off the arrays of broadcast inputs that have a leading axis.

    Scalars and Python values are the same for all microbatches, and need not be arrays.

    Returns:
        The arrays, and a function that returns `tree` with other arrays instead.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if getattr(leaf, "ndim", 0) > 0]

    def rebuild(arrays: Sequence[Any]) -> Any:
        replaced = dict(zip(places, arrays, strict=True))
        return structure.unflatten([replaced.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], rebuild


def pipeline(
    stage: Stage,
    variables: Any,
    x: Any,
    schedule: Schedule,
    options: PipelineOptions | None = None,
    *,
    key: jax.Array | None = None,
    broadcast: Sequence[Any] = (),
    sows: bool = False,
) -> Any:
    """Run microbatches through stages; equal to running them one after the other.

    Args:
        stage: Function of one stage.
        variables: Tree with leaves [stages, ...], or [rounds, stages, ...] for several rounds. State is recognized as
            in `value_and_grad`, or shared already.
        x: Tree of activations, leaves [microbatches, ...].
        schedule: Numbers of stages, microbatches and rounds.
        options: Settings of the execution.
        key: Random key, for stages that need random numbers. Each stage, microbatch and round gets a separate key.
        broadcast: Further inputs of every stage, leaves [microbatches, ...]. A stage gets the part of its microbatch.
        sows: Whether stages return (activations, anything).

    Returns:
        Outputs of the last stage in the last round, leaves [microbatches, ...]. With `sows` also the other outputs of
        each stage for each microbatch, leaves [stages, microbatches, ...] or [rounds, stages, microbatches, ...].

    Raises:
        Fp8Error: If a leaf of `x` or `variables` has another leading length, or a stage returns other shapes or dtypes.
        Fp8UnsupportedError: If an array is sharded over an explicit mesh axis.
    """
    options = options or PipelineOptions()
    _check_leading(x, (schedule.microbatches,), "Activations", "[microbatches, ...]")
    lead = (schedule.stages,) if schedule.rounds == 1 else (schedule.rounds, schedule.stages)
    _check_leading(variables, lead, "Variables", "[stages, ...]" if len(lead) == 1 else "[rounds, stages, ...]")
    refuse_explicit_axes("A pipeline", (x, variables, broadcast))
    leaves, structure = jax.tree.flatten(variables)
    flags = [flag or is_shared(x) for flag, x in zip(owg_flags(variables), leaves, strict=True)]
    # State is shared in a tree with its names, which identify pairs, and with None at parameters.
    named = structure.unflatten([leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)])
    state = jax.tree.leaves(share(named))
    parameters = [leaf for leaf, flag in zip(leaves, flags, strict=True) if not flag]
    dtypes = [jnp.result_type(p) for p in parameters]
    if options.bf16_accum_in_fp32:
        # Stages cast the parameters back, so that the loop adds up float32 gradients.
        parameters = [p.astype(jnp.float32) if jnp.result_type(p) == jnp.bfloat16 else p for p in parameters]
    run = _vmapped_stage(stage, structure, flags, [is_shared(x) and x.dtype for x in state], dtypes, options)

    def iteration(carry: tuple[Any, Any], time: jax.Array) -> tuple[tuple[Any, Any], Any]:
        activations, stored = carry
        valid, rounds, items = schedule.work(time)
        # The roll has moved the last stage's result to the first: the new input replaces it.
        activations = jax.tree.map(lambda h, first: h.at[0].set(first), activations, _first(x, stored, time, schedule))
        activations = jax.tree.map(functools.partial(_fill, valid=valid), activations)
        entering = (
            [_choose(leaf, rounds, schedule) for leaf in unshare(state)],
            [_choose(p, rounds, schedule) for p in parameters],
        )
        numbers = jnp.clip(items % schedule.period, 0, schedule.microbatches - 1)
        each = [jax.tree.map(functools.partial(_at, numbers=numbers), tree) for tree in broadcast]
        activations, each = _constrain((activations, each), options.stage_axis)
        out = run(*entering, activations, valid, _keys(key, items), each)
        out, sown = out if sows else (out, None)
        _check_result(activations, out)
        last = jax.tree.map(lambda h: h[-1], out)
        return (jax.tree.map(lambda h: jnp.roll(h, 1, axis=0), out), _store(stored, last, time, schedule)), (last, sown)

    empty = _zeros(x, schedule.stages)
    stored = None if schedule.rounds == 1 else _zeros(x, schedule.period)
    _, (ys, sown) = lax.scan(iteration, (empty, stored), jnp.arange(schedule.iterations))
    # Earlier outputs of the last stage belong to bubbles and earlier rounds.
    start = schedule.period * (schedule.rounds - 1) + schedule.stages - 1
    y = jax.tree.map(lambda y: y[start : start + schedule.microbatches], ys)
    return (y, jax.tree.map(functools.partial(_of_items, schedule=schedule), sown)) if sows else y


def refuse_changes(before: set[int], after: Any) -> None:
    """Raise if a stage changed its variables.

    Args:
        before: Identities (`id`) of the stage's variables before its call.
        after: Variables after the call, or some of them.

    Raises:
        Fp8UnsupportedError: If a variable is another object or new.
    """
    leaves = jax.tree_util.tree_leaves_with_path(after)
    if changed := [jax.tree_util.keystr(path) for path, leaf in leaves if id(leaf) not in before]:
        raise Fp8UnsupportedError(
            f"A pipeline does not keep variables that its stages change or sow, here {', '.join(changed)}. Move the "
            "layer out of the stage, use a stateless one (LayerNorm), make it deterministic, or omit mutable= in "
            "apply. If a Linen stage sows it, name its collection in sown_collections."
        )


def _vmapped_stage(
    stage: Stage,
    structure: Any,
    flags: list[bool],
    shared: list[Any],
    dtypes: list[Any],
    options: PipelineOptions,
) -> Callable[..., Any]:
    """Return a function that runs all stages once, on leaves [stages, ...]."""

    def run(state: list[Any], parameters: list[Any], h: Any, valid: jax.Array, key: Any, each: Sequence[Any]) -> Any:
        # State is shared again in each stage, which may use it more than once.
        local_state = [
            share_leaf(gate(x, valid), dtype) if dtype else x for x, dtype in zip(state, shared, strict=True)
        ]
        gated = [_gate_parameter(p, valid).astype(dtype) for p, dtype in zip(parameters, dtypes, strict=True)]
        values = iter(local_state), iter(gated)
        variables = structure.unflatten([next(values[not flag]) for flag in flags])
        return stage(variables, h, key, *jax.tree.map(lambda leaf: _gate_parameter(leaf, valid), each))

    if options.remat or options.policy is not None:
        # The loop already keeps XLA from merging the recomputation with the forward, so barriers would only cost.
        run = jax.checkpoint(run, policy=options.policy, prevent_cse=False)
    return jax.vmap(run, spmd_axis_name=options.stage_axis)


def _zeros(x: Any, length: int) -> Any:
    return jax.tree.map(lambda h: jnp.zeros((length, *h.shape[1:]), h.dtype), x)


def _keys(key: jax.Array | None, items: jax.Array) -> jax.Array | None:
    """Return one key for each stage, which depends on its item."""
    if key is None:
        return None
    stages = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(items.size))
    # Items before the first are negative, and `fold_in` takes unsigned numbers; nothing uses their keys.
    return jax.vmap(jax.random.fold_in)(stages, jnp.maximum(items, 0))


def _first(x: Any, stored: Any, time: jax.Array, schedule: Schedule) -> Any:
    """Return the first stage's input.

    In the first round this is a microbatch, in later rounds a stored result of the last stage.
    """
    # A period may exceed the number of microbatches. After the last microbatch there is no item, and `_fill` replaces
    # this input.
    index = jnp.minimum(time % schedule.period, schedule.microbatches - 1)
    fresh = jax.tree.map(lambda h: lax.dynamic_index_in_dim(h, index, 0, keepdims=False), x)
    if stored is None:
        return fresh
    back = jax.tree.map(lambda h: lax.dynamic_index_in_dim(h, time % schedule.period, 0, keepdims=False), stored)
    return jax.tree.map(lambda a, b: jnp.where(time < schedule.period, a, b), fresh, back)


def _store(stored: Any, last: Any, time: jax.Array, schedule: Schedule) -> Any:
    """Store the last stage's output for its next round.

    Outputs of bubbles are overwritten before they are read.
    """
    if stored is None:
        return None
    # The current output of the last stage is item time - (stages - 1), which entered the first stage at that time. One
    # period after it entered, `_first` reads it at the same place.
    place = (time - (schedule.stages - 1)) % schedule.period
    return jax.tree.map(lambda s, h: lax.dynamic_update_index_in_dim(s, h, place, 0), stored, last)


def _choose(leaf: jax.Array, rounds: jax.Array, schedule: Schedule) -> jax.Array:
    """Select the variables of each stage's round.

    A leaf [rounds, stages, ...] becomes [stages, ...]; with one round, leaves have no axis of rounds.
    """
    if schedule.rounds == 1:
        return leaf
    return jax.vmap(lambda a, r: lax.dynamic_index_in_dim(a, r, 0, keepdims=False), in_axes=(1, 0))(leaf, rounds)


def _at(leaf: jax.Array, *, numbers: jax.Array) -> jax.Array:
    """Select the microbatch of each stage from a broadcast input.

    A leaf [microbatches, ...] becomes [stages, ...].
    """
    return jax.vmap(lambda i: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False))(numbers)


def _of_items(leaf: jax.Array, *, schedule: Schedule) -> jax.Array:
    """Select the outputs of stages for items, without bubbles.

    A leaf [iterations, stages, ...] becomes [rounds, stages, microbatches, ...], or [stages, microbatches, ...] with
    one round.
    """
    rounds, stages, numbers = np.ogrid[: schedule.rounds, : schedule.stages, : schedule.microbatches]
    results = leaf[rounds * schedule.period + numbers + stages, stages]
    return results if schedule.rounds > 1 else results[0]


def _fill(h: jax.Array, *, valid: jax.Array) -> jax.Array:
    constant = jnp.asarray(BUBBLE if jnp.issubdtype(h.dtype, jnp.inexact) else 0, h.dtype)
    return jnp.where(valid.reshape(-1, *[1] * (h.ndim - 1)), h, constant)


def _constrain(activations: Any, axis: str | None) -> Any:
    if axis is None:
        return activations
    free = PartitionSpec.UNCONSTRAINED
    return jax.tree.map(
        lambda h: lax.with_sharding_constraint(h, PartitionSpec(axis, *[free] * (h.ndim - 1))), activations
    )


def _check_result(activations: Any, out: Any) -> None:
    got, returned = (
        jax.tree.map(lambda h: f"{jnp.result_type(h)}{list(h.shape[1:])}", tree) for tree in (activations, out)
    )
    if got != returned:
        raise Fp8Error(
            f"A stage of a pipeline must return activations of the shapes and dtypes that it gets; this one gets "
            f"{got} and returns {returned}. Move layers that change them, such as embeddings and heads, out of the "
            "stages, and pass dtype= to layers that promote."
        )


def _check_leading(tree: Any, lead: tuple[int, ...], what: str, shape: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.shape(leaf)[: len(lead)] != lead:
            raise Fp8Error(
                f"{what} of this pipeline must have shapes {shape} with {lead}, "
                f"got {jnp.shape(leaf)} at {jax.tree_util.keystr(path) or 'the only leaf'}."
            )


def _gate_parameter(x: jax.Array, valid: jax.Array) -> jax.Array:
    """Return `x`, with a zero gradient if `valid` is false."""
    # Selected, not multiplied by 0, because 0 * NaN is NaN.
    return jnp.where(valid, x, lax.stop_gradient(x))

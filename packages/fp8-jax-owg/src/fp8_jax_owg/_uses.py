"""The uses of a state in a traced loss: where mode "fan_out" does not combine several, JAX would add them up.

The traced program tells. A state may pass through gates, casts and slices; every layer that it ends in is a use. Uses
of slices that lie apart do not meet, those of both branches of a condition neither, and a loop over slices uses the
state once. What a loop closes over is used in every iteration; slices whose places are known at run time only may
always meet.
"""

import functools
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fp8_common import Fp8Error
from fp8_jax_owg import _compat as compat
from fp8_jax_owg._sharing import REPLICATED

_log = logging.getLogger(__name__)

# Stands for any number above one: counts are only compared with one.
MANY = 2
PASSES = frozenset({"copy", "device_put", "optimization_barrier", "sharding_constraint"})
"""What hands on each operand as the result of the same place, in its own coordinates."""

Region = tuple[tuple[int, int], ...]
"""First and last index + 1 along each dimension."""


class Part(NamedTuple):
    """Uses of a slice.

    Attributes:
        region: Where it lies; None if that is not known before the program runs.
        uses: How many.
        looped: Whether every iteration of a loop uses it.
    """

    region: Region | None
    uses: int
    looped: bool = False

    @property
    def total(self) -> int:
        """Uses, those of a loop counted as several."""
        return MANY if self.looped and self.uses else self.uses


class Uses(NamedTuple):
    """How often something is used.

    Attributes:
        whole: By what takes all of it.
        parts: By what takes slices.
        altered: What lies between it and a use and changes the gradient of that use; empty if nothing does.
    """

    whole: int = 0
    parts: tuple[Part, ...] = ()
    altered: str = ""

    @property
    def total(self) -> int:
        """Uses that may meet in one element."""
        return self.whole + max((self._meeting(part) for part in self.parts), default=0)

    @property
    def apart(self) -> int:
        """Uses that may meet if no two slices are the same, as of slots with a number for each use."""
        # a slice whose place is known is the same one in every iteration
        numbers = (part.uses if part.region is None else part.total for part in self.parts)
        return self.whole + max(numbers, default=0)

    def _meeting(self, part: Part) -> int:
        return sum(other.total for other in self.parts if _overlap(part.region, other.region))

    def plus(self, other: "Uses") -> "Uses":
        """Return the uses of two users."""
        return Uses(self.whole + other.whole, self.parts + other.parts, self.altered or other.altered)

    @property
    def joined(self) -> "Uses":
        """The same uses without their places."""
        return Uses(self.total, altered=self.altered)

    @property
    def repeated(self) -> "Uses":
        """The uses of something that all iterations of a loop share."""
        return Uses(MANY if self.whole else 0, tuple(part._replace(looped=True) for part in self.parts), self.altered)


NONE, ONE = Uses(), Uses(whole=1)
IN_LOSS = Uses(altered="the loss itself")
"""A result of the loss: whatever reaches it without a layer between has a derivative, and observes nothing."""


def _overlap(a: Region | None, b: Region | None) -> bool:
    if a is None or b is None:
        return True
    return all(first < last_b and first_b < last for (first, last), (first_b, last_b) in zip(a, b, strict=True))


def check_single_uses(loss: Callable[[list[Any]], Any], leaves: list[Any], names: list[str]) -> None:
    """Raise if a leaf is used more than once, outside of what combines uses.

    Args:
        loss: Takes the leaves, returns arrays.
        leaves: The overwritten leaves.
        names: What to call them.

    Raises:
        Fp8Error: A leaf is used more than once, or its gradient is changed on its way.
    """
    counts = _traced_counts(loss, leaves)
    # Not strict: there are no counts where the loss could not be traced.
    if bad := [name for name, uses in zip(names, counts, strict=False) if uses.total > 1]:
        raise Fp8Error(
            f"The FP8 state {bad[0]} is used more than once{f', and {len(bad) - 1} more' if bad[1:] else ''}. Mode "
            "fan_out would add up what the uses observe. Say how many there are, `shared = fp8_jax_owg.share(state, "
            "uses)`, and give each `fp8_jax_owg.read(shared, use)`; loops take fp8_jax_owg.scan; mode extended "
            "needs neither."
        )
    for name, uses in zip(names, counts, strict=False):
        _refuse_altered(f"The FP8 state {name}", uses)


def _refuse_altered(what: str, uses: Uses) -> None:
    if uses.altered:
        raise Fp8Error(
            f"{what} enters {uses.altered}. The gradient of such a state is its next value, and a derivative of "
            "anything but its products would take the place of an observation. Give penalties, norms and averages the "
            "parameters alone, fp8_jax_owg.split(tree)[0]; states may be moved and selected, not computed with."
        )


def check_single_reads(loss: Callable[[list[Any]], Any], leaves: list[Any], names: list[str]) -> None:
    """Raise if what was read of a shared leaf is used more than once, outside of what combines uses.

    Args:
        loss: Takes the leaves and shares them, returns arrays.
        leaves: The overwritten leaves.
        names: What to call them; values that were read have no names.

    Raises:
        Fp8Error: A value that was read is used more than once, or its gradient is changed on its way.
    """
    _traced_counts(loss, leaves)


def _traced_counts(loss: Callable[[list[Any]], Any], leaves: list[Any]) -> list[Uses]:
    try:
        program = jax.make_jaxpr(loss)(leaves).jaxpr
    except AssertionError:
        # JAX 0.10 cannot trace `vmap` of a function with its own gradient over a NumPy array, but differentiate it
        _log.debug("the uses of the FP8 state could not be counted", exc_info=True)
        return []
    # The results begin with no use: only functions with a gradient of their own, of which layers are made, count as
    # uses of their operands (`_of_rule`).
    return count(program, [IN_LOSS] * len(program.outvars))


def count(program: core.Jaxpr, results: Sequence[Uses]) -> list[Uses]:
    """Return how often each input of a traced program is used, given the uses of its results."""
    found: defaultdict[Any, Uses] = defaultdict(Uses)

    def add(variables: Sequence[Any], uses: Sequence[Uses]) -> None:
        for variable, one in zip(variables, uses, strict=True):
            if not isinstance(variable, core.Literal):
                found[variable] = found[variable].plus(one)

    # From the results back to the inputs: what is used by something unused does not count.
    add(program.outvars, results)
    for equation in reversed(program.eqns):
        add(equation.invars, _of_equation(equation, [found[variable] for variable in equation.outvars]))
    return [found[variable] for variable in program.invars]


def _of_equation(equation: Any, outs: list[Uses]) -> list[Uses]:
    """Return the uses of each operand of an equation."""
    name, operands = equation.primitive.name, len(equation.invars)
    total = _all(outs)
    others = [NONE] * (operands - 1)
    if not operands:
        return []
    if name in PASSES and len(outs) == operands:
        return outs
    if name in SLICES:
        return [_sliced(equation, outs), *others]
    if name in JOINS:
        # each operand lies in the result once; one that stands in several places is counted for each
        return [total] * operands
    if name == "pvary":
        # From here on each device of a `shard_map` has one of its own, and JAX adds up what they observe.
        return [uses.joined.repeated for uses in outs]
    if name == "broadcast_in_dim":
        # Autodiff sums the cotangents of copies, so each copy is a use; a new dimension of length 1 makes none.
        grows = equation.outvars[0].aval.size > equation.invars[0].aval.size
        return [total.repeated if grows else total, *others]
    if name == "custom_vjp_call":
        return _of_rule(equation, outs)
    if name == "cond":
        # One branch runs, so the uses of both do not meet. The first operand is the number of the branch.
        branches = [count(_plain(branch), outs) for branch in equation.params["branches"]]
        return [NONE, *map(_greatest, zip(*branches, strict=True))]
    if name == "scan":
        return _of_scan(equation, outs)
    if name == "shard_map":
        return _of_shard_map(equation, outs)
    inner = _inner(equation)
    if inner is not None:
        return count(inner, outs)
    # Whatever else takes part in gradients hands the cotangent of its result to each operand, times something.
    if name == "stop_gradient" or not any(jnp.issubdtype(out.aval.dtype, jnp.inexact) for out in equation.outvars):
        return [NONE] * operands
    if not _keeps_gradients(equation):
        total = total._replace(altered=total.altered or f"the operation {name}") if any(total) else total
    size = max(out.aval.size for out in equation.outvars)
    # A result that is larger than an operand may hold it several times, as that of jnp.tile does.
    return [total.repeated if operand.aval.size < size else total for operand in equation.invars]


def _all(uses: Sequence[Uses]) -> Uses:
    return functools.reduce(Uses.plus, (one.joined for one in uses), NONE)


def _greatest(branches: Sequence[Uses]) -> Uses:
    """Return the uses by the branch that uses most."""
    altered = next(filter(None, (uses.altered for uses in branches)), "")
    return max(branches, key=lambda one: one.total)._replace(altered=altered)


def _keeps_gradients(equation: Any) -> bool:
    """Return whether an operation hands a gradient to its operands as it is, or where a mask is zero, not at all."""
    name, out = equation.primitive.name, equation.outvars[0].aval
    if name == "mul":
        # by an array, which may be a mask; a number that is known is none
        return all(np.all(np.asarray(x.val) == 1) for x in equation.invars if isinstance(x, core.Literal))
    if name == "convert_element_type":
        return out.dtype == jnp.float32 or jnp.issubdtype(out.dtype, jax.dtypes.extended)
    return name in KEEP


JOINS = frozenset({"concatenate", "stack"})
SLICES = frozenset({"dynamic_slice", "gather", "slice", "split"})
KEEP = frozenset(
    {"add", "add_any", "dot_general", "dynamic_update_slice", "expand_dims", "pad", "reduce_sum", "reshape"}
    | {"rev", "scatter", "select_n", "squeeze", "tile", "transpose"}
)
"""Linear operations that select or move: their transposes change no element that arrives."""


def _sliced(equation: Any, outs: list[Uses]) -> Uses:
    """Return the uses of the operand of a slice: of a region, where that is known."""
    name, params, shape = equation.primitive.name, equation.params, equation.invars[0].aval.shape
    whole = tuple((0, n) for n in shape)
    if name == "slice":
        region = tuple(zip(params["start_indices"], params["limit_indices"], strict=True))
        return Uses(parts=(Part(region, outs[0].total),), altered=outs[0].altered)
    if name == "split":
        ends = list(itertools.accumulate(params["sizes"]))
        axis, parts = params["axis"], zip([0, *ends], ends, outs, strict=False)
        regions = tuple(Part((*whole[:axis], (i, j), *whole[axis + 1 :]), u.total) for i, j, u in parts)
        return Uses(parts=regions, altered=_all(outs).altered)
    if name == "dynamic_slice":
        starts = [getattr(start, "val", None) for start in equation.invars[1:]]
        if None in starts:
            return Uses(parts=(Part(None, outs[0].total),), altered=outs[0].altered)
        sizes = params["slice_sizes"]
        # Starts are literals here, NumPy scalars or JAX's typed ones: both print as the number.
        region = tuple((int(str(i)), int(str(i)) + n) for i, n in zip(starts, sizes, strict=True))
        return Uses(parts=(Part(region, outs[0].total),), altered=outs[0].altered)
    # else a gather
    dims, picked = params["dimension_numbers"], equation.outvars[0].aval
    rows = math.prod(n for d, n in enumerate(picked.shape) if d not in dims.offset_dims)
    own = math.prod(shape[d] for d in dims.operand_batching_dims)
    # Of several rows that are picked by their numbers, two may be the same.
    uses = MANY if rows > own and outs[0].total else outs[0].total
    return Uses(parts=(Part(None, uses),), altered=outs[0].altered)


def _of_rule(equation: Any, outs: list[Uses]) -> list[Uses]:
    """Return the uses of the operands of a function with its own gradient: this package's own, or a layer's.

    Raises:
        Fp8Error: It is `read`, and its result is used more than once or computed with.
    """
    name, operands, total = compat.name_of_rule(equation), len(equation.invars), _all(outs)
    # Told apart by the names of the decorated functions, all that a traced program keeps of them: whoever renames one
    # of these functions has to do it here as well.
    if name in ("_gate", "_newest", "trained_with_state") or name.startswith(REPLICATED):
        return [total] + [NONE] * (operands - 1)
    if name == "_read" and total.total > 1:
        raise Fp8Error(
            "What fp8_jax_owg.read returned is used more than once: JAX would add up what the uses observe. Call it "
            "for each use, or leave it out: layers read shared state themselves. Inside of shard_map, share what was "
            "read outside with fp8_jax_owg.replicated."
        )
    if name == "_read":
        _refuse_altered("An FP8 state", total)
    if name == "_fan_out":
        # It takes the maximum over its slots, so that uses of different slots are one use of its operand.
        return [Uses(whole=outs[0].apart, altered=outs[0].altered)]
    if name == "_with_newest":
        # Its first operand, the history, gets zeros as gradient.
        return [NONE, total]
    # A layer, whose rule hands each operand one cotangent, however often its results are used; or a function around
    # several, whose gradients it may have added up.
    inner = _inner(equation)
    inside = [NONE] * operands if inner is None else count(inner, [NONE] * len(inner.outvars))
    return [one if one.total > 1 else ONE for one in inside]


def _of_scan(equation: Any, outs: list[Uses]) -> list[Uses]:
    """Return the uses of constants, first carries and scanned arrays."""
    body = _plain(equation.params["jaxpr"])
    # told by shapes: what is scanned over or stacked has one dimension more outside of the body
    carries = sum(out.aval.ndim == own.aval.ndim for out, own in zip(equation.outvars, body.outvars, strict=True))
    scanned = sum(x.aval.ndim != own.aval.ndim for x, own in zip(equation.invars, body.invars, strict=True))
    consts = len(body.invars) - scanned - carries
    # What the body hands to the next iteration is counted there, as a use by that iteration.
    each = count(body, [NONE] * carries + [out.joined for out in outs[carries:]])
    if equation.params["length"] > 1:
        each[: consts + carries] = [uses.repeated for uses in each[: consts + carries]]
    each[consts + carries :] = [uses.joined for uses in each[consts + carries :]]
    # a state in the carry is handed on, and may be used after the loop
    handed_on = [NONE] * consts + outs[:carries] + [NONE] * (len(each) - consts - carries)
    return list(map(Uses.plus, each, handed_on))


def _of_shard_map(equation: Any, outs: list[Uses]) -> list[Uses]:
    """Return the uses of what enters a `shard_map`: those of all devices, where nothing tells that they share it."""
    params, body = equation.params, _plain(equation.params["jaxpr"])
    each = count(body, outs)
    # with check_vma=True layers see from the types which devices share a state
    if params["check_vma"]:
        return each
    # named so since JAX 0.10.2
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    axes = {axis for axis in manual if params["mesh"].shape[axis] > 1}
    for place, (variable, spec) in enumerate(zip(body.invars, params["in_specs"], strict=True)):
        named = {axis for part in spec for axis in (part if isinstance(part, tuple) else (part,))}
        if axes - named - _replicated_axes(body, variable):
            each[place] = each[place].repeated
    return each


def _replicated_axes(program: core.Jaxpr, variable: Any) -> set[str]:
    """Return the axes over which `fp8_jax_owg.replicated` combines an input of a program, if that is what takes it."""
    for equation in program.eqns:
        if variable in [x for x in equation.invars if not isinstance(x, core.Literal)]:
            if equation.primitive.name == "custom_vjp_call":
                _, _, axes = compat.name_of_rule(equation).partition(REPLICATED)
                return set(axes.split(","))
            inner, place = _inner(equation), equation.invars.index(variable)
            return set() if inner is None else _replicated_axes(inner, inner.invars[place])
    return set()


def _inner(equation: Any) -> core.Jaxpr | None:
    """Return the program that an equation calls, if its operands are those of the equation."""
    for value in equation.params.values():
        program = _plain(value)
        if isinstance(program, core.Jaxpr) and len(program.invars) == len(equation.invars):
            return program
    return None


def _plain(program: Any) -> Any:
    """Return a traced program without its constants."""
    return getattr(program, "jaxpr", program)

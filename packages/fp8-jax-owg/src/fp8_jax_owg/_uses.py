"""The uses of a state in a traced loss: where mode "fan_out" does not combine several, JAX would add them up.

The traced program tells. A state may pass through gates, casts and slices; every layer that it ends in is a use. Uses
of different slices do not meet, those of both branches of a condition neither, and a loop that takes a slice of its
own in each iteration uses the state once. What a loop closes over is used in every iteration.
"""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fp8_common import Fp8Error
from fp8_jax_owg import _compat as compat

_log = logging.getLogger(__name__)

MANY = 2
PASSES = frozenset(
    {
        "concatenate",
        "convert_element_type",
        "copy",
        "device_put",
        "optimization_barrier",
        "reshape",
        "sharding_constraint",
        "stack",
    }
)
SLICES = frozenset({"dynamic_slice", "gather", "slice", "split", "squeeze"})


class Uses(NamedTuple):
    """How often something is used.

    Attributes:
        whole: By what takes all of it.
        sliced: At most, of any slice.
    """

    whole: int = 0
    sliced: int = 0

    @property
    def total(self) -> int:
        """Uses that may meet."""
        return self.whole + self.sliced

    def plus(self, other: "Uses") -> "Uses":
        """Return the uses of two users."""
        return Uses(self.whole + other.whole, max(self.sliced, other.sliced))

    @property
    def repeated(self) -> "Uses":
        """The uses of something that all iterations of a loop share."""
        return Uses(MANY if self.whole else 0, self.sliced)


NONE, ONE = Uses(), Uses(whole=1)


def check_single_uses(loss: Callable[[list[Any]], Any], leaves: list[Any], names: list[str]) -> None:
    """Raise if a leaf is used more than once, outside of what combines uses.

    Args:
        loss: Takes the leaves, returns arrays.
        leaves: The overwritten leaves.
        names: What to call them.

    Raises:
        Fp8Error: A leaf is used more than once.
    """
    try:
        program = jax.make_jaxpr(loss)(leaves).jaxpr
    except AssertionError:
        # JAX 0.10 cannot trace `vmap` of a function with its own gradient over a NumPy array, but differentiate it
        _log.debug("the uses of the FP8 state could not be counted", exc_info=True)
        return
    counts = count(program, [NONE] * len(program.outvars))
    if bad := [name for name, uses in zip(names, counts, strict=True) if uses.total > 1]:
        raise Fp8Error(
            f"The FP8 state {bad[0]} is used more than once{f', and {len(bad) - 1} more' if bad[1:] else ''}. Mode "
            "fan_out would add up what the uses observe. Say how many there are, `shared = fp8_jax_owg.share(state, "
            "uses)`, and give each `fp8_jax_owg.read(shared, use)`; loops take fp8_jax_owg.scan; mode extended "
            "needs neither."
        )


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
    total = functools.reduce(Uses.plus, outs, NONE)
    if name in PASSES:
        return outs if len(outs) == operands else [total] * operands
    if name == "broadcast_in_dim":
        grows = equation.outvars[0].aval.size > equation.invars[0].aval.size
        return [total.repeated if grows else total] + [NONE] * (operands - 1)
    if name in SLICES:
        return [Uses(sliced=max(uses.total for uses in outs))] + [NONE] * (operands - 1)
    if name == "custom_vjp_call":
        return _of_rule(compat.name_of_rule(equation), total, operands)
    if name == "cond":
        branches = [count(_plain(branch), outs) for branch in equation.params["branches"]]
        return [NONE, *(max(uses, key=lambda one: one.total) for uses in zip(*branches, strict=True))]
    if name == "scan":
        return _of_scan(equation, outs)
    inner = _inner(equation)
    return [NONE] * operands if inner is None else count(inner, outs)


def _of_rule(name: str, total: Uses, operands: int) -> list[Uses]:
    """Return the uses of the operands of a function with its own gradient: this package's own, or a layer's."""
    if name in ("_gate", "_replicated", "_newest"):
        return [total] + [NONE] * (operands - 1)
    if name == "_fan_out":
        return [Uses(whole=total.total)]
    if name == "_with_newest":
        return [NONE, total]
    return [ONE] * operands


def _of_scan(equation: Any, outs: list[Uses]) -> list[Uses]:
    """Return the uses of constants, first carries and scanned arrays."""
    body = _plain(equation.params["jaxpr"])
    # told by shapes: what is scanned over or stacked has one dimension more outside of the body
    carries = sum(out.aval.ndim == own.aval.ndim for out, own in zip(equation.outvars, body.outvars, strict=True))
    scanned = sum(x.aval.ndim != own.aval.ndim for x, own in zip(equation.invars, body.invars, strict=True))
    consts = len(body.invars) - scanned - carries
    each = count(body, [NONE] * carries + outs[carries:])
    if equation.params["length"] > 1:
        each[: consts + carries] = [uses.repeated for uses in each[: consts + carries]]
    # a state in the carry is handed on, and may be used after the loop
    handed_on = [NONE] * consts + outs[:carries] + [NONE] * (len(each) - consts - carries)
    return list(map(Uses.plus, each, handed_on))


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

"""`Layout`: which dimensions of an operation with a kernel may stay sharded over devices, and what is combined.

A custom call is opaque to the partitioners. For each dimension of the first operand a layout says how many elements
belong together; a shard that holds whole groups is worked on where it is. Only where a group would be cut, a block of
128 rows over two devices, is the dimension gathered first.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

Result = Literal["same", "transposed", "groups", "row", "scalar", "amax"]
Spec = tuple[Any, ...]
WHOLE = 0
"""Step of a dimension that belongs together as a whole."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the results of an operation depend on the dimensions of its first operand; the others are replicated.

    Attributes:
        steps: For the last dimensions, how many elements belong together; one in all dimensions before them.
        results: Of each result: "same" has the operand's dimensions, "transposed" its two swapped, "groups" one element
            per group, "row" one per row, "scalar" one element that every device knows, "amax" one that is combined.
        combine: (*shards, axes, **params) -> results where a whole dimension is sharded over the mesh axes `axes`;
            None if that dimension has to be gathered.
    """

    steps: tuple[int, ...]
    results: tuple[Result, ...]
    combine: Callable[..., Sequence[jax.Array]] | None = None

    @property
    def batches(self) -> bool:
        """Whether another leading dimension gives independent results of the same operation."""
        return not {"transposed", "amax"} & {*self.results} and len(self.steps) == 1

    def step(self, dimension: int, ndim: int) -> int:
        """Return how many elements of a dimension belong together."""
        place = dimension - ndim + len(self.steps)
        if place >= 0:
            return self.steps[place]
        return WHOLE if "amax" in self.results else 1

    def kept(self, asked: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> Spec:
        """Return the sharding of the first operand: as asked for, but for dimensions whose groups it would cut."""
        padded = (*asked, *(None for _ in shape))[: len(shape)]
        return tuple(part if self._fits(d, part, shape, mesh) else None for d, part in enumerate(padded))

    def _fits(self, dimension: int, part: Any, shape: Sequence[int], mesh: Mapping[str, int]) -> bool:
        shards = math.prod(mesh[name] for name in names_of(part))
        step = self.step(dimension, len(shape))
        # Unequal shards are gathered: their groups would not be those of the array.
        if shape[dimension] % shards or (step == WHOLE and self.combine is None):
            return shards == 1
        return step in (WHOLE, 1) or (shape[dimension] // shards) % step == 0 or shards == 1

    def specs_of_results(self, spec: Spec) -> tuple[Spec, ...]:
        """Return the sharding of each result for that of the first operand."""
        # A sharding of groups is that of their elements, since `kept` cuts none. With the last dimension of "row" of
        # length 1, nothing is left there to shard.
        made = {"same": spec, "groups": spec, "transposed": spec[::-1], "row": (*spec[:-1], None)}
        return tuple(made.get(result, ()) for result in self.results)

    def axes_to_combine(self, spec: Spec) -> tuple[str, ...]:
        """Return the mesh axes over which a whole dimension is sharded."""
        wholes = (part for d, part in enumerate(spec) if self.step(d, len(spec)) == WHOLE)
        return tuple(name for part in wholes for name in names_of(part))

    def shardy_rule(self, shapes: Sequence[Sequence[int]], devices: int) -> dict[str, Any]:
        """Return the arguments that tell Shardy the same: dimensions that are one, and those that must be gathered.

        Groups are told only where they can be dealt out to all devices: JAX cannot read parts of mesh axes. Elsewhere
        the data stays sharded all the same, and the much smaller scales are gathered.
        """
        ndim = len(shapes[0])
        fixed: list[str] = []
        sizes: dict[str, int] = {}

        def fresh() -> str:
            fixed.append(f"f{len(fixed)}")
            return fixed[-1]

        operand, groups = [], []
        for d, size in enumerate(shapes[0]):
            step, name = self.step(d, ndim), f"d{d}"
            if step > 1 and size % (step * devices) == 0:
                sizes[inner := fresh()] = step
                operand.append(f"({name} {inner})")
                groups.append(name)
                continue
            operand.append(name)
            groups.append(name if step == 1 else fresh())
            if step == WHOLE and self.combine is None:
                fixed.append(name)
        made = {
            "same": lambda: operand,
            "transposed": lambda: operand[::-1],
            "groups": lambda: groups,
            "row": lambda: [*operand[:-1], fresh()],
            "scalar": lambda: [fresh()],
            "amax": lambda: [fresh()],
        }
        inputs = [operand, *([fresh() for _ in shape] for shape in shapes[1:])]
        outputs = [made[result]() for result in self.results]
        reduced = tuple(operand) if self.results == ("amax",) else ()
        rule = f"{', '.join(map(' '.join, inputs))} -> {', '.join(map(' '.join, outputs))}"
        used = dict.fromkeys(re.findall(r"\w+", rule))  # Shardy wants them in order of appearance
        needed = tuple(name for name in used if name in fixed)
        return {"sharding_rule": rule, "need_replication_factors": needed, "reduction_factors": reduced, **sizes}


def names_of(part: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a partition spec."""
    return () if part is None else part if isinstance(part, tuple) else (part,)

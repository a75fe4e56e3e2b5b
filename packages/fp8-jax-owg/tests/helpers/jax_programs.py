"""Random programs of FP8 layers under JAX's transforms, each with the amax that running it step by step records.

A program is a tree of nodes. `trace` runs a node in JAX; `follow` runs it in NumPy, one use after the other, and
records the input amax of every state. Layers have the identity as kernel and states that have seen nothing, so their
scale is 1 and NumPy's definition of the cast gives their exact results.
"""

import dataclasses
import functools
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import fp8_common
import fp8_jax_owg as owg
import jax_operations
from jax_layers import MATMUL

SCALING = owg.DelayedScaling(amax_history_length=2)
TENSORS = ("input", "kernel", "output_grad")
COLUMNS = 2
POLICIES = (
    None,
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_anything_except_these_names("none"),
)
WRAPPERS = ("jit", "remat", "branch", "skip", "gate")
Seen = dict[tuple[str, tuple[int, ...]], float]


def names(node):
    """The states that a node uses."""
    own = [node.name] if isinstance(node, Layer) else []
    return own + [name for part in getattr(node, "parts", ()) for name in names(part)]


def only(state, wanted):
    return {name: state[name] for name in wanted if name in state}


@dataclasses.dataclass
class Layer:
    """A use of a state, by a matmul or, which compiles in a third of the time, by a cast alone."""

    name: str
    matmul: bool

    def trace(self, h, state):
        meta = state[self.name]
        if not self.matmul:
            return owg.flax_casts.in_qdq(h, meta["input_scale"], meta["input_amax_history"], SCALING)
        return owg.fp8_dot_general(h, jnp.eye(COLUMNS), MATMUL, meta=meta, scaling=SCALING)

    def follow(self, h, seen, index):
        place = self.name, index if self.name.startswith("own") else ()
        seen[place] = max(seen.get(place, 0.0), float(np.abs(h).max()))
        return fp8_common.dequantize(fp8_common.quantize(h, np.float32(1), "e4m3"), np.float32(1), "e4m3")


@dataclasses.dataclass
class Scaled:
    """A change of the activations."""

    factor: float

    def trace(self, h, state):
        return h * self.factor

    def follow(self, h, seen, index):
        return h * np.float32(self.factor)


@dataclasses.dataclass
class Sequence:
    parts: list[Any]

    def trace(self, h, state):
        for part in self.parts:
            h = part.trace(h, state)
        return h

    def follow(self, h, seen, index):
        for part in self.parts:
            h = part.follow(h, seen, index)
        return h


@dataclasses.dataclass
class Wrapped:
    """A body under jit, remat with a policy, in a branch that is taken or skipped, in a function with a gradient of its
    own, or behind a gate that is closed.
    """

    parts: list[Any]
    how: str
    policy: int = 0

    def trace(self, h, state):
        body = self.parts[0].trace
        if self.how == "jit":
            return jax.jit(body)(h, state)
        if self.how == "remat":
            return jax.checkpoint(body, policy=POLICIES[self.policy])(h, state)
        if self.how == "custom_vjp":
            outer = jax.custom_vjp(body)
            outer.defvjp(lambda h, used: jax.vjp(body, h, used), lambda back, g: back(g))
            return outer(h, only(state, names(self)))
        if self.how == "gate":
            return body(h, state | owg.state.gate(only(state, names(self)), jnp.bool_(False)))
        # not of h: under vmap JAX runs both branches of a condition that differs from example to example
        return lax.cond(jnp.bool_(self.how == "branch"), body, lambda h, state: h, h, state)

    def follow(self, h, seen, index):
        return h if self.how == "skip" else self.parts[0].follow(h, {} if self.how == "gate" else seen, index)


@dataclasses.dataclass
class Loop:
    """A scan whose iterations share the states of the body; or one over stacked states."""

    parts: list[Any]
    factors: list[float]
    stacked: bool

    def trace(self, h, state):
        factors = jnp.float32(self.factors)
        own = only(state, names(self)) if self.stacked else {}
        own = {name: meta for name, meta in own.items() if name.startswith("own")}
        shared = {name: meta for name, meta in only(state, names(self)).items() if name not in own}

        used = state | owg.state.share(shared)
        body = lambda h, x: (self.parts[0].trace(h * x[0], used | x[1]), None)  # noqa: E731
        return lax.scan(body, h, (factors, own))[0]

    def follow(self, h, seen, index):
        for i, factor in enumerate(self.factors):
            h = self.parts[0].follow(h * np.float32(factor), seen, (*index, i) if self.stacked else index)
        return h


@dataclasses.dataclass
class Mapped:
    """A body under vmap, over halves of the rows: they share the states, or have one each."""

    parts: list[Any]
    stacked: bool

    def trace(self, h, state):
        own = {name: meta for name, meta in only(state, names(self)).items() if self.stacked and name.startswith("own")}
        halves = h.reshape(2, -1, COLUMNS)
        out = jax.vmap(lambda h, own: self.parts[0].trace(h, state | own))(halves, own)
        return out.reshape(h.shape)

    def follow(self, h, seen, index):
        halves = np.split(h, 2)
        done = [
            self.parts[0].follow(half, seen, (*index, i) if self.stacked else index) for i, half in enumerate(halves)
        ]
        return np.concatenate(done)


@dataclasses.dataclass
class Sharded:
    """A body inside `shard_map`, over halves of the rows on two devices."""

    parts: list[Any]
    check_vma: bool

    def trace(self, h, state):
        mesh = jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
        used = owg.state.unshare(only(state, names(self)))

        def body(h, used):
            return self.parts[0].trace(h, owg.state.replicated(used, "rows"))

        specs = PartitionSpec("rows"), PartitionSpec()
        inside = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=self.check_vma)
        return inside(h, used)

    def follow(self, h, seen, index):
        return np.concatenate([self.parts[0].follow(half, seen, index) for half in np.split(h, 2)])


@dataclasses.dataclass
class Unrolled:
    """A body for each of two stacked states in turn, taken out in a way that JAX differentiates, or not."""

    parts: list[Any]
    native: bool

    def trace(self, h, state):
        own = {name: meta for name, meta in only(state, names(self)).items() if name.startswith("own")}
        for i in range(2):
            dynamic = functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
            h = self.parts[0].trace(h, state | jax.tree.map(dynamic if self.native else itemgetter(i), own))
        return h

    def follow(self, h, seen, index):
        for i in range(2):
            h = self.parts[0].follow(h, seen, (*index, i))
        return h


@dataclasses.dataclass
class Operated:
    """A body whose states have gone through an operation, leaf by leaf, that is right or refused."""

    parts: list[Any]
    operation: str

    def trace(self, h, state):
        operation = (jax_operations.RIGHT | jax_operations.REFUSED)[self.operation]
        return self.parts[0].trace(h, state | jax.tree.map(operation, only(state, names(self))))

    def follow(self, h, seen, index):
        return self.parts[0].follow(h, seen, index)


class Maker:
    """Draws programs, transforms at most `deepest` in each other; `shapes` are the leading dimensions of its states.

    With `operations` one body in three operates on its states first. `refused` are the operations among these that a
    loss may not do.
    """

    def __init__(self, seed, deepest=3, matmul=True, native=True, operations=False):
        self.deepest, self.matmul, self.native = deepest, matmul, native
        self.operations, self.refused = operations, []
        self.random = np.random.default_rng(seed)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def choose(self, *options):
        return options[self.random.integers(len(options))]

    def program(self):
        body = self.sequence(depth=0, lead=(), rows=2)
        if self.random.random() < 0.3:
            return Sharded([body], bool(self.random.integers(2)))
        return Sequence([self.sequence(depth=0, lead=(), rows=4), body])

    def sequence(self, depth, lead, rows):
        body = Sequence([self.node(depth, lead, rows) for _ in range(self.choose(1, 2, 2, 3))])
        if not self.operations or self.random.random() > 1 / 3:
            return body
        operation = self.choose(*(jax_operations.REFUSED if self.random.random() < 0.2 else jax_operations.RIGHT))
        if operation in jax_operations.REFUSED and names(body):
            self.refused.append(operation)
        return Operated([body], operation)

    def node(self, depth, lead, rows):
        if depth == self.deepest or self.random.random() < 0.3:
            return self.layer(lead) if self.choose(True, True, False) else Scaled(self.choose(0.5, 2.0, 3.0))
        kind = self.choose(*WRAPPERS, "custom_vjp", "loop", "loop", "vmap", "unrolled")
        if kind == "vmap" and rows > 1:
            stacked = bool(self.random.integers(2))
            return Mapped([self.sequence(depth + 1, (*lead, 2) if stacked else lead, rows // 2)], stacked)
        if kind == "unrolled":
            return Unrolled([self.sequence(depth + 1, (*lead, 2), rows)], self.native)
        if kind in ("loop", "vmap"):
            stacked = bool(self.random.integers(2))
            factors = self.random.choice([0.5, 1.0, 2.0], self.choose(1, 2, 3)).tolist()
            inner = (*lead, len(factors)) if stacked else lead
            return Loop([self.sequence(depth + 1, inner, rows)], factors, stacked)
        # where a program moves state, two uses in a function with a gradient of its own are NaN: see test_in_loss
        body = Sequence([self.layer(lead)]) if kind == "custom_vjp" else self.sequence(depth + 1, lead, rows)
        return Wrapped([body], kind, int(self.random.integers(len(POLICIES))))

    def layer(self, lead):
        old = [name for name in self.shapes if name.startswith("shared")]
        if old and self.random.random() < 0.5:
            return Layer(self.choose(*old), self.matmul)
        if self.random.random() < 0.4:
            return self.new("shared", ())
        return self.new("own" if lead else "shared", lead)

    def new(self, kind, lead):
        name = f"{kind}{len(self.shapes)}"
        self.shapes[name] = lead
        return Layer(name, self.matmul)

    def states(self):
        """One state for each name, stacked."""
        one = owg.init_meta(SCALING, TENSORS if self.matmul else TENSORS[:1])
        return {
            name: jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*lead, *leaf.shape)), one)  # noqa: B023 (called here)
            for name, lead in self.shapes.items()
        }

    def recorded(self, program, h):
        """The input amax of each state, element by element; -1 where nothing was observed."""
        seen: Seen = {}
        program.follow(h, seen, ())
        return {
            name: np.float32([seen.get((name, index), -1) for index in np.ndindex(lead)]).reshape(lead)
            for name, lead in self.shapes.items()
        }


def activations(seed):
    return np.float32(np.random.default_rng(seed).integers(1, 5, (4, COLUMNS)))

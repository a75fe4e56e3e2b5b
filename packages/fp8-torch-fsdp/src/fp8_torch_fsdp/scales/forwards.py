"""`Forwards`: makes each backward multiply by the codes of its forward.

Between a forward and its backward, weights may change, or another forward may replace the codes: with mean teachers,
evaluations with averaged weights, or losses of two forwards. Therefore each forward keeps this rank's codes of each
weight. Hooks on the outputs of FSDP modules hold the forward until their backward has run. FSDP2 gathers its codes in
that backward, and gathers again if it holds codes of another forward. All ranks run the same backward, so all of them
run the same gathers.

The newest codes are always kept. Others are freed with their graph; they need 1 byte per element of a shard.
"""

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from fp8_common.torch_layers.sharding import fsdp_forwards as fsdp
from fp8_torch_fsdp.scales.weight import CodeSnapshot, Fp8Weight


class Forward:
    """This rank's codes of the weights of one forward.

    Immutable: a write during a forward creates another `Forward`.

    Args:
        snapshots: Codes of each weight.
        first_node: Smallest sequence number of the autograd nodes of this forward.
    """

    def __init__(self, snapshots: dict[Fp8Weight, CodeSnapshot], first_node: int) -> None:
        self.snapshots, self.first_node = snapshots, first_node


class OutputHooks:
    """Backward hooks of a module's output that begin and release its forward.

    The hooks are freed with the graph.
    """

    def __init__(self, forwards: "Forwards", forward: Forward) -> None:
        self._forwards = forwards
        self._forward: Forward | None = forward

    def begin(self, grad: object) -> None:
        """Gather the codes of the forward from now on.

        This hook runs before FSDP2's hook, which gathers.
        """
        if self._forward is not None:
            self._forwards.enter(self._forward)

    def end(self, *grads: object) -> None:
        """Release the forward, unless the backward retains its graph.

        The hook does not run if only the gradient of the output is requested; the forward is then freed with its graph.
        """
        if not fsdp.keeps_graph():
            self._forward = None


class Forwards:
    """Forwards of a root that may run backward, and the current one.

    Args:
        weights: Weights of the root.

    Attributes:
        current: Forward that began last; None before the first one, and during a synchronization.
    """

    def __init__(self, weights: Sequence[Fp8Weight]) -> None:
        self._weights = weights
        self.current: Forward | None = None
        self._entered: Forward | None = None
        self._task = -1  # autograd's id of the backward in which it was entered
        self._watched: list[weakref.ref[Forward]] = []  # forwards whose hooks hold them

    def begin(self, weights: Iterable[Fp8Weight]) -> None:
        """Begin a forward that multiplies by the newest codes of `weights`."""
        snapshots: dict[Fp8Weight, Any] = {weight: weight.newest for weight in weights}
        self.current = Forward(snapshots, fsdp.next_node())
        if not fsdp.in_backward():
            self._entered, self._task = None, -1  # set if an exception ended a backward

    def replace(self, weight: Fp8Weight) -> None:
        """Replace the codes of a weight during the current forward.

        The backward of earlier uses in this forward multiplies by the previous codes.
        """
        if self.current is not None:
            newest: Any = weight.newest
            self.current = Forward({**self.current.snapshots, weight: newest}, self.current.first_node)

    def watch(self, output: Any) -> None:
        """Hold the current forward as long as `output`'s graph.

        In a backward, where activation checkpointing repeats forwards, hold the forward of that backward.
        """
        forward = self.find() if fsdp.in_backward() else self.current
        if forward is None:
            return
        hooks = OutputHooks(self, forward)
        fsdp.on_backward(output, hooks.begin, hooks.end)
        others = [reference for reference in self._watched if reference() not in (None, forward)]
        self._watched = [*others, weakref.ref(forward)]

    def find(self) -> Forward | None:
        """Return the forward of the running backward.

        It is the one that a hook entered last, or else the one that created the running autograd node.
        """
        if self._task != -1:
            return self._entered
        node, alive = fsdp.running_node(), [reference() for reference in self._watched]
        earlier = [forward for forward in alive if forward is not None and forward.first_node <= node]
        return max(earlier, key=lambda forward: forward.first_node, default=None)

    def enter(self, forward: Forward) -> None:
        """Gather the codes of `forward` until the running backward ends."""
        task = fsdp.graph_task()
        if task != self._task:  # a new backward; reentrant checkpointing nests them
            fsdp.at_end_of_backward(functools.partial(self._leave, self._entered, self._task))
        elif forward is self._entered:
            return
        self._entered, self._task = forward, task
        self._regather(forward)

    def _leave(self, forward: Forward | None, task: int) -> None:
        self._entered, self._task = forward, task
        if forward is None:
            for weight in self._weights:
                if weight.shard is None and weight.newest is not None:
                    weight.restore_scales(weight.newest)

    def _regather(self, forward: Forward) -> None:
        """Gather weights again if FSDP2 holds or prefetches other codes."""
        for weight, snapshot in forward.snapshots.items():
            if weight.shard is None:
                weight.restore_scales(snapshot)
            elif weight.number != snapshot.number and (weight.shard.is_gathered or weight.shard.is_in_flight):
                weight.shard.regather()

    def snapshot_in_backward(self, weight: Fp8Weight) -> Any:
        """Return this rank's codes of a weight that a backward gathers."""
        forward = self.find()
        return weight.newest if forward is None else forward.snapshots.get(weight, weight.newest)

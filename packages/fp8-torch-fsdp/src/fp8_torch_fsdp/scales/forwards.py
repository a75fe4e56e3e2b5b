"""`Forwards`: each backward multiplies by the codes of its forward.

Mean teachers, evaluations with averaged weights, losses of two forwards: between a forward and its backward weights
change, or another forward replaces the codes. So each forward keeps this rank's codes of each weight. Hooks on the
outputs of FSDP modules hold it until their backward has passed. In the backward FSDP2 gathers it, and gathers codes of
another forward again. All ranks run the same backward, and so the same gathers.

The newest codes are kept in any case. Others live while their graph does: 1 byte per element of a shard.
"""

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from fp8_common.torch_layers.sharding import fsdp_forwards as fsdp
from fp8_torch_fsdp.scales.weight import CodeSnapshot, Fp8Weight


class Forward:
    """This rank's codes of the weights of one forward.

    Immutable: a write inside of a forward makes another.

    Args:
        sent: By weight.
        first_node: Number of autograd's nodes from which on they are of this forward.
    """

    def __init__(self, sent: dict[Fp8Weight, CodeSnapshot], first_node: int) -> None:
        self.sent, self.first_node = sent, first_node


class Pending:
    """Two hooks at a module output: restore its forward, release it.

    Released when its graph is freed.
    """

    def __init__(self, forwards: "Forwards", forward: Forward) -> None:
        self._forwards = forwards
        self._forward: Forward | None = forward

    def begin(self, grad: object) -> None:
        """Gather the forward's codes from now on.

        Runs before FSDP2's own hook.
        """
        if self._forward is not None:
            self._forwards.enter(self._forward)

    def end(self, *grads: object) -> None:
        """Release the forward.

        Not if only the gradient of the output was requested, whose node has not run.
        """
        if not fsdp.keeps_graph():
            self._forward = None


class Forwards:
    """Forwards of a root that may run backward, and the current one.

    Args:
        weights: The weights of the root.

    Attributes:
        current: The forward that began last.
    """

    def __init__(self, weights: Sequence[Fp8Weight]) -> None:
        self._weights = weights
        self.current: Forward | None = None
        self._entered: Forward | None = None
        self._task = -1  # the backward that it was entered in
        self._pending: list[weakref.ref[Forward]] = []

    def begin(self, weights: Iterable[Fp8Weight]) -> None:
        """Begin a forward that multiplies by the last codes."""
        sent: dict[Fp8Weight, Any] = {weight: weight.newest for weight in weights}
        self.current = Forward(sent, fsdp.next_node())
        if not fsdp.in_backward():
            self._entered, self._task = None, -1  # an exception may have left them

    def replace(self, weight: Fp8Weight) -> None:
        """Replace the codes of a weight inside of the current forward.

        Earlier uses keep the old codes.
        """
        if self.current is not None:
            newest: Any = weight.newest
            self.current = Forward({**self.current.sent, weight: newest}, self.current.first_node)

    def watch(self, output: Any) -> None:
        """Hold the current forward while `output`'s graph may run backward.

        A backward may also repeat the forward.
        """
        forward = self.find() if fsdp.in_backward() else self.current
        if forward is None:
            return
        pending = Pending(self, forward)
        fsdp.on_backward(output, pending.begin, pending.end)
        self._pending = [reference for reference in self._pending if reference() not in (None, forward)] + [
            weakref.ref(forward)
        ]

    def find(self) -> Forward | None:
        """Return the forward of the running backward.

        It is the last hook's, else the forward that made the running node.
        """
        if self._task != -1:
            return self._entered
        node, alive = fsdp.running_node(), [one() for one in self._pending]
        earlier = [one for one in alive if one is not None and one.first_node <= node]
        return max(earlier, key=lambda one: one.first_node, default=None)

    def enter(self, forward: Forward) -> None:
        """Gather the codes of `forward` until the running backward ends."""
        task = fsdp.graph_task()
        if task != self._task:  # of a reentrant checkpoint: inside of another backward
            fsdp.at_end_of_backward(functools.partial(self._leave, self._entered, self._task))
        elif forward is self._entered:
            return
        self._entered, self._task = forward, task
        self._bring_back(forward)

    def _leave(self, forward: Forward | None, task: int) -> None:
        self._entered, self._task = forward, task
        if forward is None:
            for weight in self._weights:
                if weight.shard is None and weight.newest is not None:
                    weight.take(weight.newest)

    def _bring_back(self, forward: Forward) -> None:
        """Gather again parameters that FSDP2 holds, or prefetches, of another forward."""
        for weight, sent in forward.sent.items():
            if weight.shard is None:
                weight.take(sent)
            elif weight.number != sent.number and (weight.shard.is_gathered or weight.shard.is_in_flight):
                weight.shard.regather()

    def snapshot_in_backward(self, weight: Fp8Weight) -> Any:
        """Return this rank's codes of a weight that a backward gathers."""
        forward = self.find()
        return weight.newest if forward is None else forward.sent.get(weight, weight.newest)

"""`StreamOrder`: finds accesses to the same memory that no order of streams protects, without a GPU.

FSDP2 runs on the CPU, where its streams and events are stand-ins that carry vector clocks: each stream counts its
operators, and waiting takes over the counts of what is waited for. An access is ordered after another one if its
stream's clock knows of it. What is found would be a race on a GPU, whether or not a run there happens to show it.
Only operators that go through torch's dispatcher are seen; the views they are given count as the whole storage.
"""

import contextlib
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# These look at shapes and addresses, or hand memory out, and read or write no element.
_NO_ACCESS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "set_", "is_pinned"}


class Stream:
    """Stand-in for a device stream.

    Args:
        priority: As of torch's streams; ignored.
        name: For messages.
    """

    def __init__(self, priority: int = 0, name: str = "a side stream") -> None:
        self.name = name
        self.clock: Counter[Stream] = Counter()

    def wait_stream(self, other: "Stream") -> None:
        """Order what comes after everything on another stream so far."""
        self.clock |= other.clock

    def wait_event(self, event: "Event") -> None:
        """Order what comes after what the event stands for."""
        self.clock |= event.clock

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event that stands for everything on this stream so far."""
        event = event or Event()
        event.clock = Counter(self.clock)
        return event


class Event:
    """Stand-in for a device event."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.clock: Counter[Stream] = Counter()

    def record(self, stream: Stream | None = None) -> "Event":
        """Stand for everything so far on a stream, by default the current one."""
        return (stream or torch.cpu.current_stream()).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait, by default the current one."""
        (stream or torch.cpu.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait, which is of no consequence to streams here."""


class Access(NamedTuple):
    """An operator on a stream; `time` is the count of the stream's operators."""

    stream: Stream
    time: int
    operator: str

    def is_before(self, stream: Stream) -> bool:
        """Return whether what `stream` does now is ordered after it."""
        return self.time <= stream.clock[self.stream]


class StreamOrder(TorchDispatchMode):
    """Records every operator that runs while it is entered.

    Attributes:
        races: Sentences about unordered accesses, with their number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: Counter[str] = Counter()
        self.compute = Stream(name="compute")
        self._current = self.compute
        self._streams = [self.compute]
        self._writes: dict[int, Access] = {}
        self._reads: dict[int, dict[Stream, Access]] = defaultdict(dict)
        self._allocated: dict[int, Stream] = {}
        self._freed: dict[Stream, list[Access]] = defaultdict(list)

    @contextlib.contextmanager
    def streams(self) -> Iterator["StreamOrder"]:
        """Put the stand-ins in place of the CPU's streams; models must be sharded inside."""

        @contextlib.contextmanager
        def use(stream: Stream | None) -> Iterator[None]:
            before, self._current = self._current, stream or self._current
            try:
                yield
            finally:
                self._current = before

        def current(device: object = None) -> Stream:
            return self._current

        def make(*args: Any, **kwargs: Any) -> Stream:
            self._streams.append(Stream(*args, **kwargs))
            return self._streams[-1]

        def synchronize(device: object = None) -> None:
            """Let the host wait for all streams: what it issues later, on any of them, comes after."""
            for one, other in itertools.permutations(self._streams, 2):
                one.wait_stream(other)

        stand_ins: dict[str, Any] = {
            "Stream": make,
            "Event": Event,
            "stream": use,
            "current_stream": current,
            "synchronize": synchronize,
        }
        with contextlib.ExitStack() as stack:
            for name, stand_in in stand_ins.items():
                stack.enter_context(mock.patch.object(torch.cpu, name, stand_in, create=True))
            stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", current))
            yield self

    def train(
        self,
        model: Any,
        optimizer: Any,
        x: torch.Tensor,
        *,
        event: bool = False,
        accumulate: bool = False,
        evaluate: bool = False,
        before: Callable[[int], Any] = lambda step: None,
        after: Callable[[], Any] = lambda: None,
    ) -> None:
        """Make three steps; with `event` the optimizer runs on a stream of its own, as users of FSDP2's event do it."""
        optimizing = torch.cpu.Stream(name="optimizer") if event else None  # pyrefly: ignore[bad-argument-count]
        with self:
            for step in range(3):
                if accumulate:
                    model.set_requires_gradient_sync(False)
                    model(x).sum().backward()
                    model.set_requires_gradient_sync(True)
                if evaluate:
                    with torch.no_grad():
                        model.eval()(x)
                        model.train()
                before(step)
                model(x).sum().backward()
                if optimizing is not None:
                    optimizing.wait_stream(torch.cpu.current_stream())
                    with torch.cpu.stream(optimizing):
                        optimizer.step()
                    model.set_post_optim_event(optimizing.record_event())
                    continue  # gradients stay: zeroing them would need to wait
                optimizer.step()
                optimizer.zero_grad()
                after()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator and order what it reads and writes."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or func.overloadpacket.__name__ in _NO_ACCESS:
            return result
        stream = self._current
        stream.clock[stream] += 1
        access = Access(stream, stream.clock[stream], f"{func.overloadpacket.__name__} on {stream.name}")
        written = self._memory((self._written(func, args, kwargs), result))
        for place in self._memory((args, kwargs)) - written:
            self._order(access, self._writes.get(place), "read", "written")
            self._reads[place][stream] = access
        for place in written:
            self._order(access, self._writes.get(place), "written", "written")
            for read in self._reads.pop(place, {}).values():
                self._order(access, read, "written", "read")
            self._writes[place] = access
        return result

    def _order(self, access: Access, earlier: Access | None, now: str, then: str) -> None:
        if earlier is not None and not earlier.is_before(access.stream):
            self.races[f"{now} by {access.operator}, {then} by {earlier.operator}, in no order"] += 1

    @staticmethod
    def _written(func: Any, args: tuple, kwargs: dict) -> list:
        found = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                positional = index < len(args) and not argument.kwarg_only
                found.append(args[index] if positional else kwargs.get(argument.name))
        return found

    def _memory(self, tree: Any) -> set[int]:
        """Return the storages of all tensors in a tree."""
        tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        plain = [part for tensor in tensors for part in self._plain(tensor)]
        return {self._place(tensor.untyped_storage()) for tensor in plain}

    def _plain(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            return [tensor]
        inner = [getattr(tensor, name) for name in flatten()[0]]
        # a DTensor names its mesh too
        return [plain for part in inner if isinstance(part, torch.Tensor) for plain in self._plain(part)]

    def _place(self, storage: torch.UntypedStorage) -> int:
        place = storage._cdata
        if place not in self._allocated:
            self._reuse(self._current)
            self._allocated[place] = self._current
            # `atexit` is a property, for which the stub leaves no slot
            weakref.finalize(storage, self._free, place).atexit = False  # pyrefly: ignore[missing-attribute]
        return place

    def _free(self, place: int) -> None:
        """Note the end of a storage: its memory goes back to the stream that it was allocated on."""
        uses = [*self._reads.pop(place, {}).values(), *filter(None, [self._writes.pop(place, None)])]
        self._freed[self._allocated.pop(place)] += uses

    def _reuse(self, stream: Stream) -> None:
        """Order an allocation, which may get any memory that was freed on its stream, after all uses of that."""
        for use in self._freed.pop(stream, []):
            if not use.is_before(stream) and use.stream is not stream:
                self.races[f"reused on {stream.name} after use by {use.operator}, in no order"] += 1

"""`RemainderMaster`: an exact float32 master in three bytes beside the FP8 code, and a list of what they cannot hold.

The three bytes are the lower ones of the float32 numbers; sign and exponent follow from code and scale
(`fp8_common._remainder`). While a step runs, the codes' own memory holds the fourth byte: values that wait for a scale
that all ranks agree on need no other place. The bytes belong to the codes that are there: before anything else changes
these, the master is made whole.
"""

import dataclasses
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from fp8_common import Format
from fp8_common.torch.plugin import ShardGeometry, dispatch
from fp8_te_init._compat import float32_like, local_of
from fp8_te_init._shards import group_of
from fp8_te_init._state import PrimaryState
from fp8_te_init._weight import primary_of

PART = 1 << 20
"""Elements that are joined, stepped and split at a time: 4 MiB of float32."""
COMPILED_PARTS = 4
"""Times as many in compiled code, whose calls cost as much as 100,000 elements, and which writes no float32."""

_Escapes = tuple[torch.Tensor, torch.Tensor]


class PartBytes(NamedTuple):
    """The bytes of one part of a master with one scale, to be stepped in their places.

    Attributes:
        codes: uint8 [n], a view; after a step the highest bytes.
        inverse: float32 [], what the scale is multiplied back with.
        lower: uint8 [3, n], a view.
        listed: int64 [k], the places, in order, of numbers that the bytes do not give back; None if there are none.
    """

    codes: torch.Tensor
    inverse: torch.Tensor
    lower: torch.Tensor
    listed: torch.Tensor | None


def can_be_joined(parameter: torch.Tensor) -> bool:
    """Return whether the master of a parameter can be kept in three bytes: that of an FP8 weight of this package."""
    primary = primary_of(parameter)
    if primary is None or primary.shape != primary.state.own_codes.shape:
        return False
    # A rank may hold no row; nothing has an address then.
    return primary.numel() == 0 or primary.is_all_of_its_storage


class RemainderMaster:
    """The lower three bytes of the masters of an FP8 weight.

    Args:
        parameter: The FP8 weight, plain or distributed.
        values: float32 of the rows held here; not owned.
        parts: Whether the rows may be read and written in parts.
        rounded: Round to the dtype of the weight before casts.
        compiled: Join, split and cast in code that torch.compile makes.

    Attributes:
        key: float32 of the shape of the weight, without memory.
        compiled: Whether compiled code is used.
    """

    def __init__(
        self, parameter: torch.Tensor, values: torch.Tensor, *, parts: bool, rounded: bool, compiled: bool
    ) -> None:
        self._parameter, self._rounded, self._in_parts = parameter, rounded, parts
        shape, device = self._state.own_codes.shape, values.device
        if compiled:
            dispatch.compiled_bytes(self._state.cast.fp8_format)  # refuses what it cannot do
        self.key = float32_like(parameter, torch.zeros((), device=device).expand(local_of(parameter).shape))
        self.compiled = compiled
        self._lower = torch.empty((3, *shape), dtype=torch.uint8, device=device)
        self._escapes: list[_Escapes | None] = [None] * len(self.parts())
        # Parts whose fourth byte is in the place of the code.
        self._waiting: set[int] = set()
        self._whole: torch.Tensor | None = None
        self._keys: torch.Tensor | None = None
        self.attach()
        self.set(values)

    @property
    def _state(self) -> PrimaryState:
        primary = primary_of(self._parameter)
        assert primary is not None  # noqa: S101  a parameter stays an FP8 weight: `can_be_joined`
        return primary.state

    @property
    def shape(self) -> torch.Size:
        """Of the rows held here."""
        return self._state.own_codes.shape

    @property
    def fmt(self) -> Format:
        """The format of the codes."""
        return self._state.cast.fp8_format

    @property
    def has_whole_rows(self) -> bool:
        """Whether no other rank holds a part of a row that is held here."""
        return self._state.geometry.dim == 0

    @property
    def nbytes(self) -> int:
        """Bytes beside the codes: three for each element, the list, and float32 values where they are whole for now."""
        listed = sum(places.nbytes + values.nbytes for places, values in filter(None, self._escapes))
        return self._lower.nbytes + listed + (0 if self._whole is None else self._whole.nbytes)

    @property
    def escaped(self) -> int:
        """How many elements are listed with their values."""
        return sum(places.numel() for places, _ in filter(None, self._escapes))

    def attach(self) -> None:
        """Have the weight tell before its codes or scales change; whoever was told until now becomes whole."""
        state = self._state
        if state.dependent is None or state.dependent() != self.keep_whole:
            state.about_to_change()
            state.dependent = weakref.WeakMethod(self.keep_whole)

    def keep_whole(self) -> None:
        """Keep float32 values from now on, until the next `store`: the codes are about to become others."""
        if self._whole is None:
            self._whole = self.values()
            self._forget_bytes()

    def _forget_bytes(self) -> None:
        self._waiting.clear()
        self._escapes[:] = [None] * len(self._escapes)
        self._keys = None

    def parts(self) -> list[slice]:
        """Return the parts of the rows held here; one, which may be empty, where they are not to be cut."""
        shape = self._state.own_codes.shape
        # A weight that is cut along another dimension is not cut twice.
        cut = self._in_parts and self.has_whole_rows
        most = PART * COMPILED_PARTS if self.compiled else PART
        rows = max(1, most // max(1, shape[1:].numel())) if cut else max(1, shape[0])
        # torch computes what is left of 16 elements in another way: only the last part may end so.
        rows -= rows % 16 if cut and rows > 16 else 0
        return [slice(start, min(start + rows, shape[0])) for start in range(0, max(1, shape[0]), rows)]

    def tensor(self) -> torch.Tensor:
        """Return a copy of the master, distributed like the parameter."""
        return float32_like(self._parameter, self.values().view(local_of(self._parameter).shape))

    def values(self) -> torch.Tensor:
        """Return float32 [n, ...], a copy of the rows held here."""
        if self._whole is not None:
            return self._whole.clone()
        values = torch.empty(self._lower.shape[1:], device=self._lower.device)
        for index, part in enumerate(self.parts()):
            values[part] = self.read(index)
        return values

    def read(self, index: int) -> torch.Tensor:
        """Return float32 of one part, a copy."""
        part, state = self.parts()[index], self._state
        if self._whole is not None:
            return self._whole[part].clone()
        codes, lower, fmt = state.own_codes[part], self._lower[:, part], state.cast.fp8_format
        if index in self._waiting:
            return dispatch.join_bytes(codes, lower)
        inverse = self._of_part(dispatch.usable_inverse(state.scale), part)
        if self.compiled:
            values = dispatch.compiled_bytes(fmt).join(codes, inverse, lower)
        else:
            values = dispatch.join_scaled(codes, inverse, lower, fmt)
        escapes = self._escapes[index]
        if escapes is not None:
            values.view(-1)[escapes[0].long()] = escapes[1]
        return values

    def write(self, index: int, values: torch.Tensor) -> None:
        """Take over new values of one part, to be cast by the next `store`: their fourth byte goes to the codes."""
        part = self.parts()[index]
        if index == 0:
            self._keys = None
        self._add_keys(self._state.layout.keys(self._to_cast(values), self._geometry_of(part)))
        if self._whole is not None:
            self._whole[part] = values
            return
        split = dispatch.compiled_bytes(self._state.cast.fp8_format).split if self.compiled else dispatch.split_bytes
        split(values, self._lower[:, part], self._state.own_codes[part])
        self._waiting.add(index)
        self._escapes[index] = None

    @property
    def is_in_bytes(self) -> bool:
        """Whether a step can be made on codes and lower bytes: nothing else holds the values, or rounds them before."""
        return self._state.scale.numel() == 1 and self._whole is None and not self._waiting and not self._rounded

    def bytes_of(self, index: int) -> PartBytes:
        """Return the bytes of one part; `is_in_bytes` has to say so before the step begins."""
        part, escapes = self.parts()[index], self._escapes[index]
        inverse = dispatch.usable_inverse(self._state.scale).reshape(())
        codes, lower = self._state.own_codes[part].view(-1), self._lower[:, part].flatten(1)
        return PartBytes(codes, inverse, lower, None if escapes is None else escapes[0].long())

    def read_at(self, index: int, places: torch.Tensor) -> torch.Tensor:
        """Return float32 [k] at int64 places [k], in order, of one part, among them all that are listed."""
        held, escapes = self.bytes_of(index), self._escapes[index]
        values = dispatch.join_scaled(held.codes[places], held.inverse, held.lower[:, places], self.fmt)
        if escapes is not None:
            values[torch.searchsorted(places, escapes[0].long())] = escapes[1]
        return values

    def stepped(self, index: int, key: torch.Tensor) -> None:
        """Note that all four bytes of a part were written in their places; `key`, int32 [], is that of their amax."""
        self._waiting.add(index)
        self._escapes[index] = None
        if index == 0:
            self._keys = None
        # The largest stands for all that the scale holds for.
        amax = key.view(torch.float32).view(*(1 for _ in self.shape))
        self._add_keys(self._state.layout.keys(amax, self._geometry_of(self.parts()[index])))

    def _add_keys(self, keys: torch.Tensor) -> None:
        self._keys = keys if self._keys is None else torch.maximum(self._keys, keys)

    def set(self, values: torch.Tensor) -> None:
        """Take over values; they are whole until the codes are what they round to."""
        if self._waiting:
            self.restore()
        self._whole = values.reshape(self._lower.shape[1:]).to(self._lower.device, torch.float32, copy=True)
        self._forget_bytes()
        self.compact()

    def compact(self) -> None:
        """Give up float32 values if the present codes are what they round to."""
        codes = self._state.own_codes
        if self._whole is None:
            return
        if all(torch.equal(self._cast(part, self._whole[part]), codes[part]) for part in self.parts()):
            self._split_all()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other rows; None if this rank holds all."""
        return group_of(self._parameter)

    def keys(self) -> torch.Tensor:
        """Return the int32 keys [k] of the amax of the values."""
        if self._keys is None:
            for index in range(len(self.parts())):
                part = self.parts()[index]
                self._add_keys(self._state.layout.keys(self._to_cast(self.read(index)), self._geometry_of(part)))
        assert self._keys is not None  # noqa: S101  there is always a part
        return self._keys

    def store(self, keys: torch.Tensor, *, step: bool) -> None:
        """Cast the values with scales from the agreed `keys`; the lower bytes stay as they are."""
        state = self._state
        for index in range(len(self.parts())):
            self._wait(index)
        # Not told of this change: the values do not hang on codes and scale now.
        state.dependent = None
        try:
            state.take_keys(keys, step=step)
        finally:
            self.attach()
        state.unagreed, state.held = False, None
        self._split_all()

    def restore(self) -> None:
        """Put codes back where values wait, with the present scale: the step did not come to its end."""
        for index in sorted(self._waiting):
            self._split(index)
        self._waiting.clear()
        self._keys = None

    def _wait(self, index: int) -> None:
        if self._whole is not None or index in self._waiting:
            return
        self._state.own_codes[self.parts()[index]] = dispatch.top_byte(self.read(index))
        self._waiting.add(index)
        self._escapes[index] = None

    def _split_all(self) -> None:
        for index in range(len(self.parts())):
            self._split(index)
        self._waiting.clear()
        self._whole = self._keys = None

    def _split(self, index: int) -> None:
        """Write the codes of one part, its lower bytes if they are not there yet, and what these cannot hold."""
        part, state = self.parts()[index], self._state
        codes, lower, fmt = state.own_codes[part], self._lower[:, part], state.cast.fp8_format
        if self.compiled and self._whole is None and not self._rounded:
            top, inverse = codes.clone(), dispatch.usable_inverse(state.scale)
            scales = self._of_part(state.scale, part), self._of_part(inverse, part)
            may_fail = dispatch.compiled_bytes(fmt).cast(codes, *scales, lower)
            if may_fail < 0 or dispatch.is_unusual(state.scale):
                self._list(index, lambda places: dispatch.join_bytes(top.view(-1)[places], lower.flatten(1)[:, places]))
            return
        values = self.read(index)
        codes.copy_(self._cast(part, values))
        if self._whole is not None:
            dispatch.split_bytes(values, lower, None)
        self._list(index, lambda places: values.view(-1)[places])

    def _list(self, index: int, values_at: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Keep the values of a part that its codes and lower bytes do not give back."""
        part, state = self.parts()[index], self._state
        codes, fmt = state.own_codes[part], state.cast.fp8_format
        # What was rounded before may be far from its code: float16 has subnormals where float32 has none.
        if self._rounded or dispatch.is_unusual(state.scale):
            places = torch.arange(codes.numel(), device=codes.device)
        else:
            places = dispatch.places_that_may_fail(codes, fmt)
        self._escapes[index] = None
        if not places.numel():
            return
        values, scale = values_at(places), self._of_part(state.scale, part)
        scale = scale if scale.numel() == 1 else scale.expand(codes.shape).reshape(-1)[places]
        failed = dispatch.not_joined(values, codes.reshape(-1)[places], scale, fmt, everywhere=True)
        if failed.numel():
            listed = places[failed].to(torch.int32 if codes.numel() < 1 << 31 else torch.int64)
            self._escapes[index] = (listed, values[failed])

    def _cast(self, part: slice, values: torch.Tensor) -> torch.Tensor:
        state = self._state
        return state.layout.cast_part(self._to_cast(values), state.scale, self._geometry_of(part)).view(torch.uint8)

    def _to_cast(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._parameter.dtype) if self._rounded else values

    def _of_part(self, scales: torch.Tensor, part: slice) -> torch.Tensor:
        """Return scales that broadcast to a part, of those of the whole weight."""
        state = self._state
        return state.layout.of_part(scales, state.own_codes[part].shape, self._geometry_of(part))

    def _geometry_of(self, part: slice) -> ShardGeometry:
        whole = self._state.geometry
        return dataclasses.replace(whole, first_index=whole.first_index + part.start)

"""`PrimaryState`: codes, scales and place of the rows that a rank holds of one primary weight.

All tensors that alias the storage share one `PrimaryState`. Scales are replaced, never written: a copy may share them.
"""

import copy
import dataclasses
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch import torch_dtype, update_history
from fp8_common.torch.plugin import ScaleLayout, ShardGeometry, delayed_ops, dispatch
from fp8_te_init._compat import version_of
from fp8_te_init._config import GatherFormat
from fp8_te_init._part_layout import Part, PartLayout
from fp8_te_init._rows import Rows
from fp8_te_init._stacked_layout import layout_of

if TYPE_CHECKING:
    from fp8_te_init._kept_values import KeptValues


logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class PrimaryState:
    """One storage of FP8 codes.

    Attributes:
        cast: How the weight is cast.
        codes: uint8 [rows, columns]: all rows of the weight, or this rank's, with padding at the end. Of a stacked
            weight [experts, rows, columns], here and below: the experts are the rows.
        scale: float32 scales of the whole weight, into FP8; the shape that the layout of `cast` gives.
        full_shape: [rows, columns] of the whole weight; under tensor parallelism those of this rank's part, which
            FSDP2 cuts and gathers.
        first_row: Index of the first row held here, in `full_shape`.
        part: Which part `full_shape` is of a larger weight; None if it is the whole.
        sharded: Whether other ranks may hold other rows, so that scales have to be agreed on.
        gather: What FSDP2 sends.
        history: float32 [window] of delayed scaling, newest first; None otherwise.
        unagreed: Whether values were written here whose scale the ranks have not agreed on yet.
        held: The values of such a write, [rows, columns], where nothing else keeps them.
        kept: What keeps the high-precision values.
        travels: The dtype that it stood for when it was found that FSDP2 can gather it; None before that.
        writes: How often an operator wrote to it, through any alias: torch counts no writes through `.data`.
        told: Whether a warning said that a change was rounded.
        unscaled: Whether codes were put in place whose scales have not come yet.
        lent: The copy of the codes that the last state dict got.
        borrower: That state dict.
        before_load: What the weight was before a state dict that is being loaded was copied to it.
    """

    cast: CastRecipe
    codes: torch.Tensor
    scale: torch.Tensor
    full_shape: torch.Size
    first_row: int = 0
    part: Part | None = None
    sharded: bool = False
    gather: GatherFormat = "fp8"
    history: torch.Tensor | None = None
    unagreed: bool = False
    held: torch.Tensor | None = None
    kept: "KeptValues | None" = None
    travels: torch.dtype | None = None
    writes: int = 0
    told: bool = False
    unscaled: bool = False
    lent: "weakref.ref[torch.Tensor] | None" = None
    borrower: "weakref.ref[OrderedDict] | None" = None
    before_load: Any = None

    @classmethod
    def empty(cls, shape: torch.Size, cast: CastRecipe, gather: GatherFormat, device: torch.device) -> "PrimaryState":
        """Return the state of a whole weight of zeros."""
        window = cast.policy.history  # 0 for every scaling but delayed
        return cls(
            cast=cast,
            codes=torch.zeros(shape, dtype=torch.uint8, device=device),
            scale=torch.ones(layout_of(cast, shape).shape(shape), dtype=torch.float32, device=device),
            full_shape=shape,
            gather=gather,
            history=torch.zeros(window, dtype=torch.float32, device=device) if window else None,
        )

    def around(self, codes: torch.Tensor, *, sharded: bool | None = None) -> "PrimaryState":
        """Return the state of other storage for the same weight: it keeps no high-precision values."""
        scale, history = self.scale, self.history
        if scale.device != codes.device:
            # a meta tensor has no values to move
            make = torch.empty_like if scale.is_meta else torch.Tensor.to
            scale = make(scale, device=codes.device)
            history = None if history is None else make(history, device=codes.device)
        return dataclasses.replace(
            self,
            codes=codes,
            scale=scale,
            history=history,
            sharded=self.sharded if sharded is None else sharded,
            unagreed=False,
            held=None,
            kept=None,
            travels=None,
            unscaled=False,
            lent=None,
            borrower=None,
            before_load=None,
        )

    def __deepcopy__(self, memo: dict) -> "PrimaryState":
        """Copy codes and scales; the module that is copied brings its high-precision values itself."""
        twin = self.around(self.codes.clone())
        twin.scale, twin.unagreed, twin.held = self.scale.clone(), self.unagreed, copy.deepcopy(self.held, memo)
        memo[id(self)] = twin
        return twin

    def lend(self, codes: torch.Tensor, borrower: object) -> torch.Tensor:
        """Return a copy of codes for a state dict: the same one under each name of a tied weight."""
        known = None if self.lent is None else self.lent()
        if known is not None and self.borrower is not None and self.borrower() is borrower:
            return known
        with torch.inference_mode(False):  # inference tensors count no writes
            copied = codes.clone()
        self.lent = weakref.ref(copied)
        # a plain dict that somebody collects in cannot be referred to
        self.borrower = weakref.ref(borrower) if isinstance(borrower, OrderedDict) else None
        return copied

    def check_loaded(self) -> None:
        """Refuse codes without scales, and warn if a state dict was written to and not loaded."""
        if self.unscaled:
            raise Fp8Error(
                f"Codes were put in an FP8 weight {tuple(self.full_shape)}, and the scales that belong to them did not "
                "come: a load was refused or has failed. Load a whole state dict first."
            )
        if self.lent is None:
            return
        lent = self.lent()
        if lent is None or version_of(lent):
            self.lent = None
        if lent is not None and version_of(lent):
            logger.warning(
                "A state dict with the FP8 codes of a weight %s was written to (dcp.load), and not loaded: the model "
                "has the weights of before. Call model.load_state_dict(state_dict) once all of it is read.",
                tuple(self.full_shape),
            )

    @property
    def is_rounded(self) -> bool:
        """Whether nothing but codes is known of the values."""
        return self.held is None and (self.kept is None or self.kept.source is None)

    @property
    def layout(self) -> ScaleLayout:
        """How the scales lie on the weight."""
        return layout_of(self.cast, self.full_shape) if self.part is None else PartLayout(self.cast, self.part)

    @property
    def whole_shape(self) -> torch.Size:
        """[rows, columns] of the whole weight, however it is distributed."""
        return self.full_shape if self.part is None else self.part.whole

    @property
    def place(self) -> Rows:
        """Which rows and columns of the whole weight are held here."""
        # A rank beyond the last row (more ranks than rows) has the empty range at the end.
        return self.place_of_rows(min(self.first_row, self.full_shape[0]), self.rows)

    def place_of_rows(self, first: int, count: int) -> Rows:
        """Return where `count` rows from `first`, an index in `full_shape`, are in the whole weight."""
        if self.part is None:
            return Rows(first, first + count)
        (row, column), width = self.part.first, self.full_shape[1]
        columns = None if width == self.part.whole[1] else (column, column + width)
        return Rows(row + first, row + first + count, columns)

    def scale_of_all_rows(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the scales of `full_shape` among the `scale` of the whole weight: a view."""
        layout = self.layout
        return layout.own(scale, self.full_shape) if isinstance(layout, PartLayout) else scale

    @property
    def geometry(self) -> ShardGeometry:
        """Which part of `full_shape` is held here."""
        return ShardGeometry(full_shape=self.full_shape, first_index=self.first_row)

    @property
    def rows(self) -> int:
        """Number of rows of the weight that are held here, without padding."""
        return max(0, min(self.codes.shape[0], self.full_shape[0] - self.first_row))

    @property
    def own_codes(self) -> torch.Tensor:
        """uint8 [n, columns], the rows of the weight that are held here, without padding."""
        return self.codes[: self.rows]

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized storage [rows, columns], padding included."""
        scale = self._row_scales(self.codes)
        return dispatch.dequantize(self.codes.view(torch_dtype(self.cast.format)), scale, self.cast.fp8_format, dtype)

    def own_values(self) -> torch.Tensor:
        """Return float32 [n, columns], dequantized, without padding."""
        raw = dispatch.values(self.own_codes.view(torch_dtype(self.cast.format)), self.cast.fp8_format)
        return raw * self.own_scale_inv()

    def own_scale_inv(self) -> torch.Tensor:
        """Return float32 scales back from FP8 that broadcast to [n, columns]."""
        return dispatch.reciprocal(self._row_scales(self.own_codes))

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of values [n, columns] of the rows held here, with the present scales."""
        return self.layout.cast_part(values, self.scale, self.geometry).view(torch.uint8)

    def _row_scales(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layout.of_part(self.scale, rows.shape, self.geometry)

    def keys(self, values: torch.Tensor) -> torch.Tensor:
        """Return the int32 keys [k] of values [n, columns] that MAX combines over ranks."""
        return self.layout.keys(values, self.geometry)

    def store(self, values: torch.Tensor, keys: torch.Tensor, *, step: bool) -> None:
        """Quantize values [n, columns] of the rows held here with scales from the agreed `keys`.

        Args:
            values: float16, bfloat16 or float32.
            keys: int32 [k], combined over ranks.
            step: Whether an optimizer made the values: delayed scaling then uses the scale of earlier steps and
                records this one; otherwise the weight starts anew.
        """
        # First: `quantized` reads the scale that this makes.
        self.take_keys(keys, step=step)
        self.codes[: self.rows] = self.quantized(values)
        self.unagreed, self.held = False, None

    @property
    def casts_alone(self) -> bool:
        """Whether scales follow from the values held here: all of the weight, and no history."""
        return self.history is None and self.part is None and self.rows == self.full_shape[0]

    def store_alone(self, values: torch.Tensor) -> None:
        """Quantize values of the whole weight with scales of their own, of which `casts_alone` has to say that it can.

        Amax, scales and codes come from one cast, with the bits of `store`.
        """
        cast = self.layout.cast_whole(values)
        self._take(cast.codes.view(torch.uint8), cast.scale.view(self.scale.shape))

    def take_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Take over uint8 codes [n, columns] of the rows held here and the scales of the whole weight."""
        self._take(codes, scale)

    def _take(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.scale, self.unscaled = scale, False
        self.codes[: self.rows] = codes
        self.unagreed, self.held = False, None

    def take_keys(self, keys: torch.Tensor, *, step: bool) -> None:
        """Make the scale from the agreed `keys`, as `store` does; the codes are left to the caller."""
        # The keys are those of the whole weight, also where this rank holds a part: the scale is the same everywhere.
        amax = self.layout.amax(keys, self.full_shape)
        if self.history is not None:
            amax = self._recorded(amax, step=step)
        # an amax that says nothing leaves a delayed scale as it was, and a current one is 1
        previous = None if self.history is None else self.scale
        self.unscaled = False
        self.scale = dispatch.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy, previous)

    def _recorded(self, amax: torch.Tensor, *, step: bool) -> torch.Tensor:
        """Record an amax and return the one that the scale of now is made from."""
        if self.history is None:
            return amax
        algo = self.cast.policy.algo
        # Before the update: a step is quantized with what earlier steps say, its own amax counts from the next one.
        known = delayed_ops.reduce_history(self.history, algo)
        before = self.history if step else torch.zeros_like(self.history)
        self.history, _ = update_history(before, amax, algo)
        return known if step else amax

    def take_scale(self, scale: torch.Tensor, history: torch.Tensor | None = None) -> None:
        """Use scales from elsewhere (a checkpoint): the codes that belong to them are put in place by the caller."""
        self.scale = scale.to(self.codes.device, copy=True)
        if self.history is not None:
            self.history = torch.zeros_like(self.history) if history is None else history.to(self.codes.device).clone()
        self.unagreed, self.held, self.unscaled = False, None, False

    def write_drawn(self, whole: torch.Tensor, keep: "Callable[[torch.Tensor], None] | None") -> None:
        """Take over what is held here of a whole weight [rows, columns] that every rank has drawn."""
        self.writes += 1
        own = whole[self.place.inside()]
        # the amax needs no reduction if the ranks drew the same weight; whether they did is found at the next gather
        keys = layout_of(self.cast, self.whole_shape).keys(whole, ShardGeometry(full_shape=self.whole_shape))
        self.store(own, keys, step=False)
        self._wait_for_agreement(own, keep)

    def write(self, values: torch.Tensor, keep: "Callable[[torch.Tensor], None] | None" = None) -> None:
        """Take over new values [rows, columns] of the storage.

        A whole weight is quantized with its own scale. Where other ranks hold rows, the scale is this rank's guess
        until the ranks agree (`_scale_agreement.agree_on`, at the next gather at the latest).

        Args:
            values: Padding included.
            keep: Called with the values [n, columns] instead of holding them here.
        """
        own = values[: self.rows]
        if self.casts_alone:
            self.store_alone(own)
        else:
            self.store(own, self.keys(own), step=False)
        self._wait_for_agreement(own, keep)

    def _wait_for_agreement(self, own: torch.Tensor, keep: "Callable[[torch.Tensor], None] | None") -> None:
        if self.sharded:
            self.unagreed = True
            # A clone: `own` is a part of a temporary, or of what the caller goes on writing to.
            self.held = own.clone() if keep is None else None
        if keep is not None:
            keep(own)

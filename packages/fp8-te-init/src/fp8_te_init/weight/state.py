"""`WeightState`: storage of FP8 codes, their scales, and the preserved unrounded values.

All tensors that alias the storage share one `WeightState`, so nothing that is known of a weight can be lost between
them. Scales and history are buffers of the layer: they are written in place and never replaced.
"""

import dataclasses
import functools
import logging
import weakref
from typing import Any, Literal

import torch

from fp8_common import CastRecipe, Format, Fp8Error
from fp8_common.torch import casts, decoding, numerics, torch_dtype, update_history
from fp8_common.torch.compat import local_of, version_of
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid
from fp8_te_init.errors import StaleInitError
from fp8_te_init.weight.part import Part

logger = logging.getLogger(__name__)

Release = Literal["seed", "forward", "manual"]
"""When the values before rounding are dropped: once no master needs them, after the first forward, or by the user."""

Record = Literal["step", "start", "nothing"]
"""Effect of an amax on delayed scaling: next history entry, first entry, or none."""

Due = Literal["check", "agreement"]
"""Condition to meet before the codes of shards are gathered."""

CODES_ALONE = "Codes were loaded without the scales that belong to them"
SCALES_ALONE = "Scales were overwritten without the codes that belong to them"
_ADVICE = {
    CODES_ALONE: "The state dict lacks them, or a load has failed: load a whole state dict.",
    SCALES_ALONE: "Load both with load_state_dict; average the masters of a MasterOptimizer, not a model's buffers.",
}


@dataclasses.dataclass(eq=False, kw_only=True, slots=True, weakref_slot=True)
class WeightState:
    """One storage of FP8 codes.

    Attributes:
        part: Which weight it is, and which of its rows.
        codes: uint8 [rows, columns]: all rows of the weight, or this rank's, with padding at the end.
        scale: float32 scales of the whole weight, into FP8; their shape follows from the granularity.
        history: float32 [window] of delayed scaling, newest first; None without it.
        start: The values before rounding of the rows held here, [n, columns]; None if they are not known.
        keeps: When `start` is dropped; None if values that are written are not kept.
        pending: Condition to meet before codes of shards are gathered: "agreement" of all ranks on a scale, for which
            `start` is kept, or a "check" that FSDP2 can gather them. None if nothing is pending, as for a whole weight.
        master: The float32 master, held weakly, which optimizers of the same weight share; and the dtype to which it is
            rounded before it is quantized.
        displaced: The weight before the last write, with its master as `start`, until the next step: an average that is
            put in for an evaluation and taken out again costs the master no bit.
        settled: Of the moment when codes and scales were last known to belong together: the versions of both, and the
            float32 scales back from FP8. The first is None while the scales of loaded codes have not come.
    """

    part: Part
    codes: torch.Tensor
    scale: torch.Tensor
    history: torch.Tensor | None = None
    start: torch.Tensor | None = None
    keeps: Release | None = None
    pending: Due | None = None
    master: "tuple[weakref.ref[torch.Tensor], torch.dtype] | None" = None
    displaced: "WeightState | None" = None
    settled: "tuple[int | None, int, torch.Tensor] | None" = None

    @classmethod
    def empty(cls, like: torch.Tensor, cast: CastRecipe, keeps: Release | None = None) -> "WeightState":
        """Return the state of zeros like `like` [rows, columns]."""
        window, grid = cast.policy.history, ScaleGrid(cast)  # 0 for every scaling but delayed
        return cls(
            part=Part(grid=grid, dtype=like.dtype, full_shape=like.shape),
            codes=torch.zeros(like.shape, dtype=torch.uint8, device=like.device),
            scale=torch.ones(grid.shape(like.shape), device=like.device),
            history=torch.zeros(window, device=like.device) if window else None,
            keeps=keeps,
        )

    def __post_init__(self) -> None:
        """Mark codes and scales as consistent unless another state is given."""
        if self.settled is None:
            self.mark_consistent()

    def around(self, codes: torch.Tensor, **changes: Any) -> "WeightState":
        """Return a state on other storage: own scales, the same unrounded values."""
        self.follow_loads()
        own: dict[str, Any] = {"master": None, "displaced": None, "settled": None}
        own |= {name: _copied(getattr(self, name), codes.device) for name in ("scale", "history")}
        twin = dataclasses.replace(self, codes=codes, **(own | changes))
        if twin.sharded and twin.pending is None:
            twin.pending = "check"
        if self.loading:
            twin.mark_scales_pending()
        elif self.problem is not None:  # scales alone; a copy has no other record of them
            twin.settled = version_of(twin.codes), -1, self.scale_inv.to(codes.device)
        return twin

    # ------------------------------------------------------------ which part of the weight this is

    @property
    def cast(self) -> CastRecipe:
        """Cast of the weight."""
        return self.part.grid.cast

    @property
    def dtype(self) -> torch.dtype:
        """float32, bfloat16 or float16: the high-precision dtype of the weight."""
        return self.part.dtype

    @property
    def full_shape(self) -> torch.Size:
        """[rows, columns] of the whole weight."""
        return self.part.full_shape

    @property
    def first_row(self) -> int:
        """Index of the first row that is held here."""
        return self.part.first_row or 0

    @property
    def sharded(self) -> bool:
        """True if other ranks may hold rows, so that scales need agreement."""
        return self.part.first_row is not None

    @property
    def rows(self) -> int:
        """Number of rows of the weight that are held here, without padding."""
        return max(0, min(self.codes.shape[0], self.part.full_shape[0] - (self.part.first_row or 0)))

    @property
    def own_codes(self) -> torch.Tensor:
        """uint8 [n, columns], the rows that are held here, without padding."""
        return self.codes[: self.rows]

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales, in both directions, and history."""
        return 2 * self.scale.nbytes + (0 if self.history is None else self.history.nbytes)

    @property
    def displaced_bytes(self) -> int:
        """Bytes of the weight before the last write, with its master."""
        held = self.displaced
        return 0 if held is None or held.start is None else held.codes.nbytes + held.start.nbytes + held.displaced_bytes

    @property
    def fmt(self) -> Format:
        """The format of the codes."""
        return self.part.grid.cast.fp8_format

    @property
    def float8_codes(self) -> torch.Tensor:
        """The storage as torch's float8 dtype."""
        return self.codes.view(torch_dtype(self.cast.format))

    @property
    def scale_inv(self) -> torch.Tensor:
        """float32 scales back from FP8, of the shape of `scale`; read only."""
        assert self.settled is not None  # noqa: S101  from `__post_init__` on
        return self.settled[2]

    # ------------------------------------------------------------ between codes and values

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return dequantized values [n, columns] of the rows that are held here."""
        return self.all_values(dtype)[: self.rows]

    def all_values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized storage, padding included."""
        self.check()
        scale_inv = self.part.grid.of_part(self.scale_inv, self.codes.shape, self.part.region)
        return decoding.dequantize(self.float8_codes, scale_inv, self.fmt, dtype)

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of local values [n, columns] with current scales."""
        return self.part.grid.quantize_part(values, self.scale, self.part.region).view(torch.uint8)

    def expanded_scale_inv(self) -> torch.Tensor:
        """Return float32 scales back from FP8 that broadcast to [n, columns]."""
        return self.part.grid.of_part(self.scale_inv, self.own_codes.shape, self.part.region)

    def amax_bits(self, values: torch.Tensor) -> torch.Tensor:
        """Return int32 [k], bits of absolute maxima, MAX-reduced to scales."""
        return self.part.grid.amax_bits(values, self.part.region)

    def quantize_(self, values: torch.Tensor, bits: torch.Tensor | None, *, record: Record = "start") -> None:
        """Write codes of values [n, columns] and their scales from `bits`.

        Args:
            values: float16, bfloat16 or float32, on the device of the codes.
            bits: `amax_bits`, combined over ranks; None makes the scales of these values alone.
            record: Effect on delayed scaling. An optimizer's "step" is cast with the scale of earlier steps; everything
                else with the scale from `bits`.
        """
        if bits is None and self.history is None and self.rows == self.part.full_shape[0]:
            cast = self.part.grid.quantize_whole(values)  # amax, scales and codes in one pass, with the bits of below
            self.scale.copy_(cast.scale.view(self.scale.shape))
            self.codes[: len(values)].copy_(cast.codes.view(torch.uint8))
            self.mark_consistent(cast.scale_inv.view(self.scale.shape))
        else:
            self.set_scale(self.amax_bits(values) if bits is None else bits, record)
            self.codes[: len(values)].copy_(self.quantized(values))
            self.mark_consistent()
        if self.keeps is None:
            self.start = None
        self._has_agreed()

    def set_scale(self, bits: torch.Tensor, record: Record) -> None:
        """Set scales and history from agreed bits; the caller writes the codes."""
        amax, previous = self.part.grid.amax(bits, self.full_shape), None
        if self.history is not None:
            algo, previous = self.cast.policy.algo, self.scale
            # before the update: the amax of a step counts from the next one on
            known = numerics.reduce_history(self.history, algo)
            if record != "nothing":
                before = self.history if record == "step" else torch.zeros_like(self.history)
                self.history.copy_(update_history(before, amax, algo)[0])
            amax = known if record == "step" else amax
        self.scale.copy_(casts.scale_from_amax(amax, self.fmt, self.cast.policy, previous))

    def write(self, values: torch.Tensor, *, replaces: bool = True, fresh: bool = False) -> None:
        """Set new values [n, columns]: codes, unrounded values and master.

        The ranks agree on a scale later.

        Values equal to the rounding of the current weight, or of the weight before the last write, leave it unchanged:
        user code read them and wrote them back.

        Args:
            values: float16, bfloat16 or float32, on the device of the codes.
            replaces: Whether they replace the present values; an edit in several steps is one change otherwise.
            fresh: Whether the values were created here, so that they cannot be read-back values. The host does not
                wait.
        """
        values = values.detach()
        for held in () if fresh else (self, self.displaced):
            if held is None or held.problem is not None or not numerics.same_bits(values, held.values(values.dtype)):
                continue
            if held is not self:
                self._put_back(held)
            elif self.sharded:  # as on ranks whose rows did change
                self._take_start(self.best_values())
            return
        self.displace(replaces)
        self.quantize_(values, None)
        if self.displaced is not None:
            self.displaced.displaced = None
        self._take_start(values)
        self._set_master(values)

    def take(self, other: "WeightState", row: int = 0) -> None:
        """Copy codes, scales and unrounded values of an equal-shaped weight.

        Rows start at `row`.
        """
        refused, moves = other.problem is not None, other.sharded and self.rows == 0
        self.displace()
        if moves:  # FSDP2 pads a shard in the first forward, which may come while another weight is put in
            self.displaced = other.displaced
        if self.sharded:
            self.part = dataclasses.replace(self.part, first_row=other.first_row + row)
        self.own_codes.copy_(other.codes[row : row + self.rows])
        if self.scale is not other.scale:
            self.scale.copy_(other.scale)
            if self.history is not None and other.history is not None:
                self.history.copy_(other.history)
            self.pending = other.pending or "check"
        known = self.keeps is not None or self.pending == "agreement" or self.live_master is not None
        self.start = other.start[row : row + self.rows].clone() if known and other.start is not None else None
        if refused:  # FSDP2 copies after a load, on ranks with padding alone: all ranks raise at the next use
            self.mark_scales_pending()
            return
        self.mark_consistent()
        self.follow_codes()

    def _take_start(self, values: torch.Tensor) -> None:
        """Keep unrounded values while needed; in shards, until scales are agreed."""
        if self.sharded:
            self.pending = "agreement"
        if self.keeps is not None:
            self.start = values.to("cpu", copy=True)
        elif self.sharded:
            self.start = values.clone()

    def _put_back(self, held: "WeightState") -> None:
        """Be the weight before the last write again."""
        exact: Any = held.start
        made_of = held.made_of(exact)
        self.own_codes.copy_(held.own_codes)
        self.scale.copy_(held.scale)
        if self.history is not None and held.history is not None:
            self.history.copy_(held.history)
        self.start = self.displaced = None
        self.mark_consistent()
        self._take_start(exact if made_of is None else made_of)
        self._set_master(exact)

    # ------------------------------------------------------------ the master

    @property
    def live_master(self) -> torch.Tensor | None:
        """The float32 master of local rows in its optimizer, or None."""
        master = None if self.master is None else self.master[0]()
        if master is None:
            return None
        local = local_of(master)
        return master if (local.shape, local.device) == (self.own_codes.shape, self.device) else None

    def made_of(self, master: torch.Tensor | None) -> torch.Tensor | None:
        """Return the values that a matching master [n, columns] was quantized from.

        None otherwise.
        """
        if master is None or self.master is None:
            return None
        values = local_of(master).detach().to(self.master[1])
        return values if torch.equal(self.quantized(values), self.own_codes) else None

    @torch.no_grad()
    def _set_master(self, values: Any) -> None:
        master = self.live_master
        if master is not None:
            # through `.data`, which counts as no change that waits for `write_back`
            local_of(master).data.copy_(values)

    def displace(self, replaces: bool = True) -> None:
        """Record the current weight with its master before a write."""
        self.follow_loads()
        master = self.live_master
        if master is None:
            self.displaced = None
        elif replaces or self.displaced is None:
            snapshot = {"start": local_of(master).detach().clone(), "master": self.master, "displaced": self.displaced}
            self.displaced = self.around(self.codes.clone(), **snapshot)

    def follow_codes(self) -> None:
        """Update the master from external codes, unless they are already its rounding."""
        if self.live_master is not None:
            self._set_master_of_codes()
        if self.displaced is not None:
            self.displaced.displaced = None
        if self.keeps is None and self.pending != "agreement":
            self.start = None

    def _set_master_of_codes(self) -> None:
        if self.start is not None:
            self._set_master(self.start)
            return
        if self.made_of(self.live_master) is not None:
            return
        held = self.displaced
        while held is not None:  # the weight before this change, and before the one before
            if held.holds_codes_of(self):
                # codes came with their scales: unlike after values, ranks have nothing to agree on
                self._set_master(held.start)
                self.displaced = None
                return
            held = held.displaced
        tell_of_restart()
        self._set_master(self.values())

    def holds_codes_of(self, other: "WeightState") -> bool:
        """Return whether codes and scales are equal."""
        return torch.equal(self.own_codes, other.own_codes) and torch.equal(self.scale, other.scale)

    # ------------------------------------------------------------ the values before rounding

    def init_values(self) -> torch.Tensor | None:
        """Return the unrounded values [n, columns], None if they are not preserved.

        Raises:
            StaleInitError: They do not quantize to the present codes.
        """
        self.follow_loads()
        if self.start is None:
            return None
        # Compared at every read: a kernel may have written to the codes, which no operator shows.
        if not torch.equal(self.quantized(self.start.to(self.device)), self.own_codes):
            raise StaleInitError(
                f"The values before rounding of a weight {tuple(self.full_shape)} do not quantize to its present "
                "codes: these were written to behind its back. Write values to the weight (copy_), or load them."
            )
        return self.start

    def best_values(self) -> torch.Tensor:
        """Return the most exact known values: unrounded, master, or rounded ones.

        They are on the device of the codes.
        """
        try:
            values = self.init_values()
        except StaleInitError:
            values = None
        values = self.made_of(self.live_master) if values is None else values
        return self.values() if values is None else values.to(self.device)

    def release(self) -> int:
        """Drop the unrounded values, stop preserving them, and return their bytes.

        While ranks have not agreed on a scale, the values are kept internally.
        """
        held, self.keeps = self.start, None
        if held is None or self.pending == "agreement":
            return 0
        self.start = None
        return held.nbytes

    def after_forward(self) -> None:
        """Drop the values before rounding that no living master needs."""
        if self.keeps == "forward" or (self.keeps == "seed" and self.live_master is None):
            self.release()

    # ------------------------------------------------------------ loads

    def mark_scales_pending(self) -> None:
        """Mark the codes as loaded; their scales are expected next."""
        self.settled = None, version_of(self.scale), casts.reciprocal(self.scale)
        self._forget_start()

    def _forget_start(self) -> None:
        """Forget unrounded values after codes and common scales were loaded."""
        self.start = None
        self._has_agreed()

    def _has_agreed(self) -> None:
        if self.pending == "agreement":
            self.pending = "check"

    def check(self) -> None:
        """Raise if codes lack their scales, or scales their codes.

        Raises:
            Fp8Error: One of both.
        """
        if not (self.codes_came or self.scales_came):
            return
        problem = self.problem
        if problem is not None:
            raise Fp8Error(f"{problem} in an FP8 weight {tuple(self.full_shape)}. {_ADVICE[problem]}")
        if self.scale.is_meta:
            return
        is_load = self.codes_came  # else the scales were copied to themselves
        self.mark_consistent()
        if is_load:
            self._forget_start()
            self.follow_codes()

    def follow_loads(self) -> None:
        """Update the master after a complete load that was not read yet."""
        if self.problem is None:
            self.check()

    @property
    def loading(self) -> bool:
        """True if codes were loaded whose scales are still missing."""
        return self.settled is not None and self.settled[0] is None

    @property
    def codes_came(self) -> bool:
        """True if codes changed since they last matched the scales."""
        return self.settled is not None and version_of(self.codes) != self.settled[0]

    @property
    def scales_came(self) -> bool:
        """True if scales changed since they last matched the codes."""
        return self.settled is not None and version_of(self.scale) != self.settled[1]

    @property
    def problem(self) -> str | None:
        """Reason why codes and scales are inconsistent, None if they are consistent."""
        if self.scale.is_meta:
            return None
        if self.codes_came and not self.scales_came:
            return CODES_ALONE
        if self.scales_came and not self.codes_came and not torch.equal(casts.reciprocal(self.scale), self.scale_inv):
            return SCALES_ALONE
        return None

    def mark_consistent(self, scale_inv: torch.Tensor | None = None) -> None:
        """Mark codes and scales as consistent, with `scale_inv` as the reciprocal."""
        scale_inv = casts.reciprocal(self.scale) if scale_inv is None else scale_inv
        self.settled = version_of(self.codes), version_of(self.scale), scale_inv


@functools.cache
def tell_of_restart() -> None:
    """Warn, once, of masters that are given up for codes."""
    logger.warning(
        "FP8 codes were loaded that are not the rounding of the weights' masters (a checkpoint "
        "of another step, a copy): these masters start again from rounded values. Load model and optimizer of the same "
        "step, in any order, or values of high precision."
    )


def _copied(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.is_meta != (device.type == "meta"):  # there are no values to move
        return torch.empty_like(tensor, device=device)
    return tensor.to(device, copy=True)

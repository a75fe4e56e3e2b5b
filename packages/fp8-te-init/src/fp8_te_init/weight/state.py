"""`WeightState`: storage of FP8 codes, their scales, and the preserved unrounded values.

All tensors that alias the storage share one `WeightState`, so a write through one alias updates the state of all. The
layer registers scales and history as buffers, so changes of values are written into them in place.
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
"""When unrounded values are dropped: once no master needs them, after the first forward, or manually."""

Record = Literal["step", "start", "nothing"]
"""Effect of an amax on the history of delayed scaling: "step" adds it, "start" restarts the history with it."""

GatherRequirement = Literal["check", "agreement"]
"""Action before codes of shards are gathered: "agreement" of ranks on scales, or a "check" of FSDP2's settings."""

CODES_ALONE = "Codes were loaded without the scales that belong to them"
SCALES_ALONE = "Scales were overwritten without the codes that belong to them"
_ADVICE = {
    CODES_ALONE: "The state dict lacks them, or a load has failed: load a whole state dict.",
    SCALES_ALONE: "Load both with load_state_dict; average the masters of a MasterOptimizer, not a model's buffers.",
}


@dataclasses.dataclass(eq=False, kw_only=True, slots=True, weakref_slot=True)
class WeightState:
    """State of one FP8 storage, shared by all tensors that alias it.

    Attributes:
        part: Cast, dtype and shape of the weight, and the first row held here.
        codes: uint8 [rows, columns]: all rows of the weight, or this rank's rows with padding at the end.
        scale: float32 scales of the whole weight, into FP8. The granularity determines their shape.
        history: float32 [window], amax history of delayed scaling, newest first; None for other scalings.
        unrounded: Values [n, columns] before rounding of the rows held here: on the host if they are preserved, on the
            device of the codes if they are kept until the ranks agree on scales. None if they are not known.
        preserve_until: When `unrounded` is dropped; None if written values are not preserved.
        gather_requires: Action that is necessary before codes of shards are gathered: "agreement" of all ranks on
            scales, for which `unrounded` is kept, or a "check" that FSDP2 can gather codes. None if neither is
            necessary, as for a whole weight.
        master: Weak reference to the float32 master, which all optimizers of the weight share, and the dtype to which
            it is rounded before it is quantized.
        previous_state: State before the last write, with the master of that time as `unrounded`, until the next step;
            None without a master. Writing the previous values back, for example after an evaluation of averaged
            weights, restores the master exactly.
        last_consistent: Versions of codes and scales when they last matched, and the float32 scales back from FP8. The
            version of codes is None after codes were loaded, until their scales are.
    """

    part: Part
    codes: torch.Tensor
    scale: torch.Tensor
    history: torch.Tensor | None = None
    unrounded: torch.Tensor | None = None
    preserve_until: Release | None = None
    gather_requires: GatherRequirement | None = None
    master: "tuple[weakref.ref[torch.Tensor], torch.dtype] | None" = None
    previous_state: "WeightState | None" = None
    last_consistent: "tuple[int | None, int, torch.Tensor] | None" = None

    @classmethod
    def empty(cls, like: torch.Tensor, cast: CastRecipe, preserve_until: Release | None = None) -> "WeightState":
        """Return the state of a whole weight of zeros, like `like`."""
        window, grid = cast.policy.history, ScaleGrid(cast)  # the window is 0 unless scaling is delayed
        return cls(
            part=Part(grid=grid, dtype=like.dtype, full_shape=like.shape),
            codes=torch.zeros(like.shape, dtype=torch.uint8, device=like.device),
            scale=torch.ones(grid.shape(like.shape), device=like.device),
            history=torch.zeros(window, device=like.device) if window else None,
            preserve_until=preserve_until,
        )

    def __post_init__(self) -> None:
        """Mark codes and scales as consistent unless `last_consistent` is given."""
        if self.last_consistent is None:
            self.mark_consistent()

    def with_codes(self, codes: torch.Tensor, **changes: Any) -> "WeightState":
        """Return a copy of this state on other codes.

        Scales and history are copied to the device of `codes`; unrounded values are shared. The copy has no master.

        Args:
            codes: uint8, the codes of the copy.
            **changes: Other fields of the copy.
        """
        self.follow_loads()
        fields: dict[str, Any] = {"master": None, "previous_state": None, "last_consistent": None}
        fields |= {name: _copied(getattr(self, name), codes.device) for name in ("scale", "history")}
        twin = dataclasses.replace(self, codes=codes, **(fields | changes))
        if twin.sharded and twin.gather_requires is None:
            twin.gather_requires = "check"
        if self.loading:
            twin.mark_scales_pending()
        elif self.problem is not None:  # scales were overwritten alone: the copy must raise for them, too
            twin.last_consistent = version_of(twin.codes), -1, self.scale_inv.to(codes.device)
        return twin

    # ------------------------------------------------------------ identity and local rows

    @property
    def cast(self) -> CastRecipe:
        """Cast of the weight."""
        return self.part.grid.cast

    @property
    def dtype(self) -> torch.dtype:
        """High-precision dtype of the weight: float32, bfloat16 or float16."""
        return self.part.dtype

    @property
    def full_shape(self) -> torch.Size:
        """[rows, columns] of the whole weight."""
        return self.part.full_shape

    @property
    def first_row(self) -> int:
        """Index of the first row held here; 0 for a whole weight."""
        return self.part.first_row or 0

    @property
    def sharded(self) -> bool:
        """True if other ranks may hold rows of the weight."""
        return self.part.first_row is not None

    @property
    def rows(self) -> int:
        """Number of rows of the weight held here, without padding."""
        return max(0, min(self.codes.shape[0], self.part.full_shape[0] - (self.part.first_row or 0)))

    @property
    def local_codes(self) -> torch.Tensor:
        """Codes of the rows held here, uint8 [n, columns], without padding."""
        return self.codes[: self.rows]

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales in both directions and of the history."""
        return 2 * self.scale.nbytes + (0 if self.history is None else self.history.nbytes)

    @property
    def previous_state_bytes(self) -> int:
        """Bytes of codes and masters of all previous states."""
        previous = self.previous_state
        if previous is None or previous.unrounded is None:
            return 0
        return previous.codes.nbytes + previous.unrounded.nbytes + previous.previous_state_bytes

    @property
    def fmt(self) -> Format:
        """FP8 format of the codes."""
        return self.part.grid.cast.fp8_format

    @property
    def float8_codes(self) -> torch.Tensor:
        """Codes as torch's float8 dtype, padding included; shares memory."""
        return self.codes.view(torch_dtype(self.cast.format))

    @property
    def scale_inv(self) -> torch.Tensor:
        """float32 scales back from FP8, shaped like `scale`; read only."""
        assert self.last_consistent is not None  # noqa: S101  set in `__post_init__`
        return self.last_consistent[2]

    # ------------------------------------------------------------ between codes and values

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return dequantized values [n, columns] of the rows held here."""
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
        return self.part.grid.of_part(self.scale_inv, self.local_codes.shape, self.part.region)

    def amax_bits(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bits of absolute maxima, int32 [k].

        Their maximum over all ranks determines the scales.
        """
        return self.part.grid.amax_bits(values, self.part.region)

    def quantize_(self, values: torch.Tensor, bits: torch.Tensor | None, *, record: Record = "start") -> None:
        """Quantize values into the codes, with scales from `bits`.

        Args:
            values: [n, columns], float16, bfloat16 or float32, on the device of the codes.
            bits: Maximum of `amax_bits` over ranks; None computes the scales from these values alone.
            record: Effect on delayed scaling. A "step" is cast with the scale of earlier steps, everything else with
                the scale from `bits`.
        """
        if bits is None and self.history is None and self.rows == self.part.full_shape[0]:
            cast = self.part.grid.quantize_whole(values)  # one pass, with the same bits as the other branch
            self.scale.copy_(cast.scale.view(self.scale.shape))
            self.codes[: len(values)].copy_(cast.codes.view(torch.uint8))
            self.mark_consistent(cast.scale_inv.view(self.scale.shape))
        else:
            self.set_scale(self.amax_bits(values) if bits is None else bits, record)
            self.codes[: len(values)].copy_(self.quantized(values))
            self.mark_consistent()
        if self.preserve_until is None:
            self.unrounded = None
        self._end_agreement()

    def set_scale(self, bits: torch.Tensor, record: Record) -> None:
        """Set scales and history from reduced `amax_bits`; the caller writes the codes."""
        amax, previous = self.part.grid.amax(bits, self.full_shape), None
        if self.history is not None:
            algo, previous = self.cast.policy.algo, self.scale
            # before the update, since the amax of a step first counts in the next step
            known = numerics.reduce_history(self.history, algo)
            if record != "nothing":
                before = self.history if record == "step" else torch.zeros_like(self.history)
                self.history.copy_(update_history(before, amax, algo)[0])
            amax = known if record == "step" else amax
        self.scale.copy_(casts.scale_from_amax(amax, self.fmt, self.cast.policy, previous))

    def write(self, values: torch.Tensor, *, replaces: bool = True, fresh: bool = False) -> None:
        """Set codes, unrounded values and master from new values.

        The ranks agree on common scales of shards later, in `agree_on_written`.

        User code may read dequantized values and write them back. Such a write of the current values changes nothing,
        and a write of the values before the last write restores that state.

        Args:
            values: [n, columns], float16, bfloat16 or float32, on the device of the codes.
            replaces: Whether the values replace the weight. False marks one of several edits in place, such as
                `add_`, which together count as one change of the weight.
            fresh: Whether the caller has created the values, so that they are not compared with dequantized ones. The
                comparison waits for the device.
        """
        values = values.detach()
        for state in () if fresh else (self, self.previous_state):
            if state is None or state.problem is not None or not numerics.same_bits(values, state.values(values.dtype)):
                continue
            if state is not self:
                self._restore(state)
            elif self.sharded:  # rows on other ranks may have changed, so that all ranks must agree
                self._keep_unrounded(self.best_values())
            return
        self.save_previous_state(replaces)
        self.quantize_(values, None)
        if self.previous_state is not None:
            self.previous_state.previous_state = None
        self._keep_unrounded(values)
        self._set_master(values)

    def copy_rows(self, other: "WeightState", row: int = 0) -> None:
        """Copy codes, scales and unrounded values from another weight.

        Args:
            other: State with the same cast and full shape.
            row: Row of `other.codes` that becomes the first row here.
        """
        inconsistent, moves = other.problem is not None, other.sharded and self.rows == 0
        self.save_previous_state()
        if moves:  # FSDP2 pads a shard in the first forward, which may run between a write and its reversal
            self.previous_state = other.previous_state
        if self.sharded:
            self.part = dataclasses.replace(self.part, first_row=other.first_row + row)
        self.local_codes.copy_(other.codes[row : row + self.rows])
        if self.scale is not other.scale:
            self.scale.copy_(other.scale)
            if self.history is not None and other.history is not None:
                self.history.copy_(other.history)
            self.gather_requires = other.gather_requires or "check"
        known = self.preserve_until is not None or self.gather_requires == "agreement" or self.live_master is not None
        values = other.unrounded if known else None
        self.unrounded = None if values is None else values[row : row + self.rows].clone()
        if inconsistent:  # FSDP2 copies after a load, on ranks with padding alone: all ranks raise at the next use
            self.mark_scales_pending()
            return
        self.mark_consistent()
        self.follow_codes()

    def _keep_unrounded(self, values: torch.Tensor) -> None:
        """Keep unrounded values if preserved; in shards, until ranks agree on scales."""
        if self.sharded:
            self.gather_requires = "agreement"
        if self.preserve_until is not None:
            self.unrounded = values.to("cpu", copy=True)
        elif self.sharded:
            self.unrounded = values.clone()

    def _restore(self, previous: "WeightState") -> None:
        """Restore the state before the last write, with its master."""
        master: Any = previous.unrounded
        values = previous.matching_values(master)
        self.local_codes.copy_(previous.local_codes)
        self.scale.copy_(previous.scale)
        if self.history is not None and previous.history is not None:
            self.history.copy_(previous.history)
        self.unrounded = self.previous_state = None
        self.mark_consistent()
        self._keep_unrounded(master if values is None else values)
        self._set_master(master)

    # ------------------------------------------------------------ the master

    @property
    def live_master(self) -> torch.Tensor | None:
        """The float32 master if alive and like the local rows, else None."""
        master = None if self.master is None else self.master[0]()
        if master is None:
            return None
        local = local_of(master)
        return master if (local.shape, local.device) == (self.local_codes.shape, self.device) else None

    def matching_values(self, master: torch.Tensor | None) -> torch.Tensor | None:
        """Return a master's values if they quantize to the codes, else None.

        Args:
            master: [n, columns], float32, or None.

        Returns:
            [n, columns] in the dtype to which masters of this weight are rounded before they are quantized.
        """
        if master is None or self.master is None:
            return None
        values = local_of(master).detach().to(self.master[1])
        return values if torch.equal(self.quantized(values), self.local_codes) else None

    @torch.no_grad()
    def _set_master(self, values: Any) -> None:
        master = self.live_master
        if master is not None:
            # `.data` keeps the version: the optimizer must not see a changed master that waits for `write_back`
            local_of(master).data.copy_(values)

    def save_previous_state(self, replaces: bool = True) -> None:
        """Save the current weight with its master before a write.

        Args:
            replaces: See `write`. False keeps the state that an earlier edit has saved.
        """
        self.follow_loads()
        master = self.live_master
        if master is None:
            self.previous_state = None
        elif replaces or self.previous_state is None:
            snapshot = {
                "unrounded": local_of(master).detach().clone(),
                "master": self.master,
                "previous_state": self.previous_state,
            }
            self.previous_state = self.with_codes(self.codes.clone(), **snapshot)

    def follow_codes(self) -> None:
        """Update master and unrounded values after the codes were replaced."""
        if self.live_master is not None:
            self._set_master_of_codes()
        if self.previous_state is not None:
            self.previous_state.previous_state = None
        if self.preserve_until is None and self.gather_requires != "agreement":
            self.unrounded = None

    def _set_master_of_codes(self) -> None:
        """Set the master to the most exact known values of the codes."""
        if self.unrounded is not None:
            self._set_master(self.unrounded)
            return
        if self.matching_values(self.live_master) is not None:
            return
        previous = self.previous_state
        while previous is not None:
            if previous.holds_codes_of(self):
                # the codes were loaded with their scales, so that the ranks already agree
                self._set_master(previous.unrounded)
                self.previous_state = None
                return
            previous = previous.previous_state
        warn_of_restart()
        self._set_master(self.values())

    def holds_codes_of(self, other: "WeightState") -> bool:
        """Return whether both states have equal codes and scales."""
        return torch.equal(self.local_codes, other.local_codes) and torch.equal(self.scale, other.scale)

    # ------------------------------------------------------------ unrounded values

    def init_values(self) -> torch.Tensor | None:
        """Return the unrounded values [n, columns], None if they are not known.

        Raises:
            StaleInitError: If they do not quantize to the current codes.
        """
        self.follow_loads()
        if self.unrounded is None:
            return None
        # Compared at every read, because a kernel may have written to the codes without a change of their version.
        if not torch.equal(self.quantized(self.unrounded.to(self.device)), self.local_codes):
            raise StaleInitError(
                f"The values before rounding of a weight {tuple(self.full_shape)} do not quantize to its current "
                "codes: an optimizer step or other code has changed the codes. Write values to the weight (copy_), "
                "or load them."
            )
        return self.unrounded

    def best_values(self) -> torch.Tensor:
        """Return the most exact known values, on the device of the codes.

        These are the unrounded values, else a master that quantizes to the codes, else the dequantized values.
        """
        try:
            values = self.init_values()
        except StaleInitError:
            values = None
        values = self.matching_values(self.live_master) if values is None else values
        return self.values() if values is None else values.to(self.device)

    def release(self) -> int:
        """Drop the unrounded values and return their bytes.

        No values are preserved from now on. Values that the ranks need to agree on scales are kept until then, and 0 is
        returned.
        """
        values, self.preserve_until = self.unrounded, None
        if values is None or self.gather_requires == "agreement":
            return 0
        self.unrounded = None
        return values.nbytes

    def after_forward(self) -> None:
        """Drop the unrounded values after a forward, as `preserve_until` selects."""
        if self.preserve_until == "forward" or (self.preserve_until == "seed" and self.live_master is None):
            self.release()

    # ------------------------------------------------------------ loads

    def mark_scales_pending(self) -> None:
        """Mark the codes as loaded, with their scales still to be loaded."""
        self.last_consistent = None, version_of(self.scale), casts.reciprocal(self.scale)
        self._forget_unrounded()

    def _forget_unrounded(self) -> None:
        """Drop unrounded values after other codes were loaded."""
        self.unrounded = None
        self._end_agreement()

    def _end_agreement(self) -> None:
        """Require no agreement on scales any more, because they are common."""
        if self.gather_requires == "agreement":
            self.gather_requires = "check"

    def check(self) -> None:
        """Complete a load; raise if codes or scales were written alone.

        Raises:
            Fp8Error: If codes were loaded without their scales, or scales were overwritten without their codes.
        """
        if not (self.codes_changed or self.scales_changed):
            return
        problem = self.problem
        if problem is not None:
            raise Fp8Error(f"{problem} in an FP8 weight {tuple(self.full_shape)}. {_ADVICE[problem]}")
        if self.scale.is_meta:
            return
        is_load = self.codes_changed  # otherwise equal scales were written
        self.mark_consistent()
        if is_load:
            self._forget_unrounded()
            self.follow_codes()

    def follow_loads(self) -> None:
        """Complete a load if both codes and scales have been written."""
        if self.problem is None:
            self.check()

    @property
    def loading(self) -> bool:
        """True from a load of codes until `check` finds their scales."""
        return self.last_consistent is not None and self.last_consistent[0] is None

    @property
    def codes_changed(self) -> bool:
        """True if codes were written since they last matched the scales."""
        return self.last_consistent is not None and version_of(self.codes) != self.last_consistent[0]

    @property
    def scales_changed(self) -> bool:
        """True if scales were written since they last matched the codes."""
        return self.last_consistent is not None and version_of(self.scale) != self.last_consistent[1]

    @property
    def problem(self) -> str | None:
        """Error message if codes or scales were written alone, else None."""
        if self.scale.is_meta:
            return None
        if self.codes_changed and not self.scales_changed:
            return CODES_ALONE
        if (
            self.scales_changed
            and not self.codes_changed
            and not torch.equal(casts.reciprocal(self.scale), self.scale_inv)
        ):
            return SCALES_ALONE
        return None

    def mark_consistent(self, scale_inv: torch.Tensor | None = None) -> None:
        """Mark codes and scales as consistent.

        Args:
            scale_inv: float32 scales back from FP8; None computes them.
        """
        scale_inv = casts.reciprocal(self.scale) if scale_inv is None else scale_inv
        self.last_consistent = version_of(self.codes), version_of(self.scale), scale_inv


@functools.cache
def warn_of_restart() -> None:
    """Warn once that masters restart from the values of loaded codes."""
    logger.warning(
        "FP8 codes were loaded that are not the rounding of the weights' masters (a checkpoint "
        "of another step, a copy): these masters start again from rounded values. Load model and optimizer of the same "
        "step, in any order, or values of high precision."
    )


def _copied(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.is_meta != (device.type == "meta"):  # to or from the meta device, which has no values
        return torch.empty_like(tensor, device=device)
    return tensor.to(device, copy=True)

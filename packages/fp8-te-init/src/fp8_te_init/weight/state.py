"""`WeightState`: one storage of FP8 codes, its scales, and the values before rounding that it was made from.

All tensors that alias the storage share one `WeightState`, so nothing that is known of a weight can be lost between
them. Scales and history are buffers of the layer: they are written in place and never replaced.
"""

import dataclasses
import weakref
from typing import Any, Literal

import torch

from fp8_common import CastRecipe, Format, Fp8Error
from fp8_common.torch import casts, decoding, numerics, torch_dtype, update_history
from fp8_common.torch.compat import local_of, version_of
from fp8_common.torch.sharding.scale_grid import Region, ScaleGrid
from fp8_te_init.errors import StaleInitError

Release = Literal["seed", "forward", "manual"]
"""When the values before rounding are dropped: with the masters, after the first forward, or when the user says so."""

Record = Literal["step", "start", "nothing"]
"""What delayed scaling makes of an amax: the next entry of its history, the first one of a new history, or nothing."""

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
        cast: How the weight is cast.
        codes: uint8 [rows, columns]: all rows of the weight, or this rank's, with padding at the end.
        scale: float32 scales of the whole weight, into FP8; their shape follows from the granularity.
        history: float32 [window] of delayed scaling, newest first; None without it.
        full_shape: [rows, columns] of the whole weight.
        first_row: Index of the first row that is held here.
        dtype: float32, bfloat16 or float16: what the weight stands for.
        sharded: Whether other ranks may hold other rows, so that scales have to be agreed on.
        start: The values before rounding of the rows held here, [n, columns]; None if they are not known.
        preserves: Whether values that are written become the new start.
        release_on: When `start` is dropped.
        unagreed: Whether `start` waits for a scale that the ranks agree on.
        loading: Whether codes were put in place whose scales have not come yet.
        known: The versions of `codes` and `scale` at the last write of both, and a copy of the scales. Codes that are
            written through the weight itself count in `writes` instead.
        writes: How often codes were written, other than by an optimizer's step.
        synchronized: The version at which all ranks were given the same weight.
        master: The float32 master, held weakly: optimizers of the same weight share it.
        warned: Whether a warning said that changes are rounded.
        checked: The dtype for which FSDP2 was found able to gather the weight.
        uploaded_from: The state that this one was copied from, from another device (CPU offload).
    """

    cast: CastRecipe
    codes: torch.Tensor
    scale: torch.Tensor
    full_shape: torch.Size
    dtype: torch.dtype
    history: torch.Tensor | None = None
    first_row: int = 0
    sharded: bool = False
    start: torch.Tensor | None = None
    preserves: bool = False
    release_on: Release = "seed"
    unagreed: bool = False
    loading: bool = False
    known: tuple[int, int, torch.Tensor] | None = None
    writes: int = 0
    synchronized: tuple[int, int, int] | None = None
    master: "weakref.ref[torch.Tensor] | None" = None
    warned: bool = False
    checked: torch.dtype | None = None
    uploaded_from: "weakref.ref[WeightState] | None" = None

    @classmethod
    def empty(cls, like: torch.Tensor, cast: CastRecipe, **options: Any) -> "WeightState":
        """Return the state of a whole weight of zeros, with the shape, dtype and device of `like` [rows, columns]."""
        window = cast.policy.history  # 0 for every scaling but delayed
        return cls(
            cast=cast,
            codes=torch.zeros(like.shape, dtype=torch.uint8, device=like.device),
            scale=torch.ones(ScaleGrid(cast).shape(like.shape), device=like.device),
            history=torch.zeros(window, device=like.device) if window else None,
            full_shape=like.shape,
            dtype=like.dtype,
            **options,
        )

    def around(self, codes: torch.Tensor, **changes: Any) -> "WeightState":
        """Return the state of other storage for the same weight, with scales of its own and the same start."""
        own: dict[str, Any] = {"master": None, "checked": None, "uploaded_from": None}
        own |= {name: _copied(getattr(self, name), codes.device) for name in ("scale", "history")}
        twin = dataclasses.replace(self, codes=codes, **(own | changes))
        if not self.loading:
            twin.settle()
        return twin

    # ------------------------------------------------------------ which part of the weight this is

    @property
    def grid(self) -> ScaleGrid:
        """How the scales lie on the weight."""
        return ScaleGrid(self.cast)

    @property
    def region(self) -> Region:
        """Which part of the weight is held here."""
        return Region.along(0, self.first_row, self.full_shape)

    @property
    def rows(self) -> int:
        """Number of rows of the weight that are held here, without padding."""
        return max(0, min(self.codes.shape[0], self.full_shape[0] - self.first_row))

    @property
    def own_codes(self) -> torch.Tensor:
        """uint8 [n, columns], the rows that are held here, without padding."""
        return self.codes[: self.rows]

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and history."""
        return self.scale.nbytes + (0 if self.history is None else self.history.nbytes)

    @property
    def fmt(self) -> Format:
        """The format of the codes."""
        return self.cast.fp8_format

    @property
    def float8_codes(self) -> torch.Tensor:
        """The storage as torch's float8 dtype."""
        return self.codes.view(torch_dtype(self.cast.format))

    # ------------------------------------------------------------ between codes and values

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return dequantized values [n, columns] of the rows that are held here."""
        return self.all_values(dtype)[: self.rows]

    def all_values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized storage, padding included."""
        self.check()
        scale = self.grid.of_part(self.scale, self.codes.shape, self.region)
        return decoding.dequantize(self.float8_codes, scale, self.fmt, dtype)

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of values [n, columns] of the rows that are held here, with the present scales."""
        return self.grid.quantize_part(values, self.scale, self.region).view(torch.uint8)

    def scale_inv(self) -> torch.Tensor:
        """Return float32 scales back from FP8 that broadcast to [n, columns]."""
        return casts.reciprocal(self.grid.of_part(self.scale, self.own_codes.shape, self.region))

    def amax_bits(self, values: torch.Tensor) -> torch.Tensor:
        """Return int32 [k], the bits of the absolute maxima, whose MAX over ranks gives the scales."""
        return self.grid.amax_bits(values, self.region)

    def quantize_(self, values: torch.Tensor, bits: torch.Tensor | None, *, record: Record = "start") -> None:
        """Write codes of values [n, columns] and the scales that follow from `bits`.

        Args:
            values: float16, bfloat16 or float32, on the device of the codes.
            bits: `amax_bits`, combined over ranks; None makes the scales of these values alone.
            record: What delayed scaling makes of them. An optimizer's "step" is cast with the scale of earlier steps;
                all else with the one of `bits`.
        """
        if bits is None and self.history is None and self.rows == self.full_shape[0]:
            cast = self.grid.quantize_whole(values)  # amax, scales and codes in one pass, with the bits of below
            self.scale.copy_(cast.scale.view(self.scale.shape))
            self.own_codes.copy_(cast.codes.view(torch.uint8))
        else:
            self._quantize_with(self.amax_bits(values) if bits is None else bits, values, record)
        # a master that has not taken over the values of a write still needs them after the ranks have agreed
        if not self.preserves and not (self.unagreed and self.live_master is not None):
            self.start = None
        self.unagreed = False
        self.settle()

    def _quantize_with(self, bits: torch.Tensor, values: torch.Tensor, record: Record) -> None:
        amax, previous = self.grid.amax(bits, self.full_shape), None
        if self.history is not None:
            algo, previous = self.cast.policy.algo, self.scale
            # before the update: the amax of a step counts from the next one on
            known = numerics.reduce_history(self.history, algo)
            if record != "nothing":
                before = self.history if record == "step" else torch.zeros_like(self.history)
                self.history.copy_(update_history(before, amax, algo)[0])
            amax = known if record == "step" else amax
        self.scale.copy_(casts.scale_from_amax(amax, self.fmt, self.cast.policy, previous))
        self.own_codes.copy_(self.quantized(values))

    def write(self, values: torch.Tensor) -> None:
        """Quantize new values [n, columns], and keep them until the ranks agree on a scale and a master has them."""
        self.quantize_(values, None)
        self.writes += 1
        self.unagreed = self.sharded
        if self.preserves:
            self.start = values.detach().to("cpu", copy=True)
        elif self.sharded or self.live_master is not None:
            self.start = values.detach().clone()

    # ------------------------------------------------------------ the values before rounding

    def init_values(self) -> torch.Tensor | None:
        """Return the values before rounding [n, columns], or None if they are not preserved.

        Raises:
            StaleInitError: They do not quantize to the present codes.
        """
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
        """Return the values before rounding if they are known, else the rounded ones, on the device of the codes."""
        try:
            start = self.init_values()
        except StaleInitError:
            start = None
        return self.values() if start is None else start.to(self.device)

    def release(self) -> int:
        """Drop the values before rounding, and preserve none from now on; return their bytes.

        Values whose scale the ranks have not agreed on stay until they have.
        """
        held = self.start
        self.preserves = False
        if held is None or self.unagreed:
            return 0
        self.start = None
        return held.nbytes

    def clear(self) -> None:
        """Preserve no values from now on; a master that has yet to take over a write keeps them until then."""
        master, start = self.live_master, None if self.start is None else self.start.to(self.device)
        waits = (
            master is not None
            and start is not None
            and not torch.equal(local_of(master).detach(), start.float())
            and torch.equal(self.quantized(start), self.own_codes)
        )
        if not waits:
            self.release()
        self.preserves = False

    @property
    def written_for_master(self) -> bool:
        """Whether `start` is a write that a master has to take over, and nothing that the user preserves."""
        return self.start is not None and not self.preserves

    def settle_master(self) -> None:
        """Drop a written start, since the master has it now."""
        if not self.preserves and not self.unagreed:
            self.start = None

    # ------------------------------------------------------------ loads

    def expect_scales(self) -> None:
        """Take what is in the storage for codes of a checkpoint, whose scales come next."""
        self.loading, self.unagreed, self.writes, self.start = True, False, self.writes + 1, None

    def check(self) -> None:
        """Refuse codes whose scales did not come, and scales that were written without their codes.

        Raises:
            Fp8Error: One of both.
        """
        problem = self.problem
        if problem is not None:
            raise Fp8Error(f"{problem} in an FP8 weight {tuple(self.full_shape)}. {_ADVICE[problem]}")

    @property
    def problem(self) -> str | None:
        """Why codes and scales do not belong together; None if they do, as far as is known."""
        codes_came = self.loading or self.known is None or version_of(self.codes) != self.known[0]
        if self.scale.is_meta or not (codes_came or self.scales_came):
            return None
        if not self.scales_came:
            return CODES_ALONE
        if not codes_came and self.known is not None and not torch.equal(self.scale, self.known[2]):
            return SCALES_ALONE
        self.settle()
        return None

    @property
    def scales_came(self) -> bool:
        """Whether the scales were written to since codes and scales were last known to belong together."""
        return self.known is None or version_of(self.scale) != self.known[1]

    def settle(self) -> None:
        """Take the scales that are there for those of the codes."""
        self.loading = False
        self.known = version_of(self.codes), version_of(self.scale), self.scale.clone()

    @property
    def live_master(self) -> torch.Tensor | None:
        """The float32 master of the rows that are held here, as its optimizer holds it, if there is one."""
        master = None if self.master is None else self.master()
        if master is None:
            return None
        local = local_of(master)
        return master if (local.shape, local.device) == (self.own_codes.shape, self.device) else None

    @property
    def is_synchronized(self) -> bool:
        """Whether nothing was written since all ranks were given the same weight."""
        return self.synchronized == self.version

    @property
    def version(self) -> tuple[int, int, int]:
        """What changes with every write, also with loads into the tensors of a state dict."""
        return self.writes, version_of(self.codes), version_of(self.scale)


def _copied(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.is_meta != (device.type == "meta"):  # there are no values to move
        return torch.empty_like(tensor, device=device)
    return tensor.to(device, copy=True)

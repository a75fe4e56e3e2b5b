"""`TeRows`: reads and writes the FP8 tensors of TransformerEngine.

Nothing is imported from TransformerEngine: its tensors are known by the names of their classes and attributes, which
are the same in the releases 2.11 to 2.20. Per-tensor scaled ones are read and written here with plain torch, on any
device; block-scaled and MX ones are read here and written by their own quantizer, which needs a GPU. They are refused
where their scales could not be read right.
"""

from typing import Any

import torch
import torch.nn.functional as F

from fp8_common import CastRecipe, Format, Fp8UnsupportedError, get_format
from fp8_common.presets import te_current
from fp8_common.torch import torch_dtype
from fp8_common.torch.plugin import ScaleLayout, ShardGeometry, dispatch
from fp8_te_init._compat import local_of
from fp8_te_init._rows import Rows
from fp8_te_init._shards import group_of, place_of, refuse_other_than_rows

PER_TENSOR, BLOCKS, MX = "Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor"
NEEDED = {
    PER_TENSOR: ("_data", "_scale_inv", "_fp8_dtype", "_quantizer", "_transpose", "_transpose_invalid"),
    BLOCKS: ("_rowwise_data", "_rowwise_scale_inv", "_fp8_dtype", "_is_2D_scaled", "quantize_"),
    MX: ("_rowwise_data", "_rowwise_scale_inv", "_fp8_dtype", "quantize_"),
}
"""The attributes that this file uses of each class; a test looks for them in the real ones."""
# Shards have to consist of whole blocks: of 128x128 values, or for MX of 32, down a column in the transposed copy.
_SHARD_ROWS = {BLOCKS: 128, MX: 32}
_ONE_SCALE = ScaleLayout.of(CastRecipe())


def te_kind(tensor: object) -> str | None:
    """Return the name of the TransformerEngine class that a tensor is of; None if it is of none."""
    # Along the MRO: subclasses count as well.
    return next((cls.__name__ for cls in type(tensor).__mro__ if cls.__name__ in NEEDED), None)


def te_rows(parameter: Any) -> "TeRows | None":
    """Return the FP8 rows of a parameter that TransformerEngine quantized; None if it did not.

    Raises:
        Fp8UnsupportedError: Its tensor lacks something that this package needs.
    """
    local = local_of(parameter) if isinstance(parameter, torch.Tensor) else None
    kind = te_kind(local)
    if kind is None:
        return None
    missing = [name for name in NEEDED[kind] if not hasattr(local, name)]
    if missing:
        raise Fp8UnsupportedError(
            f"This TransformerEngine's {kind} has no {', '.join(missing)}, which fp8-te-init needs. It works with the "
            "releases 2.11 to 2.20; use one of these, or another release of fp8-te-init."
        )
    if kind != PER_TENSOR:
        _check_blocks(parameter, kind)
    return TeRows(parameter, kind)


def _check_blocks(parameter: Any, kind: str) -> None:
    """Refuse block scales that cannot be read, and shards whose blocks are not those of the whole weight."""
    if getattr(local_of(parameter), "_with_gemm_swizzled_scales", False):
        raise Fp8UnsupportedError(
            "The scales of this MXFP8Tensor are ordered for its products. Build primary weights inside "
            "quantized_model_init or primary_weights, which keep them in rows."
        )
    group = group_of(parameter)
    ranks, unit, rows = 1 if group is None else group.size(), _SHARD_ROWS[kind], parameter.shape[0]
    if ranks > 1 and rows % (ranks * unit):
        raise Fp8UnsupportedError(
            f"The rows of a {kind} are sharded equally and in multiples of {unit}; this one has {rows} rows on {ranks} "
            "ranks, and its gathered scales would belong to other rows. Choose other sizes or per-tensor scaling."
        )


class TeRows:
    """The rows of a TransformerEngine tensor that this rank holds; a `backends.Requantizable`.

    Args:
        parameter: The parameter, plain or distributed.
        kind: The name of its class.
    """

    def __init__(self, parameter: Any, kind: str) -> None:
        self._parameter, self._kind = parameter, kind
        self._tensor: Any = local_of(parameter)

    @property
    def rows(self) -> Rows:
        """Which rows of the whole weight."""
        refuse_other_than_rows(self._parameter)
        return place_of(self._parameter)

    @property
    def full_shape(self) -> torch.Size:
        """[rows, columns] of the whole weight."""
        return self._parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weight stands for."""
        return self._parameter.dtype

    @property
    def fmt(self) -> Format:
        """The format of the codes."""
        dtype = self._tensor._fp8_dtype
        # an IntEnum in newer releases, whose str() is a number
        return get_format("e5m2" if "E5M2" in getattr(dtype, "name", str(dtype)) else "e4m3")

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self._raw().device

    def _raw(self) -> torch.Tensor:
        data = self._tensor._data if self._kind == PER_TENSOR else self._tensor._rowwise_data
        if data is None:
            raise Fp8UnsupportedError(
                "This TransformerEngine tensor holds transposed codes alone. Read it in a forward, or keep row-wise "
                "usage on for primary weights."
            )
        return data.view(torch.uint8)

    def codes(self) -> torch.Tensor:
        """Return uint8 [n, columns], to read."""
        return self._raw().view(-1, self.full_shape[-1])

    def scale_inv(self) -> torch.Tensor:
        """Return float32 scales back from FP8 that broadcast to [n, columns]."""
        if self._kind == PER_TENSOR:
            return self._tensor._scale_inv.reshape(())
        scales, (rows, columns) = self._tensor._rowwise_scale_inv, self.codes().shape
        if self._kind == MX:
            # E8M0: a power of two for 32 values along the row
            # 127 is the bias of E8M0.
            wide = torch.exp2(scales.view(torch.uint8).float() - 127).repeat_interleave(32, dim=1)
        elif self._tensor._is_2D_scaled:
            wide = scales.repeat_interleave(128, dim=1).repeat_interleave(128, dim=0)
        else:
            # 1x128 blocks: a column of scales for each row
            wide = scales.t().repeat_interleave(128, dim=1)
        return wide[:rows, :columns]  # TransformerEngine pads the scales

    def values(self) -> torch.Tensor:
        """Return float32 [n, columns], dequantized."""
        return dispatch.values(self.codes().view(torch_dtype(self.fmt)), self.fmt) * self.scale_inv()

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of high-precision values [n, columns] with the present scales.

        Only the scale back is stored. Where the one into FP8 is not known, each that has it as its reciprocal is tried,
        for each block on its own.
        """
        first, *others = self._possible_scales()
        codes, present = dispatch.quantize(values, first, self.fmt).view(torch.uint8), self.codes()
        for scale in others:
            if torch.equal(codes, present):
                break
            tried = dispatch.quantize(values, scale, self.fmt).view(torch.uint8)
            codes = torch.where(self._blocks_of(tried == present), tried, codes)
        return codes

    def _blocks_of(self, same: torch.Tensor) -> torch.Tensor:
        """Return where all elements [n, columns] that share a scale are True."""
        if self._kind == PER_TENSOR:
            return same.all()
        block = (1, 32) if self._kind == MX else (128 if self._tensor._is_2D_scaled else 1, 128)
        return _all_in_blocks(same, block)

    def _possible_scales(self) -> list[torch.Tensor]:
        scale_inv = self.scale_inv()
        nearest = dispatch.reciprocal(scale_inv)
        # Rounding makes the reciprocal of the reciprocal another number at times, at most one step away on either side.
        steps = [torch.nextafter(nearest, torch.full_like(nearest, end)) for end in (0.0, torch.inf)]
        known = getattr(getattr(self._tensor, "_quantizer", None), "scale", None)
        # The quantizer's own scale is tried first of the others: after a store of this package it is the exact one.
        if scale_inv.ndim == 0 and known is not None:
            steps.insert(0, known.detach().reshape(()).to(scale_inv.device))
        # A candidate whose reciprocal is another number cannot have made these codes.
        return [nearest, *(torch.where(dispatch.reciprocal(scale) == scale_inv, scale, nearest) for scale in steps)]

    def pending(self) -> torch.Tensor | None:
        """Return None: a write is quantized at once."""
        return None

    def keys(self, values: torch.Tensor) -> torch.Tensor:
        """Return the int32 key [1] of the amax; none for block scales, which need no agreement."""
        if self._kind != PER_TENSOR:
            return torch.zeros(0, dtype=torch.int32, device=values.device)
        return _ONE_SCALE.keys(values, ShardGeometry(full_shape=self.full_shape))

    @property
    def casts_alone(self) -> bool:
        """False: TransformerEngine's tensors are cast in `store`."""
        return False

    def store_alone(self, values: torch.Tensor) -> None:
        """Quantize with the scale of the values themselves."""
        self.store(values, self.keys(values), step=False)

    def cast_own(self, values: torch.Tensor, ranks: int) -> None:
        """Return None: TransformerEngine's tensors are cast in `store`."""

    def store(self, values: torch.Tensor, keys: torch.Tensor, *, step: bool) -> None:
        """Quantize values [n, columns] with the scale from the agreed `keys`, and let go of transposed codes."""
        tensor = self._tensor
        if self._kind != PER_TENSOR:
            # In the dtype of the weight, as TransformerEngine casts its own masters.
            tensor.quantize_(values.to(self.dtype).view(tensor.shape))
            return
        quantizer = tensor._quantizer
        policy = te_current(
            pow2=getattr(quantizer, "force_pow_2_scales", False), eps=getattr(quantizer, "amax_epsilon", 0.0)
        )
        scale = dispatch.scale_from_amax(_ONE_SCALE.amax(keys, self.full_shape), self.fmt, policy)
        self._raw().copy_(dispatch.quantize(values, scale, self.fmt).view(torch.uint8).view(tensor.shape))
        tensor._scale_inv.copy_(dispatch.reciprocal(scale).reshape(tensor._scale_inv.shape))
        tensor._transpose_invalid = True
        known = getattr(quantizer, "scale", None)
        if isinstance(known, torch.Tensor):
            known.copy_(scale.reshape(known.shape))

    def nbytes(self) -> dict[str, int]:
        """Return the bytes held here, by kind."""
        tensor = self._tensor
        if self._kind == PER_TENSOR:
            parts = {"codes": tensor._data, "scales": tensor._scale_inv, "transposes": tensor._transpose}
        else:
            parts = {"codes": tensor._rowwise_data, "scales": tensor._rowwise_scale_inv}
            parts["transposes"] = getattr(tensor, "_columnwise_data", None)
        return {kind: part.nbytes for kind, part in parts.items() if part is not None}


def _all_in_blocks(same: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return bool [n, columns]: whether all elements of the block that each belongs to are True."""
    (n, width), (rows, columns) = same.shape, block
    padded = F.pad(same, (0, -width % columns, 0, -n % rows), value=True)
    whole = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).all(3).all(1)
    return whole.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :width]

"""`write_for_serving`: FP8 weights and the other tensors of a model as files for serving engines, from all ranks.

Every rank writes its own rows to their places in files that the first rank has laid out, one tensor after the other:
no rank holds more than one tensor of its own part besides the model, and none holds a whole one.
"""

import dataclasses
import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fp8_common import _safetensors as files
from fp8_common._errors import Fp8Error
from fp8_common._recipe import CastRecipe
from fp8_common._served import NOTES
from fp8_common._serving_layouts import MX, ServingLayout, serving_layout
from fp8_common.torch._ops import quantize_mx
from fp8_common.torch._replaced_folder import check_replaceable
from fp8_common.torch._together import do_together, is_first_rank, my_turn
from fp8_common.torch.sharding.agreement import max_over_ranks
from fp8_common.torch.sharding.scale_grid import Region, ScaleGrid

CodesFrom = Literal["training", "masters"]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedPart:
    """What this rank holds of one tensor.

    Attributes:
        name: Of the tensor in the files.
        shape: Of the whole tensor.
        read: Returns the local values or uint8 codes, and for codes the scales of the whole weight: float32 into FP8,
            or uint8 E8M0 codes [n, columns / 32] of the local rows. All ranks call it in the same order.
        first_row: Index of the first local row.
        columns: First and last column, where columns are cut.
        granularity: Of the scales that `read` returns; None for a tensor that is not FP8.
        dtype: Of a tensor that is not FP8.
        writes: Whether this rank writes it; of ranks that hold the same, one does.
        tied: Further names of the tensor, which get no copy.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
    first_row: int = 0
    columns: tuple[int, int] | None = None
    granularity: str | None = None
    dtype: torch.dtype = torch.uint8
    writes: bool = True
    tied: tuple[str, ...] = ()


def write_for_serving(
    parts: Callable[[ServingLayout], Sequence[ServedPart]],
    path: str | Path,
    *,
    layout: str,
    codes: CodesFrom,
    ignored: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Write a folder that appears only when it is whole. All ranks call it.

    Args:
        parts: Returns what this rank holds of each tensor, for a layout; the same names in the same order on all ranks.
        path: A folder on a file system that all ranks share; an older export there is replaced, nothing else is.
        layout: "compressed-tensors", "deepseek" or "mx".
        codes: Where codes and scales come from; written to the metadata.
        ignored: Names of linear layers that stay in high precision.
        config: The rest of config.json.
        max_file_bytes: Of one file of tensors, unless one tensor is larger.

    Raises:
        Fp8Error: Unknown layout or choice, scales that the layout cannot express, or a file that cannot be written, on
            any rank: all ranks raise, and nothing is left behind.
    """
    target, partial = Path(path), Path(f"{path}.partial")
    planned: list[_Plan] = []
    # Not returned: what ranks tell each other is pickled.
    do_together(lambda: planned.append(_Plan.of(parts, layout, codes, ignored, config or {}, max_file_bytes)))
    (own,) = planned
    try:
        do_together(lambda: own.lay_out(partial, target) if is_first_rank() else None)
        do_together(lambda: own.write(partial))
        found = do_together(lambda: own.checksums(partial, my_turn()))
        together = {name: crc for part in found for name, crc in part.items()}
        crc32 = {name: together[name] for name in own.places}
        do_together(lambda: own.finish(partial, target, crc32) if is_first_rank() else None)
    except Fp8Error:
        if is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
        raise


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    parts: Sequence[ServedPart]
    layout: ServingLayout
    files: list[files.File]
    places: dict[str, files.Place]
    notes: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def of(
        cls,
        make: Callable[[ServingLayout], Sequence[ServedPart]],
        layout_name: str,
        codes: str,
        ignored: Sequence[str],
        config: Mapping[str, Any],
        most: int,
    ) -> "_Plan":
        layout = serving_layout(layout_name)
        if codes not in ("training", "masters"):
            raise Fp8Error(f'codes must be "training" or "masters", got {codes!r}.')
        parts = make(layout)
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        groups: dict[str, list[str]] = {}
        for part in parts:
            if part.granularity is None:
                tensors[part.name] = (_dtype_name(part), part.shape)
                continue
            kind = layout.granularity_of(part.granularity, part.name)
            groups.setdefault(kind, []).append(part.name.removesuffix(".weight"))
            tensors[part.name] = ("F8_E4M3", part.shape)
            tensors[part.name + layout.suffix] = (layout.scale_dtype, layout.scale_shape(kind, part.shape))
        if not groups:
            raise Fp8Error("The model has no FP8 weights to export. Convert it first.")
        notes = {"layout": layout.name, "codes": codes, "tied": {p.name: list(p.tied) for p in parts if p.tied}}
        listed, places = files.plan_files(tensors, {"format": "pt", "fp8_codes": codes}, most)
        whole = {**config, "quantization_config": layout.config(groups, ignored)}
        return cls(parts=parts, layout=layout, files=listed, places=places, notes=notes, config=whole)

    def lay_out(self, folder: Path, target: Path) -> None:
        check_replaceable(target, NOTES, "export for serving")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in self.files:
            with (folder / file.name).open("wb") as stream:
                stream.write(file.header)
                stream.truncate(file.size)

    def write(self, folder: Path) -> None:
        problem: Fp8Error | OSError | None = None
        for part in self.parts:
            # First, and whatever went wrong before: the other ranks are in the same collectives.
            data, scale = part.read()
            try:
                if problem is None:
                    self._write_one(folder, part, data, scale)
            except (Fp8Error, OSError) as error:
                problem = error
        if problem is not None:
            raise problem

    def _write_one(self, folder: Path, part: ServedPart, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        if part.writes:
            _put(folder, self.places[part.name], _bytes(data), part.first_row, part.columns)
        if scale is None or part.granularity is None:
            return
        local = scale.dtype == torch.uint8
        shape = (data.shape[0], part.shape[1]) if local else part.shape
        stored = self.layout.stored_scales(scale.detach().cpu().numpy(), part.granularity, shape, part.name)
        place = self.places[part.name + self.layout.suffix]
        if part.writes and local:
            columns = None if part.columns is None else (part.columns[0] // 32, -(-part.columns[1] // 32))
            _put(folder, place, stored, part.first_row, columns)
        elif part.writes and part.first_row == 0 and (part.columns is None or part.columns[0] == 0):
            _put(folder, place, stored)

    def checksums(self, folder: Path, share: tuple[int, int]) -> dict[str, int]:
        rank, ranks = share
        mine = list(self.places.items())[rank::ranks]
        return {name: _crc32(folder, place) for name, place in mine}

    def finish(self, folder: Path, target: Path, crc32: dict[str, int]) -> None:
        if len(self.files) > 1:
            _dump(folder / "model.safetensors.index.json", files.index_of(self.places.items()))
        _dump(folder / NOTES, {**self.notes, "crc32": crc32})
        _dump(folder / "config.json", self.config)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)


def round_for_serving(
    values: torch.Tensor, granularity: str, region: Region, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of high-precision values, as `ServedPart.read` does, made anew. All ranks call it.

    Args:
        values: float [n, columns], the local rows.
        granularity: Of the scales, or "mx".
        region: Which rows these are.
        group: The ranks that hold the others.
    """
    if granularity == MX:
        codes, scale = quantize_mx(values.float().contiguous(), "e4m3", "rceil")
        return codes.view(torch.uint8), scale.view(torch.uint8)
    grid = ScaleGrid(CastRecipe(granularity=granularity))  # pyrefly: ignore[bad-argument-type]
    (bits,), _ = max_over_ranks([grid.amax_bits(values, region)], group)
    scale = grid.scales(bits, region.full_shape)
    return grid.quantize_part(values, scale, region).view(torch.uint8), scale


def is_written_here(tensor: torch.Tensor) -> bool:
    """Return whether this rank writes its part of a tensor: one of the ranks that hold the same does."""
    if not isinstance(tensor, DTensor):
        return is_first_rank()
    mesh = tensor.device_mesh
    copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(dim) == 0 for dim in copies)


def check_is_e4m3(cast: CastRecipe, name: str) -> None:
    """Refuse codes that no layout holds.

    Raises:
        Fp8Error: They are not E4M3.
    """
    if cast.format != "e4m3":
        raise Fp8Error(
            f'{name} is trained in {cast.format}, and serving layouts hold e4m3. Use codes="masters" to round anew.'
        )


def _dtype_name(part: ServedPart) -> str:
    if part.dtype not in DTYPES:
        raise Fp8Error(f"{part.name} has dtype {part.dtype}, which the files cannot hold. Convert it first.")
    return DTYPES[part.dtype]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes [n, ...] of a tensor; NumPy has no bfloat16."""
    own = tensor.detach().cpu().contiguous()
    # a scalar has no dimension whose bytes could be seen
    return (own.reshape(1) if own.ndim == 0 else own).view(torch.uint8).numpy()


def _put(
    folder: Path,
    place: files.Place,
    data: np.ndarray,
    first_row: int = 0,
    columns: tuple[int, int] | None = None,
) -> None:
    """Write local rows to their place in the file."""
    if not data.size:
        return
    row = place.nbytes // max(1, place.shape[0] if place.shape else 1)
    content = np.ascontiguousarray(data)
    with (folder / place.file).open("r+b") as stream:
        if columns is None:
            stream.seek(place.offset + first_row * row)
            stream.write(content.data.cast("B"))
            return
        size = row // place.shape[1]
        for number, line in enumerate(content):
            stream.seek(place.offset + (first_row + number) * row + columns[0] * size)
            stream.write(line.data.cast("B"))


def _crc32(folder: Path, place: files.Place) -> int:
    crc, left = 0, place.nbytes
    with (folder / place.file).open("rb") as stream:
        stream.seek(place.offset)
        while left and (chunk := stream.read(min(left, 1 << 24))):
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
    return crc


def _dump(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")

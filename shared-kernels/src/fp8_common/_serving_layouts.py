"""The layouts in which serving engines read FP8 weights: names, dtypes and directions of scales, and config fields.

Sources: compressed-tensors 0.20 (`compressors/naive_quantized`, `compressors/mxfp8`, `quantization/quant_scheme.py`);
DeepSeek-V3's `inference/kernel.py` (`weight_dequant`) and its `config.json`. In all of them the stored scale multiplies
codes back to values, and codes are E4M3.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8_common._blocks import Block, block_grid, expand_blocks
from fp8_common._errors import Fp8Error
from fp8_common._scaling import reciprocal

WEIGHT_BLOCK: Block = (128, 128)
MX_BLOCK: Block = (1, 32)

MX = "mx"
"""The granularity of E8M0 codes [rows, columns / 32]; the others are those of `CastRecipe`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServingLayout:
    """One way to store FP8 weights.

    Attributes:
        name: As `layout=` takes it.
        suffix: What follows the name of a weight in the name of its scales.
        granularities: What it can express, the one for weights that are rounded anew first. One scale for the tensor
            can always be repeated.
        scale_dtype: Of the stored scales, as safetensors name it.
    """

    name: str
    suffix: str
    granularities: tuple[str, ...]
    scale_dtype: str = "F32"

    def granularity_of(self, granularity: str, weight: str) -> str:
        """Return the granularity in which scales of `granularity` are stored.

        Raises:
            Fp8Error: The layout cannot express it.
        """
        if granularity in self.granularities:
            return granularity
        # Repeating one scale changes no value. MX takes all that are powers of two, which shows when they are stored.
        if granularity == "tensorwise" or self.name == MX:
            return self.granularities[0]
        raise Fp8Error(
            f"The layout {self.name!r} cannot express {granularity} scales, which {weight} has; it has "
            f'{", ".join(self.granularities)}. Choose another layout, or codes="masters", which rounds anew.'
        )

    def scale_shape(self, granularity: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stored scales of a weight [rows, columns]."""
        if granularity == MX:
            return block_grid(tuple(shape), MX_BLOCK)
        if granularity == "blockwise_128x128":
            return block_grid(tuple(shape), WEIGHT_BLOCK)
        return (shape[0], 1) if granularity == "rowwise" else (1,)

    def stored_scales(self, scale: NDArray[Any], granularity: str, shape: Sequence[int], weight: str) -> NDArray[Any]:
        """Return scales as this layout stores them.

        Args:
            scale: float32 into FP8: a scalar, [rows, 1], or one for each block of 128x128; or uint8 E8M0 codes.
            granularity: Of these scales.
            shape: [rows, columns] of the weight.
            weight: Its name, for errors.

        Returns:
            float32 of `scale_shape`, multiplying back; uint8 E8M0 codes for MX.

        Raises:
            Fp8Error: MX was asked for, and a scale is no power of two, or the columns are no whole blocks.
        """
        if self.name != MX:
            stored = self.scale_shape(self.granularity_of(granularity, weight), shape)
            return np.ascontiguousarray(np.broadcast_to(reciprocal(scale), stored))
        if shape[1] % MX_BLOCK[1]:
            raise Fp8Error(f"{weight} has {shape[1]} columns, and the layout 'mx' needs multiples of {MX_BLOCK[1]}.")
        if granularity == MX:
            return scale
        bits = np.ascontiguousarray(reciprocal(scale)).view(np.uint32)
        codes = bits >> 23
        if (bits & 0x7FFFFF).any() or (codes == 0).any() or (codes == 255).any():
            raise Fp8Error(
                f"{weight} has scales that are no powers of two, and the layout 'mx' stores nothing else. Train with "
                'power-of-two scales, or use codes="masters", which rounds anew.'
            )
        grid = (shape[0], shape[1] // MX_BLOCK[1])
        wide = codes.astype(np.uint8).reshape(scale.shape)
        if granularity == "blockwise_128x128":
            wide = wide.repeat(WEIGHT_BLOCK[0], axis=0).repeat(WEIGHT_BLOCK[1] // MX_BLOCK[1], axis=1)
            wide = wide[: grid[0], : grid[1]]
        return np.ascontiguousarray(np.broadcast_to(wide, grid))

    def config(self, groups: Mapping[str, Sequence[str]], ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config`.

        Args:
            groups: The modules of each granularity.
            ignored: Linear layers that stay in high precision.
        """
        if self.name == "deepseek":
            fields = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            return {**fields, "weight_block_size": list(WEIGHT_BLOCK), "modules_to_not_convert": list(ignored)}
        # One group can name the class of the layers; several have to name layers.
        targets = {kind: ["Linear"] if len(groups) == 1 else list(names) for kind, names in groups.items()}
        return {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized" if self.name == MX else "float-quantized",
            "quantization_status": "compressed",
            "ignore": list(ignored),
            "config_groups": {
                f"group_{number}": {"targets": targets[kind], **_SCHEMES[kind]} for number, kind in enumerate(groups)
            },
        }


def _arguments(strategy: str, *, dynamic: bool, **rest: Any) -> dict[str, Any]:
    fields = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic}
    return fields | rest


def _scheme(weights: dict[str, Any], activations: dict[str, Any]) -> dict[str, Any]:
    return {"weights": weights, "input_activations": activations, "output_activations": None}


_MX_FIELDS: dict[str, Any] = {"group_size": MX_BLOCK[1], "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_SCHEMES = {
    "tensorwise": _scheme(_arguments("tensor", dynamic=False), _arguments("tensor", dynamic=True)),
    "rowwise": _scheme(_arguments("channel", dynamic=False), _arguments("token", dynamic=True)),
    "blockwise_128x128": _scheme(
        _arguments("block", dynamic=False, block_structure=list(WEIGHT_BLOCK)),
        _arguments("group", dynamic=True, group_size=128),
    ),
    MX: _scheme(_arguments("group", dynamic=False, **_MX_FIELDS), _arguments("group", dynamic=True, **_MX_FIELDS)),
}

LAYOUTS = (
    ServingLayout(
        name="compressed-tensors", suffix="_scale", granularities=("rowwise", "tensorwise", "blockwise_128x128")
    ),
    ServingLayout(name="deepseek", suffix="_scale_inv", granularities=("blockwise_128x128",)),
    ServingLayout(name=MX, suffix="_scale", granularities=(MX,), scale_dtype="U8"),
)


def serving_layout(name: str) -> ServingLayout:
    """Return a layout by its name.

    Raises:
        Fp8Error: There is none of this name.
    """
    found = next((layout for layout in LAYOUTS if layout.name == name), None)
    if found is None:
        known = ", ".join(repr(layout.name) for layout in LAYOUTS)
        raise Fp8Error(f"layout must be one of {known}, got {name!r}.")
    return found


def scales_of_elements(stored: NDArray[Any], shape: Sequence[int]) -> NDArray[np.float32]:
    """Return float32 multipliers back that broadcast to [rows, columns], of scales as any layout stores them.

    Raises:
        Fp8Error: Scales of this shape belong to no weight of this shape.
    """
    shape = tuple(shape)
    if stored.dtype == np.uint8:
        wide = expand_blocks(stored.astype(np.float32), MX_BLOCK, shape)
        return np.ldexp(np.float32(1), wide.astype(np.int32) - 127)
    if stored.size == 1 or stored.shape == (shape[0], 1):
        return stored.reshape(()) if stored.size == 1 else stored
    return expand_blocks(stored, WEIGHT_BLOCK, shape)

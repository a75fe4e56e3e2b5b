"""TransformerEngine's FP8 tensors with the methods of `WeightState`, and its context manager.

TransformerEngine is imported only by its context manager. Its tensors are recognized by the names of their classes and
attributes, which are equal in the releases 2.11 to 2.20. TransformerEngine itself copies the unrounded values, gathers
under FSDP2 and saves; this module checks its copies against the codes, and quantizes its tensors again.
"""

import contextlib
import importlib
import sys
from typing import Any

import torch

from fp8_common import CastRecipe, Format, Fp8UnsupportedError, Recipe
from fp8_common.formats import get_format
from fp8_common.presets import te_current
from fp8_common.torch import casts, decoding, torch_dtype
from fp8_common.torch.compat import local_of, version_of
from fp8_common.torch_layers.sharding.agreement import group_of_parts
from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid
from fp8_te_init.errors import StaleInitError
from fp8_te_init.weight.state import Record, Release, WeightState
from fp8_te_init.weight.tensor import primary_of

PRESERVE_UNTIL = "_fp8_preserve_until"
"""Attribute of a tensor that holds its `Release`, that is, when TransformerEngine's copy is dropped."""

PER_TENSOR, BLOCKS, MX = "Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor"
NEEDED = {
    PER_TENSOR: ("_data", "_scale_inv", "_fp8_dtype", "_quantizer", "_transpose_invalid"),
    BLOCKS: ("_rowwise_data", "_rowwise_scale_inv", "_fp8_dtype", "_quantizer", "quantize_", "dequantize"),
    MX: ("_rowwise_data", "_rowwise_scale_inv", "_fp8_dtype", "_quantizer", "quantize_", "dequantize"),
}
"""Attributes of each class that this module uses; a test checks that the real classes have them."""

# A shard must consist of whole blocks: 128 rows of a 128x128 block, 32 rows of an MX block of the transposed codes.
_ROWS_OF_SHARDS = {PER_TENSOR: 1, BLOCKS: 128, MX: 32}
_ONE_SCALE = ScaleGrid(CastRecipe())

RECIPES = {
    "tensorwise": "Float8CurrentScaling",
    "tensorwise_delayed": "DelayedScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "mx": "MXFP8BlockScaling",
}
"""TransformerEngine's recipe classes by the names of equal recipes; "mx" is another name of "mxfp8"."""


def fp8_of(parameter: object) -> "WeightState | TeWeight | None":
    """Return the local FP8 rows of a parameter, None without FP8.

    Raises:
        Fp8UnsupportedError: See `TeWeight`.
    """
    primary = primary_of(parameter)
    if primary is not None:
        return primary.state
    kind = kind_of(parameter)
    return None if kind is None else TeWeight(parameter, kind)


def kind_of(parameter: object) -> str | None:
    """Return the TransformerEngine class name of an FP8 parameter, else None."""
    # the whole MRO, to include subclasses
    return next((cls.__name__ for cls in type(local_of(parameter)).__mro__ if cls.__name__ in NEEDED), None)


class TeWeight:
    """Local rows of a TransformerEngine tensor, with the methods of `WeightState`.

    Args:
        parameter: The parameter, plain or distributed by FSDP2.
        kind: Name of its class in `NEEDED`.

    Raises:
        Fp8UnsupportedError: If the tensor lacks an attribute, or the ranks do not hold equally many whole blocks of
            rows.
    """

    def __init__(self, parameter: Any, kind: str) -> None:
        self._tensor: Any = local_of(parameter)
        self._kind, self.full_shape, self.dtype = kind, parameter.shape, parameter.dtype
        missing = [name for name in NEEDED[kind] if not hasattr(self._tensor, name)]
        if missing:
            raise Fp8UnsupportedError(
                f"This TransformerEngine's {kind} has no {', '.join(missing)}, which fp8-te-init needs. It works with "
                "the releases 2.11 to 2.20; use one of these, or another release of fp8-te-init."
            )
        group, unit = group_of_parts(parameter), _ROWS_OF_SHARDS[kind]
        ranks = 1 if group is None else group.size()
        if ranks > 1 and self.full_shape[0] % (ranks * unit):
            raise Fp8UnsupportedError(
                f"The rows of a {kind} are sharded equally and in multiples of {unit}; this one has "
                f"{self.full_shape[0]} rows on {ranks} ranks. Choose other sizes, or FP8 weights of nn.Linear."
            )
        self.first_row = 0 if group is None else self.full_shape[0] // ranks * group.rank()

    @property
    def fmt(self) -> Format:
        """FP8 format of the codes."""
        dtype = self._tensor._fp8_dtype
        # newer releases have an IntEnum, whose str() is a number
        return get_format("e5m2" if "E5M2" in getattr(dtype, "name", str(dtype)) else "e4m3")

    @property
    def version(self) -> int:
        """Version that changes with every write that torch records."""
        return version_of(self._tensor)

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.local_codes.device

    @property
    def local_codes(self) -> torch.Tensor:
        """Codes of the rows held here, uint8 [n, columns].

        Raises:
            Fp8UnsupportedError: If the tensor holds only transposed codes.
        """
        data = self._tensor._data if self._kind == PER_TENSOR else self._tensor._rowwise_data
        if data is None:
            raise Fp8UnsupportedError(
                "This TransformerEngine tensor holds transposed codes alone. Read it in a forward, or leave row-wise "
                "usage on for primary weights."
            )
        return data.view(torch.uint8).view(-1, self.full_shape[-1])

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        return (self._tensor._scale_inv if self._kind == PER_TENSOR else self._tensor._rowwise_scale_inv).nbytes

    def expanded_scale_inv(self) -> torch.Tensor:
        """Return the float32 scale back from FP8, a scalar.

        Raises:
            Fp8UnsupportedError: If the weight has several scales.
        """
        if self._kind != PER_TENSOR:
            raise Fp8UnsupportedError(f'fallback="dither" is for weights with one scale; this is a {self._kind}.')
        return self._tensor._scale_inv.reshape(())

    def values(self) -> torch.Tensor:
        """Return dequantized values, float32 [n, columns]."""
        if self._kind != PER_TENSOR:
            return self._tensor.dequantize(dtype=torch.float32).view(self.local_codes.shape)
        return decoding.values(self.local_codes.view(torch_dtype(self.fmt)), self.fmt) * self.expanded_scale_inv()

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of values [n, columns].

        The tensor's quantizer computes new block scales. A single scale is kept. TransformerEngine stores only its
        reciprocal, so this method tries each scale into FP8 with that reciprocal until the codes equal the tensor's.
        """
        if self._kind != PER_TENSOR:
            quantized = self._tensor._quantizer(values.to(self.dtype).view(self._tensor.shape))
            return quantized._rowwise_data.view(torch.uint8).view(self.local_codes.shape)
        inverse = self.expanded_scale_inv()
        nearest = casts.reciprocal(inverse)
        # the reciprocal of the reciprocal may differ from the scale, by one float32 step at most
        others = [torch.nextafter(nearest, torch.full_like(nearest, end)) for end in (0.0, torch.inf)]
        known = getattr(self._tensor._quantizer, "scale", None)
        others += [] if known is None else [known.detach().reshape(()).to(inverse.device)]
        codes = torch.empty_like(self.local_codes)
        for scale in [nearest, *(other for other in others if torch.equal(casts.reciprocal(other), inverse))]:
            codes = casts.quantize(values, scale, self.fmt).view(torch.uint8)
            if torch.equal(codes, self.local_codes):
                break
        return codes

    def init_values(self) -> torch.Tensor | None:
        """Return TransformerEngine's copy [n, columns], None if missing or cleared.

        Raises:
            StaleInitError: If the copy does not quantize to the current codes.
        """
        values = self.unrounded
        if values is None:
            return None
        if type(values) is not torch.Tensor or not torch.equal(
            self.quantized(values.view(self.local_codes.shape).to(self.device)), self.local_codes
        ):
            raise StaleInitError(
                f"TransformerEngine's copy of a weight {tuple(self.full_shape)} does not quantize to its present "
                "codes: it was changed, or initialized a second time. Reset parameters on the meta device "
                "alone, or name a fallback."
            )
        return values.view(self.local_codes.shape)

    def best_values(self) -> torch.Tensor:
        """Return unrounded values if valid, else dequantized ones, on the codes' device."""
        try:
            values = self.init_values()
        except StaleInitError:
            values = None
        return self.values() if values is None else values.to(self.device)

    @property
    def unrounded(self) -> torch.Tensor | None:
        """TransformerEngine's copy of the unrounded values, not checked; None without one."""
        get = getattr(self._tensor, "get_high_precision_init_val", None)
        return None if get is None else get()

    previous_state: None = None
    previous_state_bytes = 0

    @property
    def preserve_until(self) -> Release | None:
        """When TransformerEngine's copy is dropped."""
        return getattr(self._tensor, PRESERVE_UNTIL, "seed")

    @property
    def master(self) -> Any:
        """Weak reference to the float32 master, and its rounding dtype."""
        return getattr(self._tensor, "_fp8_master", None)

    @master.setter
    def master(self, master: Any) -> None:
        self._tensor._fp8_master = master

    @property
    def live_master(self) -> torch.Tensor | None:
        """The float32 master if it is alive, else None."""
        return None if self.master is None else self.master[0]()

    def after_forward(self, preserve_until: Release | None) -> None:
        """Drop the copy after a forward, as `preserve_until` selects."""
        if preserve_until == "forward" or (preserve_until == "seed" and self.live_master is None):
            self.release()

    def release(self) -> int:
        """Clear TransformerEngine's copy, and return its bytes."""
        values = self.unrounded
        if values is None:
            return 0
        self._tensor.clear_high_precision_init_val()
        return values.nbytes

    def amax_bits(self, values: torch.Tensor) -> torch.Tensor:
        """Return the amax bits, int32 [1]; empty for block scales.

        Their maximum over all ranks determines the scale.
        """
        if self._kind != PER_TENSOR:
            return torch.zeros(0, dtype=torch.int32, device=values.device)
        return _ONE_SCALE.amax_bits(values, Region.whole(self.full_shape))

    def quantize_(self, values: torch.Tensor, bits: torch.Tensor | None, *, record: Record = "start") -> None:
        """Quantize values [n, columns] into the codes, with a scale from `bits`.

        Transposed codes become invalid; TransformerEngine creates them again. Block scales follow from the values, and
        `bits` is not used for them.

        Args:
            values: float16, bfloat16 or float32.
            bits: Maximum of `amax_bits` over ranks; None computes the scale from these values alone.
            record: Has no effect.
        """
        tensor = self._tensor
        if self._kind != PER_TENSOR:
            # in the dtype of the weight, as TransformerEngine casts its own masters
            tensor.quantize_(values.to(self.dtype).view(tensor.shape))
            return
        quantizer = tensor._quantizer
        policy = te_current(
            pow2=getattr(quantizer, "force_pow_2_scales", False), eps=getattr(quantizer, "amax_epsilon", 0.0)
        )
        bits = self.amax_bits(values) if bits is None else bits
        scale = casts.scale_from_amax(_ONE_SCALE.amax(bits, self.full_shape), self.fmt, policy)
        self.local_codes.copy_(casts.quantize(values, scale, self.fmt).view(torch.uint8))
        tensor._scale_inv.copy_(casts.reciprocal(scale).reshape(tensor._scale_inv.shape))
        tensor._transpose_invalid = True
        known = getattr(quantizer, "scale", None)
        if isinstance(known, torch.Tensor):
            known.copy_(scale.reshape(known.shape))


def te_context(backend: str, recipe: Any, *, enabled: bool, preserve: bool) -> contextlib.AbstractContextManager:
    """Return TransformerEngine's context manager, or a null context without TransformerEngine.

    Args:
        backend: "te" requires TransformerEngine. "auto" uses it if it has been imported and has the recipe. "native"
            does not use it.
        recipe: A recipe object of TransformerEngine, a name, a `Recipe`, or None.
        enabled: Whether weights are FP8.
        preserve: Whether TransformerEngine copies the unrounded values.

    Raises:
        Fp8UnsupportedError: If TransformerEngine is required and cannot be imported, or the imported release has no
            such context manager or recipe.
    """
    # "auto" does not import it, because code that builds its modules has imported it before
    if backend == "native" or (backend == "auto" and "transformer_engine.pytorch" not in sys.modules):
        return contextlib.nullcontext()
    te = _imported("transformer_engine.pytorch")
    # newer releases have the first name, older ones only the second
    init = getattr(te, "quantized_model_init", None) or getattr(te, "fp8_model_init", None)
    if init is None:
        raise Fp8UnsupportedError(
            f"transformer_engine {getattr(te, '__version__', '')} has neither quantized_model_init nor fp8_model_init. "
            "Use one of the releases 2.11 to 2.20."
        )
    name = recipe.name if isinstance(recipe, Recipe) else recipe if isinstance(recipe, str) else None
    if name is not None:
        kind = RECIPES.get(name)
        if kind is None and (backend == "auto" or not enabled):
            return contextlib.nullcontext()  # modules of TransformerEngine stay in high precision
        if kind is None:
            raise Fp8UnsupportedError(
                f"transformer_engine has no recipe for {name!r}. Use one of {', '.join(RECIPES)}, or its own recipes."
            )
        recipe = getattr(_imported("transformer_engine.common.recipe"), kind)()
    return init(enabled=enabled, recipe=recipe, preserve_high_precision_init_val=preserve)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise Fp8UnsupportedError(
            f'backend="te" needs TransformerEngine, which cannot be imported here ({error}). Install '
            'transformer_engine[pytorch] with CUDA, or use backend="native".'
        ) from error

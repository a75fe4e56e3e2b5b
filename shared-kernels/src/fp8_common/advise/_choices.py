"""`Choice`: one configuration - how matmuls are computed, how weights and gradients travel - and the table of all."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One configuration of a training step.

    Attributes:
        name: As it is shown.
        products: "bf16"; or the recipe of the FP8 matmuls.
        rate: Share of the device's rate for tensorwise FP8 matmuls that these reach; of its bf16 rate for "bf16".
        cast_bytes: Bytes that casts move outside of matmuls, forward and backward, for each token and unit of width of
            a Llama block (see `COUNTED_WITH`), beyond those that bf16 moves.
        weight_bytes: Bytes of one gathered element of a block's linear layers.
        gradient_bytes: Bytes of one element of a reduced gradient.
        secondary: Whether each node keeps the codes of a block's linear layers, so that they cross nodes once for each
            optimizer step (`keep_secondary_shards` of fp8-torch-fsdp, part of hpZ in ZeRO++).
    """

    name: str
    products: str
    rate: float = 1.0
    cast_bytes: float = 0.0
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    secondary: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether nothing is in FP8."""
        return self.products == "bf16" and self.weight_bytes >= 2.0 and self.gradient_bytes >= 2.0


COUNTED_WITH = (4096, 8192)
"""Width and tokens of the block of which casts were counted: benchmarks and the modelled table of the design notes."""

GATHERED_FP8 = 1.0 + 4 / 4096
"""Bytes of a gathered FP8 element with a scale for each row of 4096; with one scale for the weight it is 1."""
REDUCED_FP8 = 1.0 + 4 / 128
"""Bytes of an FP8 gradient element with one float32 scale for each 128."""

# Counted, compiled, in bytes outside of matmuls for a block of COUNTED_WITH: bf16 4.41e9, ours tensorwise 9.93e9,
# delayed 10.79e9, row-wise 9.89e9, torchao's row-wise 11.11e9; torchao's tensorwise 8.54e9.
_ELEMENTS = COUNTED_WITH[0] * COUNTED_WITH[1]
BF16_BYTES = 4.41e9 / _ELEMENTS
"""Bytes outside of matmuls that a compiled bf16 block moves for each token and unit of width."""


def _casts(total: float) -> float:
    return (total - 4.41e9) / _ELEMENTS


_RECIPES = (
    ("tensorwise", 1.0, _casts(9.93e9), 1.0),
    ("tensorwise_delayed", 1.0, _casts(10.79e9), 1.0),
    # row-wise scaled matmuls reach less than tensorwise ones: 0.85 is an assumption from published kernels
    ("rowwise", 0.85, _casts(9.89e9), GATHERED_FP8),
)

CHOICES: tuple[Choice, ...] = (
    Choice(name="bf16", products="bf16"),
    Choice(name="bf16, gradients bf16", products="bf16", gradient_bytes=2.0),
    Choice(name="bf16 matmuls, gradients FP8", products="bf16", gradient_bytes=REDUCED_FP8),
    Choice(name="bf16 matmuls, weights FP8", products="bf16", weight_bytes=1.0),
    Choice(
        name="bf16 matmuls, weights and gradients FP8",
        products="bf16",
        weight_bytes=1.0,
        gradient_bytes=REDUCED_FP8,
    ),
    *(
        Choice(
            name=f"{name}, weights {weights}, gradients {gradients}",
            products=name,
            rate=rate,
            cast_bytes=casts,
            weight_bytes=wire if weights == "FP8" else 2.0,
            gradient_bytes=REDUCED_FP8 if gradients == "FP8" else 4.0,
        )
        for name, rate, casts, wire in _RECIPES
        for weights, gradients in (("bf16", "float32"), ("FP8", "float32"), ("FP8", "FP8"))
    ),
    # row-wise scaled weights have no secondary shards: their ranks agree on nothing
    *(
        Choice(
            name=f"{name}, weights FP8 once per step between nodes, gradients FP8",
            products=name,
            rate=rate,
            cast_bytes=casts,
            weight_bytes=wire,
            gradient_bytes=REDUCED_FP8,
            secondary=True,
        )
        for name, rate, casts, wire in _RECIPES
        if name != "rowwise"
    ),
)
"""Every configuration that is compared; the first is what speed-ups are measured against."""

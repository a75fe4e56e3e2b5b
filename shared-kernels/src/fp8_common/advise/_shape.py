"""`ModelShape`: the sizes of a decoder model on which its step depends, from a configuration file or written out."""

import dataclasses
import json
from pathlib import Path
from typing import Self

from fp8_common._errors import Fp8Error
from fp8_common.advise._config import decoder_sizes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A stack of equal transformer blocks between an embedding and a head.

    Attributes:
        blocks: Number of blocks.
        width: Width of the hidden states.
        linear: Weights of the linear layers of one block that see every token, as (out_features, in_features).
        vocabulary: Rows of the embedding; 0 leaves embedding and head out.
        tied: Whether the head is the embedding.
        expert: Weights of the linear layers of one expert, as (out_features, in_features).
        experts: Experts of one block, all of which are sharded and gathered.
        active: Experts that see a token.
    """

    blocks: int
    width: int
    linear: tuple[tuple[int, int], ...]
    vocabulary: int = 0
    tied: bool = False
    expert: tuple[tuple[int, int], ...] = ()
    experts: int = 0
    active: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that are no sizes."""
        sizes = (self.blocks, self.width, *(side for weight in (*self.linear, *self.expert) for side in weight))
        if (
            not (self.linear or self.expert)
            or any(type(size) is not int or size < 1 for size in sizes)
            or self.vocabulary < 0
        ):
            raise Fp8Error(f"A model needs positive whole sizes and at least one linear layer, got {self}.")
        if not (0 <= self.active <= self.experts and bool(self.expert) == bool(self.experts) == bool(self.active)):
            raise Fp8Error(
                f"Experts need their layers, their number and how many see a token, at most all: got {self.experts} of "
                f"{list(self.expert)}, {self.active} active."
            )

    @property
    def block_weights(self) -> int:
        """Elements of the linear weights of one block, all experts included."""
        return _elements(self.linear) + self.experts * _elements(self.expert)

    @property
    def active_weights(self) -> int:
        """Elements of one block that a token is multiplied with."""
        return _elements(self.linear) + self.active * _elements(self.expert)

    @property
    def other_weights(self) -> int:
        """Elements of embedding and head."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Elements of all of these; norms and biases are left out."""
        return self.blocks * self.block_weights + self.other_weights

    @classmethod
    def from_config(cls, path: Path) -> Self:
        """Read the `config.json` of a Hugging Face decoder with gated linear units, of experts or not.

        Grouped queries (Llama, Qwen3, Mixtral, Qwen3-MoE, GPT-OSS) and DeepSeek's latent attention are known. All
        blocks count alike: those few that are dense in a model of experts count like the others.

        Raises:
            Fp8Error: The file cannot be read, or lacks a size.
        """
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise Fp8Error(f"{str(path)!r} cannot be read as a model's configuration: {error}.") from error
        if not isinstance(config, dict):
            raise Fp8Error(f"{str(path)!r} must hold a JSON object, got {type(config).__name__}.")
        return cls(**decoder_sizes(config.get("text_config", config), str(path)))

    @classmethod
    def parse(cls, linear: str, blocks: int, vocabulary: int) -> Self:
        """Read shapes written as "4096x4096,14336x4096" (out x in), the layers of one block in order.

        Raises:
            Fp8Error: The text is something else.
        """
        try:
            pairs = [tuple(map(int, weight.split("x"))) for weight in linear.split(",")]
            weights = tuple((out, features) for out, features in pairs)
        except ValueError as error:
            raise Fp8Error(f"Shapes are written like 4096x4096,14336x4096 (out x in), got {linear!r}.") from error
        return cls(blocks=blocks, width=weights[0][1], linear=weights, vocabulary=vocabulary)


def _elements(weights: tuple[tuple[int, int], ...]) -> int:
    return sum(out * features for out, features in weights)


LLAMA_3_8B = ModelShape(
    blocks=32,
    width=4096,
    linear=((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)),
    vocabulary=128256,
)
LLAMA_3_70B = ModelShape(
    blocks=80,
    width=8192,
    linear=((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672)),
    vocabulary=128256,
)
SHAPES = {"llama3-8b": LLAMA_3_8B, "llama3-70b": LLAMA_3_70B}
"""Models by name."""

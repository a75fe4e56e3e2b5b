"""`ModelShape`: the sizes of a decoder model on which its step depends, from a configuration file or written out."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fp8_common._errors import Fp8Error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A stack of equal transformer blocks between an embedding and a head.

    Attributes:
        blocks: Number of blocks.
        width: Width of the hidden states.
        linear: Weights of the linear layers of one block, as (out_features, in_features).
        vocabulary: Rows of the embedding; 0 leaves embedding and head out.
        tied: Whether the head is the embedding.
    """

    blocks: int
    width: int
    linear: tuple[tuple[int, int], ...]
    vocabulary: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that are no sizes."""
        sizes = (self.blocks, self.width, *(side for weight in self.linear for side in weight))
        if not self.linear or any(type(size) is not int or size < 1 for size in sizes) or self.vocabulary < 0:
            raise Fp8Error(f"A model needs positive whole sizes and at least one linear layer, got {self}.")

    @property
    def block_weights(self) -> int:
        """Elements of the linear weights of one block."""
        return sum(out * features for out, features in self.linear)

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
        """Read the `config.json` of a Hugging Face model with gated linear units and grouped queries (Llama, Qwen3).

        Raises:
            Fp8Error: The file cannot be read, or describes experts or lacks a size.
        """
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise Fp8Error(f"{str(path)!r} cannot be read as a model's configuration: {error}.") from error
        if not isinstance(config, dict):
            raise Fp8Error(f"{str(path)!r} must hold a JSON object, got {type(config).__name__}.")
        return cls._of_decoder(config.get("text_config", config), str(path))

    @classmethod
    def _of_decoder(cls, config: Mapping[str, Any], where: str) -> Self:
        needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if missing := [name for name in needed if name not in config]:
            raise Fp8Error(f"{where} has no {', '.join(missing)}. Write the shapes out with --linear and --blocks.")
        if any("expert" in name for name in config):
            raise Fp8Error(f"{where} describes a mixture of experts, which is not modelled. Take a dense model.")
        width, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or width // heads
        keys = head * (config.get("num_key_value_heads") or heads)
        wide = config["intermediate_size"]
        return cls(
            blocks=config["num_hidden_layers"],
            width=width,
            linear=(
                (head * heads, width),
                (keys, width),
                (keys, width),
                (width, head * heads),
                (wide, width),
                (wide, width),
                (width, wide),
            ),
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

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

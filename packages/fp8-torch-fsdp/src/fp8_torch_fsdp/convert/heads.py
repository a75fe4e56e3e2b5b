"""`HeadReport`: the output heads of a model, what their matmul does, how their weight travels and who shares it."""

import dataclasses

from torch import nn

from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.layers.linear import Float8Linear


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadReport:
    """An output head; `str()` makes a sentence.

    Attributes:
        name: Fully qualified name of the layer.
        fp8: Whether its matmuls run in FP8.
        gathered: Whether FSDP2 gathers its weight in FP8.
        shared_with: Fully qualified name of the embedding whose weight it is, or "".
    """

    name: str
    fp8: bool
    gathered: bool
    shared_with: str

    def __str__(self) -> str:
        """Return the sentence."""
        matmul = "FP8" if self.fp8 else "high-precision"
        shared = f"shared with {self.shared_with}, " if self.shared_with else ""
        wire = "FP8" if self.gathered else "high precision"
        return f"Output head {self.name}: {matmul} matmul, weight {shared}gathered in {wire}."


def tied_heads(model: nn.Module) -> set[nn.Module]:
    """Return the linear layers whose weight is an embedding's too."""
    embedded = {id(module._parameters["weight"]) for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return {module for module in linear if id(module._parameters.get("weight")) in embedded}


def output_heads(model: nn.Module) -> dict[HeadReport, nn.Linear]:
    """Return the output heads of a model: layers that share an embedding's weight, or map to its vocabulary.

    The vocabulary is the rows of the largest embedding; those of positions and types have fewer.
    """
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    owners = {id(module._parameters["weight"]): name for name, module in embeddings.items()}
    vocabulary = max((module.num_embeddings for module in embeddings.values()), default=None)
    found = dict[HeadReport, nn.Linear]()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = module._parameters.get("weight")
        shared_with = owners.get(id(weight), "")
        if shared_with or module.out_features == vocabulary:
            local = getattr(weight, "_local_tensor", weight)
            report = HeadReport(
                name=name,
                fp8=isinstance(module, Float8Linear),
                gathered=isinstance(local, ShardedFloat8Weight),
                shared_with=shared_with,
            )
            found[report] = module
    return found

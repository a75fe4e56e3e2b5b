"""`roles_of`: finds adapters, routers and output heads, which stay in high precision.

They are found by their names, their shapes and their positions in the model.

- Routers choose the experts of each token. Rounding their logits can change the choice, which no later layer corrects,
  and a router has about a thousandth of the experts' weights.
- Adapters are low-rank matrices added to layers. Their output is small compared to the layer's output, they are too
  narrow for FP8 matmuls, and they have few bytes.
- Output heads compute the logits: their rounding error directly affects the loss.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from fp8_torch_fsdp.convert.expert_layouts import ExpertLayout, layout_of
from fp8_torch_fsdp.layers.experts import Float8Experts

CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_LEVELS = 2
"""Largest number of levels from experts up to a module with their router; torchtitan's models have two."""

_HEADS = ("lm_head", "embed_out", "output", "head")
"""Names of output heads in Transformers and torchtitan."""


def users_of_parameters(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules that hold each parameter, by parameter id.

    Ids are valid while the model holds the parameter.
    """
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        # `_parameters`, because the `weight` of a parametrized layer is computed at each access
        for name, parameter in module._parameters.items():
            users.setdefault(id(parameter), []).append((module, name))
    return users


class Roles(NamedTuple):
    """Modules of a model that remain in high precision by default.

    Attributes:
        adapters: Modules with a part of their name that begins with `lora_`, in any case, as in PEFT and torchtitan.
        routers: Modules with a weight [experts, features] that selects experts, or [1, features] that weights shared
            experts.
        heads: Output heads, each with the name of the embedding that shares its weight, or "".
    """

    adapters: set[nn.Module]
    routers: set[nn.Module]
    heads: dict[nn.Module, str]

    def reasons(self, *, routers: bool, heads: bool) -> dict[nn.Module, str]:
        """Return the modules to leave unconverted, with reasons.

        Args:
            routers: Whether routers are converted.
            heads: Whether output heads are converted.
        """
        excluded = dict.fromkeys(self.adapters, "an adapter")
        if not routers:
            excluded |= dict.fromkeys(self.routers, "a router, which chooses experts")
        if not heads:
            for head, embedding in self.heads.items():
                shared = " whose weight is an embedding's" if embedding else ""
                excluded[head] = f"an output head{shared} (heads=True converts it)"
        return excluded


NO_EXPERTS: Mapping[type, ExpertLayout] = {}
"""No layouts of the user's classes of experts."""


def roles_of(model: nn.Module, experts: Mapping[type, ExpertLayout] = NO_EXPERTS) -> Roles:
    """Return the adapters, routers and output heads of a model.

    Args:
        model: Any model.
        experts: Layouts of the user's classes of experts.
    """
    modules = dict(model.named_modules())
    adapters = {
        module for name, module in modules.items() if any(part.lower().startswith("lora_") for part in name.split("."))
    }
    return Roles(adapters, _routers(modules, experts), _output_heads(modules))


def _output_heads(modules: Mapping[str, nn.Module]) -> dict[nn.Module, str]:
    """Return the output heads among the modules of a model.

    An output head is a linear layer that

    - shares its weight with an embedding,
    - is the only one with as many outputs as the largest embedding has rows (position and type embeddings have fewer),
    - or has the name of a head outside of numbered blocks, as in pipeline stages without an embedding.
    """
    embeddings = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}
    owners = {id(module._parameters["weight"]): name for name, module in embeddings.items()}
    vocabulary, width = max(((each.num_embeddings, each.embedding_dim) for each in embeddings.values()), default=(0, 0))
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    # If the vocabulary is as large as the width of the model, or several layers fit, sizes are ambiguous.
    by_size = [module for module in linear.values() if module.out_features == vocabulary != width]
    heads = dict[nn.Module, str]()
    for name, module in linear.items():
        shared = owners.get(id(module._parameters.get("weight")))
        *above, last = name.split(".")
        by_name = last in _HEADS and not any(part.isdigit() for part in above)
        if shared is not None or by_size == [module] or by_name:
            heads[module] = shared or ""
    return heads


def _routers(modules: Mapping[str, nn.Module], user_layouts: Mapping[type, ExpertLayout]) -> set[nn.Module]:
    """Return the routers among the modules of a model.

    A router is near a module of experts and has one output for each of its experts, or one output for shared experts.
    """
    routers: set[nn.Module] = set()
    for name, module in modules.items():
        count = _experts_in(name, module, user_layouts)
        if count < 2:
            continue
        above = name
        for _ in range(_LEVELS if name else 0):
            above = above.rpartition(".")[0]
            candidates = [
                other
                for other in modules[above].modules()
                if _out_features(other) in (count, 1) and other not in set(module.modules())
            ]
            routers |= set(candidates)
            if above == "" or any(_out_features(other) == count for other in candidates):
                break  # other layers further above may have as many outputs by chance
    return routers


def _experts_in(name: str, module: nn.Module, user_layouts: Mapping[type, ExpertLayout]) -> int:
    """Return the number of experts in a module; 0 for other modules."""
    if isinstance(module, nn.ModuleList):
        return len(module) if "expert" in name.rpartition(".")[2] else 0
    layout = module.fp8_layout if isinstance(module, Float8Experts) else layout_of(module, user_layouts)
    if layout is None:
        stacks = list(stacked_parameters(module))
        return stacks[0].shape[0] if stacks else 0
    weight = module._parameters.get(layout.weights[0])
    return 0 if weight is None else weight.shape[0]


def stacked_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the floating-point parameters [n, rows, columns] of a module.

    Convolutions have none. Parameters with a dimension of 1 are skipped.
    """
    if isinstance(module, CONVOLUTIONS):
        return
    for parameter in module._parameters.values():
        if parameter is None or is_lazy(parameter) or parameter.ndim != 3 or not parameter.is_floating_point():
            continue
        if min(parameter.shape) > 1:  # learned positions and queries are [1, n, features]
            yield parameter


def _out_features(module: nn.Module) -> int:
    """Return the rows of a weight matrix; 0 for embeddings and others."""
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        return 0
    return weight.shape[0]

"""`roles_of`: finds layers kept in high precision by names and places.

Routers choose the experts of each token: rounded logits change the choice, which nothing later can repair, and a router
is about a thousandth of the experts' weights. Adapters are low-rank matrices added to layers: their output is small
against the layer's, they are too narrow for FP8 matmuls, and few bytes. Output heads give the logits, where rounding
goes directly into the loss.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from fp8_torch_fsdp.convert.expert_layouts import ExpertLayout, layout_of
from fp8_torch_fsdp.layers.experts import Float8Experts

CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_LEVELS = 2
"""How far above its experts a router can be: torchtitan's experts are two levels below the module that has both."""

_HEADS = ("lm_head", "embed_out", "output", "head")
"""Names of linear layers that compute logits, in Transformers and torchtitan."""


def users_of_parameters(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules that hold each parameter, by parameter id.

    Ids are valid while the model keeps the parameter.
    """
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        # `_parameters`, because `weight` of a parametrized layer is computed and is no parameter
        for name, parameter in module._parameters.items():
            users.setdefault(id(parameter), []).append((module, name))
    return users


class Roles(NamedTuple):
    """The modules of a model that stay in high precision by default.

    Attributes:
        adapters: Modules below `lora_A`, `lora_b` and other names of adapters in PEFT and torchtitan.
        routers: Modules whose weight [experts, features] chooses among experts, or [1, features] weighs shared ones.
        heads: Output heads, each with the name of the embedding that shares its weight, or "".
    """

    adapters: set[nn.Module]
    routers: set[nn.Module]
    heads: dict[nn.Module, str]

    def reasons(self, *, routers: bool, heads: bool) -> dict[nn.Module, str]:
        """Return the modules to leave unconverted, with reasons.

        `routers` and `heads` select more of them.
        """
        wide = dict.fromkeys(self.adapters, "an adapter")
        if not routers:
            wide |= dict.fromkeys(self.routers, "a router, which chooses experts")
        if not heads:
            for head, embedding in self.heads.items():
                shared = " whose weight is an embedding's" if embedding else ""
                wide[head] = f"an output head{shared} (heads=True converts it)"
        return wide


NO_EXPERTS: Mapping[type, ExpertLayout] = {}


def roles_of(model: nn.Module, experts: Mapping[type, ExpertLayout] = NO_EXPERTS) -> Roles:
    """Return the modules of any model that have a role.

    `experts` are the layouts of the user's classes of experts.
    """
    modules = dict(model.named_modules())
    adapters = {
        module for name, module in modules.items() if any(part.lower().startswith("lora_") for part in name.split("."))
    }
    return Roles(adapters, _routers(modules, experts), _output_heads(modules))


def _output_heads(modules: Mapping[str, nn.Module]) -> dict[nn.Module, str]:
    """Return the output heads among the modules of a model.

    They are linear layers that share the weight, the only layer with as many outputs as the largest embedding has rows
    (position and type embeddings have fewer), or layers with a head's name outside of numbered blocks, as in parts of a
    pipeline without an embedding.
    """
    embeddings = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}
    owners = {id(module._parameters["weight"]): name for name, module in embeddings.items()}
    vocabulary, width = max(((each.num_embeddings, each.embedding_dim) for each in embeddings.values()), default=(0, 0))
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    # a vocabulary as large as the model, or wide layers, make sizes ambiguous
    by_size = [module for module in linear.values() if module.out_features == vocabulary != width]
    heads = dict[nn.Module, str]()
    for name, module in linear.items():
        shared = owners.get(id(module._parameters.get("weight")))
        *above, last = name.split(".")
        by_name = last in _HEADS and not any(part.isdigit() for part in above)
        if shared is not None or by_size == [module] or by_name:
            heads[module] = shared or ""
    return heads


def _routers(modules: Mapping[str, nn.Module], own: Mapping[type, ExpertLayout]) -> set[nn.Module]:
    """Return the routers among the modules of a model."""
    routers: set[nn.Module] = set()
    for name, module in modules.items():
        count = _experts_in(name, module, own)
        if count < 2:
            continue
        above = name
        for _ in range(_LEVELS if name else 0):
            above = above.rpartition(".")[0]
            beside = [
                other
                for other in modules[above].modules()
                if _out_features(other) in (count, 1) and other not in set(module.modules())
            ]
            routers |= set(beside)
            if above == "" or any(_out_features(other) == count for other in beside):
                break  # further above are other layers, which may have as many outputs by chance
    return routers


def _experts_in(name: str, module: nn.Module, own: Mapping[type, ExpertLayout]) -> int:
    """Return a module's number of experts, 0 for other modules."""
    if isinstance(module, nn.ModuleList):
        return len(module) if "expert" in name.rpartition(".")[2] else 0
    layout = module.fp8_layout if isinstance(module, Float8Experts) else layout_of(module, own)
    if layout is None:
        stacks = list(stacked_parameters(module))
        return stacks[0].shape[0] if stacks else 0
    weight = module._parameters.get(layout.weights[0])
    return 0 if weight is None else weight.shape[0]


def stacked_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return parameters of three dimensions that are no convolution."""
    if isinstance(module, CONVOLUTIONS):
        return
    for parameter in module._parameters.values():
        if parameter is None or is_lazy(parameter) or parameter.ndim != 3 or not parameter.is_floating_point():
            continue
        if min(parameter.shape) > 1:  # [1, n, features] are positions and queries that are learned
            yield parameter


def _out_features(module: nn.Module) -> int:
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        return 0
    return weight.shape[0]

"""Disable the fused inference kernel of `nn.TransformerEncoderLayer`, which bypasses layers.

It would compute converted layers in high precision in evaluation and in FP8 in training; nothing is gained by it there.
"""

from collections.abc import Collection

from torch import nn

_KEPT = "fp8_fast_path"


def turn_off(module: nn.Module, converted: Collection[nn.Module]) -> None:
    """Disable an encoder's fast path if it holds any of `converted`."""
    name = _switch_of(module)
    if name and name in vars(module) and any(layer in converted for layer in module.modules()):
        # setdefault: a second conversion of the model must not take the 0 of the first for the original value
        vars(module).setdefault(_KEPT, getattr(module, name))
        setattr(module, name, 0)


def restore(module: nn.Module) -> None:
    """Undo `turn_off`."""
    if _KEPT in vars(module):
        setattr(module, _switch_of(module), vars(module).pop(_KEPT))


def _switch_of(module: nn.Module) -> str:
    """Return the attribute that enables the fast path.

    In an encoder it also passes on nested tensors.
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        # 0 stands for any other activation, for which torch has no fused kernel.
        return "activation_relu_or_gelu"
    return "use_nested_tensor" if isinstance(module, nn.TransformerEncoder) else ""

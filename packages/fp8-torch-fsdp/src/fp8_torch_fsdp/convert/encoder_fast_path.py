"""Disable the fused inference kernel of `nn.TransformerEncoderLayer`, which bypasses layers.

The kernel reads the weights without calling the linear layers. With it, a converted encoder would compute in high
precision in evaluation and in FP8 in training.
"""

from collections.abc import Collection

from torch import nn

_SAVED_VALUE = "fp8_fast_path"
"""Attribute of an encoder that holds the original value of its switch."""


def turn_off(module: nn.Module, converted: Collection[nn.Module]) -> None:
    """Disable an encoder's fast path if it contains any of `converted`."""
    name = _switch_of(module)
    if name and name in vars(module) and any(layer in converted for layer in module.modules()):
        # setdefault: a second conversion must not save the 0 of the first one as the original value
        vars(module).setdefault(_SAVED_VALUE, getattr(module, name))
        setattr(module, name, 0)


def restore(module: nn.Module) -> None:
    """Undo `turn_off`."""
    if _SAVED_VALUE in vars(module):
        setattr(module, _switch_of(module), vars(module).pop(_SAVED_VALUE))


def _switch_of(module: nn.Module) -> str:
    """Return the attribute that enables a module's fast path; "" without one.

    For `nn.TransformerEncoder` the attribute enables nested tensors, which only the fused kernels of its layers accept.
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        # 0 means another activation than ReLU and GELU, for which torch has no fused kernel.
        return "activation_relu_or_gelu"
    return "use_nested_tensor" if isinstance(module, nn.TransformerEncoder) else ""

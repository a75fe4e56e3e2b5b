"""A converter of torchtitan's configuration tree that turns FP8 on.

torchtitan builds models from configurations, and converters change the configuration before. The layers of this package
are made from built layers, so the converter changes how the root is built: as before, then converted. Layers stay
instances of torchtitan's `Linear`, which its initialisation and its checks rely on.
"""

import dataclasses
from functools import cache
from typing import Any

from torch import nn

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_torch_fsdp.config import Float8LinearConfig
from fp8_torch_fsdp.convert.model import convert_to_float8_training
from fp8_torch_fsdp.convert.select import auto_filter_for_recipe
from fp8_torch_fsdp.expert_parallel.torchtitan import dispatch_in_codes
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.scales.delayed import DelayedScale
from fp8_torch_fsdp.tensor_parallel.placed import ByWeight

try:
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise Fp8UnsupportedError(
        f"fp8_torch_fsdp.integrations.torchtitan needs torchtitan 0.3 with its converters of configurations ({error}). "
        "Install torchtitan and Triton, which it imports, or call convert_to_float8_training on your model."
    ) from error


class ProtocolScale(DelayedScale, Module):
    """`DelayedScale` as a torchtitan `Module`, which torchtitan requires."""


class Float8Converter(QuantizationConverter):
    """Converts the linear layers of a torchtitan model to FP8.

    Pass its Config in `converters=[...]`.

    Weights are gathered in FP8 by FSDP2 and HSDP. Under torchtitan's tensor parallelism with `spmd_backend`
    "partial_dtensor" layers follow the sharding of their weights, with one amax over the mesh; torchtitan communicates
    the activations.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Settings of the conversion.

        Attributes:
            recipe: Name of a recipe, see `Float8LinearConfig.from_recipe_name`.
            fp8: A configuration instead of a recipe.
            filter_fqns: Parts of names of layers that stay in high precision.
            skip_small: Whether to exclude layers that `auto_filter_for_recipe` considers too small or odd-sized.
            dispatch_in_codes: Send tokens to experts on other ranks as FP8 codes, see `dispatch_tokens`; with recipe
                "rowwise" and torchtitan's all-to-all dispatcher.
        """

        recipe: str = "tensorwise"
        fp8: Float8LinearConfig | None = None
        filter_fqns: list[str] = dataclasses.field(default_factory=lambda: ["lm_head", "output"])
        skip_small: bool = False
        dispatch_in_codes: bool = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.fp8 = config.fp8 or Float8LinearConfig.from_recipe_name(config.recipe)

    def convert(self, model_config: Any) -> Any:
        """Return a configuration that builds the same model with FP8 layers.

        Args:
            model_config: The configuration of a model, a `Module.Config`.
        """
        # Copy the fields one by one into a subclass that overrides `build`.
        fields = {f.name: getattr(model_config, f.name) for f in dataclasses.fields(model_config) if f.init}
        return _converting(type(model_config))(**fields, fp8_converter=self)

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert a model that was built."""
        auto = auto_filter_for_recipe(self.fp8, self.config.filter_fqns)

        def keep(layer: nn.Module, name: str) -> bool:
            if self.config.skip_small:
                return auto(layer, name)
            return not any(part in name for part in self.config.filter_fqns)

        model = convert_to_float8_training(model, config=self.fp8, module_filter_fn=keep)
        for module in model.modules():
            if isinstance(module, Float8Linear):
                module.set_strategy(ByWeight())  # torchtitan cuts the weights later
            elif isinstance(module, DelayedScale):
                module.__class__ = ProtocolScale
        if self.config.dispatch_in_codes:
            dispatch_in_codes(model)
        return model


@cache
def _converting(config_class: type) -> type:
    """Return a configuration class that builds and converts `config_class`'s module."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Converting(config_class):
        fp8_converter: Any = None

        def build(self, **kwargs: Any) -> nn.Module:
            if self.fp8_converter is None:
                raise Fp8Error("This configuration was not made by Float8Converter: use Float8Converter.convert.")
            # By name: dataclass(slots=True) makes a second class, and super() without arguments would know the first
            # one.
            return self.fp8_converter.apply(config_class.build(self, **kwargs))

    Converting.__name__ = Converting.__qualname__ = f"Float8{config_class.__qualname__}"
    return Converting

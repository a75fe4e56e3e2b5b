"""`Float8Converter`: a torchtitan converter that enables FP8.

torchtitan builds models from configurations, and its converters modify the configurations. This package converts built
layers, so the converter returns a configuration that builds the model as before and then converts it. Converted layers
remain instances of torchtitan's `Linear`, as torchtitan's initialization and checks require.
"""

import dataclasses
from functools import cache
from typing import Any

from torch import nn

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.recipe import get_recipe
from fp8_torch_fsdp.config import Float8TrainingConfig
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

    Pass its `Config` in `converters=[...]`.

    FSDP2 and HSDP gather the weights in FP8. Under torchtitan's tensor parallelism with `spmd_backend`
    "partial_dtensor", each layer follows the sharding of its weight, with one amax over the mesh, and torchtitan
    communicates the activations.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Settings of the conversion.

        Attributes:
            recipe: Name of a recipe, see `Float8TrainingConfig`.
            fp8: Configuration, used instead of `recipe`.
            filter_fqns: Parts of names of layers that remain in high precision.
            skip_small: Whether to exclude layers that `auto_filter_for_recipe` excludes.
            dispatch_in_codes: Whether to send tokens to experts on other ranks as FP8 codes, see `dispatch_tokens`.
                Requires the recipe "rowwise" and torchtitan's all-to-all dispatcher.
        """

        recipe: str = "tensorwise"
        fp8: Float8TrainingConfig | None = None
        filter_fqns: list[str] = dataclasses.field(default_factory=lambda: ["lm_head", "output"])
        skip_small: bool = False
        dispatch_in_codes: bool = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.fp8 = config.fp8 or Float8TrainingConfig(recipe=get_recipe(config.recipe))

    def convert(self, model_config: Any) -> Any:
        """Return a configuration that builds the same model with FP8 layers.

        Args:
            model_config: Configuration of a model, a `Module.Config`.
        """
        # The result is of a subclass that overrides `build`, with the same fields.
        fields = {f.name: getattr(model_config, f.name) for f in dataclasses.fields(model_config) if f.init}
        return _converting(type(model_config))(**fields, fp8_converter=self)

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert a model that torchtitan has built, in place."""
        auto = auto_filter_for_recipe(self.fp8, self.config.filter_fqns)

        def keep(layer: nn.Module, name: str) -> bool:
            if self.config.skip_small:
                return auto(layer, name)
            return not any(part in name for part in self.config.filter_fqns)

        model = convert_to_float8_training(model, config=self.fp8, module_filter_fn=keep)
        for module in model.modules():
            if isinstance(module, Float8Linear):
                module.set_strategy(ByWeight())  # torchtitan shards the weights later
            elif isinstance(module, DelayedScale):
                module.__class__ = ProtocolScale
        if self.config.dispatch_in_codes:
            dispatch_in_codes(model)
        return model


@cache
def _converting(config_class: type) -> type:
    """Return a subclass of a configuration that converts the module it builds."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Converting(config_class):
        fp8_converter: Any = None

        def build(self, **kwargs: Any) -> nn.Module:
            if self.fp8_converter is None:
                raise Fp8Error("This configuration was not created by Float8Converter. Use Float8Converter.convert.")
            # Not super(): dataclass(slots=True) creates another class than the one that super() refers to.
            return self.fp8_converter.apply(config_class.build(self, **kwargs))

    Converting.__name__ = Converting.__qualname__ = f"Float8{config_class.__qualname__}"
    return Converting

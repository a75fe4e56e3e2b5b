"""`enable_float8_all_gather`: FP8 communication without FP8 compute, for layers of any kind."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import CastRecipe, Fp8Error, select_modules
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight, WeightInfo
from fp8_torch_fsdp.all_gather.state_dict import keep_state_dicts_plain
from fp8_torch_fsdp.config import CastConfig
from fp8_torch_fsdp.convert.kinds import adapters, routers
from fp8_torch_fsdp.convert.new_parameter import refuse_replaced, replaced_by
from fp8_torch_fsdp.reduce_scatter import ParameterSelection
from fp8_torch_fsdp.scales.weight_cast import WeightCast

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def enable_float8_all_gather(
    model: nn.Module, *, parameters: ParameterSelection = None, cast: CastRecipe | None = None
) -> list[str]:
    """Let FSDP2 gather weights in FP8 and hand them to unchanged layers in high precision.

    Call it before `fully_shard`.

    The layers compute with weights that were rounded to FP8: the same numbers as FP8 weights, none of the speed of FP8
    matmuls, half the bytes of a gather. Works for every layer that uses its parameters as tensors.

    Args:
        model: The model.
        parameters: Which of its floating point parameters of two or more dimensions; by default all of them but those
            of embeddings, routers and adapters. What is converted is gathered in FP8 already.
        cast: How weights are cast; dynamic tensorwise E4M3 by default.

    Returns:
        The names of the parameters that are gathered in FP8 from now on.

    Raises:
        Fp8Error: No such parameter, a rule that decides nothing, a cast that weights cannot have, or a parameter that
            is sharded already or was replaced by an earlier call.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    left = (*embeddings, *routers(model, {}), *adapters(model)) if parameters is None else ()
    wide = {id(own) for module in left for own in module.parameters(recurse=False)}
    able = {
        name: own
        for name, own in model.named_parameters()
        if own.ndim >= 2 and own.dtype in _DTYPES and id(own) not in wide and not isinstance(own, ShardedFloat8Weight)
    }
    names = [name for name, decision in select_modules(able, parameters).items() if decision.include]
    if not names:
        raise Fp8Error("No parameter to gather in FP8: the model has no floating point weights of two dimensions.")
    cast = cast or CastConfig()
    if cast.scaling not in ("dynamic", "static"):
        raise Fp8Error(f"Weights of unchanged layers are cast with dynamic or static scaling, got {cast.scaling!r}.")
    weight_cast = WeightCast.of(cast, decode=True)
    wrapped = {id(able[name]): _wrap(able[name], weight_cast, name) for name in names}
    for module in model.modules():
        # `_parameters`: each module that shares a parameter has to get the new one
        for name, parameter in module._parameters.items():
            if id(parameter) in wrapped:
                module._parameters[name] = wrapped[id(parameter)]
                keep_state_dicts_plain(module)
    return names


def _wrap(parameter: nn.Parameter, cast: WeightCast, name: str) -> nn.Parameter:
    if isinstance(parameter, (DTensor, ShardedFloat8Weight)):
        raise Fp8Error(f"{name} is already sharded or gathered in FP8. Call enable_float8_all_gather once, first.")
    refuse_replaced(parameter, name)
    data = ShardedFloat8Weight(parameter.detach(), WeightInfo(cast))
    return replaced_by(parameter, data, "enable_float8_all_gather")

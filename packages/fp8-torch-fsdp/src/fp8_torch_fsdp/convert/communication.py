"""`enable_float8_all_gather`: FP8 communication without FP8 compute, for layers of any kind."""

from collections.abc import Iterable

import torch
from torch import nn

from fp8_common import CastRecipe, Fp8Error
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight, WeightInfo
from fp8_torch_fsdp.all_gather.state_dict import keep_state_dicts_plain
from fp8_torch_fsdp.config import CastConfig
from fp8_torch_fsdp.convert.kinds import adapters, routers
from fp8_torch_fsdp.convert.new_parameter import refuse_replaced, replaced_by
from fp8_torch_fsdp.scales.weight_cast import WeightCast

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def enable_float8_all_gather(
    target: nn.Module | Iterable[nn.Parameter], *, model: nn.Module | None = None, cast: CastRecipe | None = None
) -> list[str]:
    """Let FSDP2 gather weights in FP8 and hand them to unchanged layers in high precision.

    Call it before `fully_shard`.

    The layers compute with weights that were rounded to FP8: the same numbers as FP8 weights, none of the speed of FP8
    matmuls, half the bytes of a gather. Works for every layer that uses its parameters as tensors.

    Args:
        target: A model, all of whose floating point parameters of two or more dimensions are meant, except those of
            embeddings, routers and adapters, and of layers that were converted; or an iterable of parameters of
            `model`.
        model: The model that owns the parameters, when `target` is an iterable.
        cast: How weights are cast; dynamic tensorwise E4M3 by default.

    Returns:
        The names of the parameters that are gathered in FP8 from now on.

    Raises:
        Fp8Error: No such parameter, a parameter already sharded or replaced by an earlier call, or parameters given
            without their model.
    """
    model, wanted = _resolve(target, model)
    weight_cast = WeightCast.of(cast or CastConfig(), decode=True)
    wrapped: dict[int, nn.Parameter] = {}
    names = []
    for prefix, module in model.named_modules():
        # `_parameters` and not `named_parameters`: each module that shares a parameter has to get the new one.
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) not in wanted:
                continue
            full_name = f"{prefix}.{name}".lstrip(".")
            if id(parameter) not in wrapped:
                wrapped[id(parameter)] = _wrap(parameter, weight_cast, full_name)
            module._parameters[name] = wrapped[id(parameter)]
            keep_state_dicts_plain(module)
            names.append(full_name)
    if not names:
        raise Fp8Error("No parameter to gather in FP8: the model has no floating point weights of two dimensions.")
    return names


def _resolve(
    target: nn.Module | Iterable[nn.Parameter], model: nn.Module | None
) -> tuple[nn.Module, dict[int, object]]:
    """Return the model and the parameters by id; the parameters too, so that no other gets the id of one."""
    if not isinstance(target, nn.Module):
        if model is None:
            raise Fp8Error("enable_float8_all_gather(parameters) needs model=, the module that owns them.")
        return model, {id(parameter): parameter for parameter in target}
    embeddings = [module for module in target.modules() if isinstance(module, nn.Embedding)]
    kept = (*embeddings, *routers(target, {}), *adapters(target))
    wide = {id(p) for module in kept for p in module.parameters(recurse=False)}
    wanted = (p for p in target.parameters() if p.ndim >= 2 and p.dtype in _DTYPES and id(p) not in wide)
    return target, {id(p): p for p in wanted if not isinstance(p, ShardedFloat8Weight)}


def _wrap(parameter: nn.Parameter, cast: WeightCast, name: str) -> nn.Parameter:
    if hasattr(parameter, "_local_tensor") or isinstance(parameter, ShardedFloat8Weight):
        raise Fp8Error(f"{name} is already sharded or gathered in FP8. Call enable_float8_all_gather once, first.")
    refuse_replaced(parameter, name)
    data = ShardedFloat8Weight(parameter.detach(), WeightInfo(cast))
    return replaced_by(parameter, data, "enable_float8_all_gather")

"""`weights_unchanged`: a context in which each weight is cast once."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8_common.torch_layers.sharding.fsdp import shards
from fp8_torch_fsdp.scales import optimizer_hook
from fp8_torch_fsdp.scales.weight import Fp8Weight


@contextlib.contextmanager
def weights_unchanged(model: nn.Module) -> Iterator[None]:
    """Cast each weight of `model` only once while this context is open.

    Use it for gradient accumulation, recomputation and evaluation. All ranks open and close it at the same places. The
    results are bit-identical to those without it.

    Under FSDP2, the first forward computes scales and casts; later forwards send the same codes, without an all-reduce
    for weights. Weights that are not gathered in FP8 hold their codes in both layouts meanwhile, 2 bytes per element.
    Compiled code casts such weights in each forward.

    An optimizer step on these weights raises an error before it changes a weight. Other writes that torch counts are
    detected, too: for sharded weights the next forward raises, other weights are cast again. Writes through `.data` of
    plain weights, and writes by kernels outside of torch, are not detected.

    Args:
        model: Converted model, or a part of it, sharded or not.

    Raises:
        Fp8Error: If an optimizer of these weights steps in the context.
        Fp8StaleError: If a sharded weight was modified in the context; raised by the next forward.

    Examples:
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with weights_unchanged(model):
        ...     for micro_batch in torch.randn(4, 8, 64):
        ...         model(micro_batch).square().mean().backward()
        >>> optimizer.step()
    """
    opened = [weight for weight in _weights(model) if not weight.declared_unchanged]
    for weight in opened:
        weight.declared_unchanged, weight.newest = True, None  # earlier codes may have been cast from other values
    if opened:
        optimizer_hook.check_steps_while_unchanged(model, enabled=True)
    try:
        yield
    finally:
        for weight in opened:
            weight.declared_unchanged, weight.held_codes = False, None
        if opened:
            optimizer_hook.check_steps_while_unchanged(model, enabled=False)


def _weights(model: nn.Module) -> list[Fp8Weight]:
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "fp8_layout")]
    weights = [matmul.weight for layer in layers for matmul in layer.fp8.values()]
    weights += [shard.local.fp8_weight for shard in shards(model) if hasattr(shard.local, "fp8_weight")]
    return list(dict.fromkeys(weights))

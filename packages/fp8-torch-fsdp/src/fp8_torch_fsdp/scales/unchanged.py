"""`weights_unchanged`: a user-declared window with one cast per weight."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8_common.torch_layers.sharding.fsdp import shards
from fp8_torch_fsdp.scales import optimizer_hook
from fp8_torch_fsdp.scales.weight import Fp8Weight


@contextlib.contextmanager
def weights_unchanged(model: nn.Module) -> Iterator[None]:
    """Cast each weight of `model` once while this context is open.

    For gradient accumulation, recomputation and evaluation.

        with weights_unchanged(model):
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    All ranks open and close it at the same places. Numbers stay the same bits. Under FSDP2 the first forward computes
    scales and casts; later ones send the same codes, without an all-reduce for weights. Weights that no rank gathers in
    FP8 hold their codes both ways meanwhile, 2 bytes for each element. In compiled code they are cast as before.

    An optimizer that steps inside raises before it changes anything. Other writes that torch counts are noticed too:
    of sharded weights they raise, others are cast again. Writes through `.data` and by foreign kernels are not seen.

    Args:
        model: The converted model, or a part of it, sharded or not.

    Raises:
        Fp8Error: An optimizer of these weights steps inside.
        Fp8StaleError: A sharded weight was changed inside, in the next forward.
    """
    opened = [weight for weight in _weights(model) if not weight.declared_unchanged]
    for weight in opened:
        weight.declared_unchanged, weight.newest = True, None  # earlier codes may be of other values
    if opened:
        optimizer_hook.check_steps_while_unchanged(model, opens=True)
    try:
        yield
    finally:
        for weight in opened:
            weight.declared_unchanged, weight.held = False, None
        if opened:
            optimizer_hook.check_steps_while_unchanged(model, opens=False)


def _weights(model: nn.Module) -> list[Fp8Weight]:
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "fp8_layout")]
    weights = [matmul.weight for layer in layers for matmul in layer.fp8.values()]
    weights += [shard.local.fp8_weight for shard in shards(model) if hasattr(shard.local, "fp8_weight")]
    return list(dict.fromkeys(weights))

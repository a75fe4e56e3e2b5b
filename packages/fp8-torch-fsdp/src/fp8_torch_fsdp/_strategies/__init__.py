"""How each kind of weight scaling casts a weight and makes the buffers of its all-gather: one class per kind."""

from fp8_common import CastRecipe, Fp8Error
from fp8_torch_fsdp._delayed import DelayedScale
from fp8_torch_fsdp._strategies.base import Strategy, WireBuffers
from fp8_torch_fsdp._strategies.blockwise import BlockwiseStrategy
from fp8_torch_fsdp._strategies.rowwise import RowwiseStrategy
from fp8_torch_fsdp._strategies.stacked import StackedDelayedStrategy, StackedStrategy
from fp8_torch_fsdp._strategies.tensorwise import DelayedStrategy, StaticStrategy, TensorwiseStrategy

__all__ = [
    "BlockwiseStrategy",
    "DelayedStrategy",
    "RowwiseStrategy",
    "StackedDelayedStrategy",
    "StackedStrategy",
    "StaticStrategy",
    "Strategy",
    "TensorwiseStrategy",
    "WireBuffers",
    "delayed_of",
    "strategy_for",
    "strategy_for_layer",
]


def strategy_for(cast: CastRecipe, *, delayed: DelayedScale | None = None, decode: bool = False) -> Strategy:
    """Return the strategy for a weight cast.

    Args:
        cast: How the weight is cast.
        delayed: The state of delayed scaling, where `cast.scaling` is "delayed".
        decode: Gathered weights become plain high-precision tensors again: communication only.

    Raises:
        Fp8Error: No weight is cast that way.
    """
    if cast.granularity == "tensorwise" and cast.scaling == "dynamic":
        return TensorwiseStrategy(cast=cast, decode=decode)
    if cast.granularity == "tensorwise" and cast.scaling == "static":
        return StaticStrategy(cast=cast, decode=decode)
    if cast.granularity == "tensorwise" and cast.scaling == "delayed" and delayed is not None:
        return DelayedStrategy(cast=cast, decode=decode, delayed=delayed)
    if cast.granularity == "rowwise" and cast.scaling == "dynamic":
        return RowwiseStrategy(cast=cast, decode=decode)
    if cast.granularity == "blockwise_128x128" and cast.scaling == "dynamic":
        return BlockwiseStrategy(cast=cast, decode=decode)
    raise Fp8Error(
        f"Weights cannot be cast with {cast.scaling} {cast.granularity} scaling. Use tensorwise (dynamic, delayed or "
        "static), rowwise (dynamic) or blockwise_128x128 (dynamic)."
    )


def strategy_for_layer(
    cast: CastRecipe, *, stacked: bool, transposed: bool, delayed: DelayedScale | None = None
) -> Strategy:
    """Return the strategy for a weight that is a stack of matrices, is stored transposed, or both.

    Args:
        cast: How the weight is cast.
        stacked: It is [experts, ...], and each expert is cast alone.
        transposed: It is [..., in_features, out_features].
        delayed: The state of delayed scaling, of each expert of a stack.

    Raises:
        Fp8Error: No such weight is cast that way.
    """
    plain = strategy_for(cast, delayed=delayed)
    if isinstance(plain, DelayedStrategy):
        kind = StackedDelayedStrategy if stacked else DelayedStrategy
        return kind(cast=cast, stacked=stacked, transposed=transposed, delayed=plain.delayed)
    # one scale of one matrix, whole rows in memory, and constants are what they are elsewhere
    own = (stacked and cast.granularity == "tensorwise") or (transposed and cast.granularity == "rowwise")
    kind = StackedStrategy if own and cast.scaling == "dynamic" else type(plain)
    return kind(cast=cast, stacked=stacked and cast.scaling == "dynamic", transposed=transposed)


def delayed_of(strategy: Strategy) -> DelayedScale | None:
    """Return the state of delayed scaling that a weight's scale comes from; None for other scaling."""
    return strategy.delayed if isinstance(strategy, DelayedStrategy) else None

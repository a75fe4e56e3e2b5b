"""`seed_masters` initializes masters from unrounded values; `rescale_` recomputes scales."""

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fp8_common import Fp8Error
from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding.agreement import group_of_parts, max_over_ranks
from fp8_te_init.errors import MissingInitError, StaleInitError
from fp8_te_init.masters.dither import dithered
from fp8_te_init.masters.optimizer import MASTER, MasterOptimizer
from fp8_te_init.transformer_engine import TeWeight, fp8_of
from fp8_te_init.transformer_engine_modules import ORDER, lost_weights
from fp8_te_init.weight.all_gather import agree_on_written, quantize_together
from fp8_te_init.weight.state import WeightState

Fallback = Literal["dequantize", "dither"]

_ERRORS = (Fp8Error, MissingInitError, StaleInitError)
"""Error classes by the number, from 1 on, that ranks exchange; the highest number of all ranks is raised."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SeedReport:
    """Result of `seed_masters` on this rank.

    Attributes:
        sources: Source of each master by the name of its parameter: "init" (the unrounded values, in the dtype that
            the weight had when they were written), "dequantize" or "dither".
        released_bytes: Bytes of unrounded values that were dropped.
    """

    sources: Mapping[str, str]
    released_bytes: int


@torch.no_grad()
def seed_masters(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    *,
    fallback: Fallback | None = None,
    seed: int = 0,
) -> SeedReport:
    """Initialize float32 masters from the unrounded values, then drop these values.

    Collective: call it on all ranks. It drops the values of every weight of `model`, including weights that no
    optimizer trains. An error on one rank raises an error of the same class on all ranks, and no master is set and no
    value dropped.

    Args:
        optimizer: `MasterOptimizer`, TransformerEngine's `FusedAdam` with master weights, or an optimizer whose float32
            masters are available as `main_param` of parameters (Megatron) or as "master_param" in its state. Pass all
            optimizers if several share the model.
        model: The model, wrapped or not.
        fallback: Source for weights whose unrounded values are unknown or stale. None raises an error, "dequantize"
            uses the rounded values, "dither" draws values that round to the same codes (for random initializations
            only).
        seed: Seed of "dither".

    Returns:
        The source of each master and the number of released bytes, on this rank.

    Raises:
        Fp8Error: If the arguments are swapped, or `fallback` is unknown.
        MissingInitError: If the unrounded values of a weight are unknown, its optimizer has no master for it, or the
            optimizers hold none of the FP8 weights.
        StaleInitError: If the unrounded values of a weight do not belong to its codes.

    Examples:
        >>> import torch
        >>> from fp8_te_init import MasterOptimizer, fp8_model_init, seed_masters
        >>> with fp8_model_init(preserve_high_precision_init_val=True):
        ...     model = torch.nn.Linear(64, 64)
        >>> optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        >>> seed_masters(optimizer, model)
        SeedReport(sources={'weight': 'init'}, released_bytes=16384)
    """
    optimizers = _checked(optimizer, model, fallback)
    # before the wrapper is removed, which holds the process group
    groups = _groups_of(model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    weights = list(fp8_weights(model))
    # Written values of shards are quantized first. Unless they are preserved, they are dropped then, as in a model that
    # is not sharded.
    agree_on_written(parameter for _, parameter, _ in weights)
    masters: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = []
    sources: dict[str, str] = {}
    with _raising_together(groups, weights[0][2].device if weights else torch.device("cpu")):
        for name, parameter, weight in weights:
            setters = [_setter(each, name, parameter, strict=fallback is None) for each in optimizers]
            setters = [set_ for set_ in setters if set_ is not None]
            if setters:
                values, sources[name] = _values(name, weight, fallback, seed)
                masters += [(set_, values) for set_ in setters if set_ is not None]
        for sentence in lost_weights(model):
            raise MissingInitError(sentence)
        trained = [name for name, parameter, _ in weights if parameter.requires_grad]
        if trained and not masters and fallback is None:
            raise MissingInitError(
                f"The optimizer holds none of the {len(trained)} trained FP8 weights of this model. "
                "It was made for another model or a copy of it, or before fully_shard: make it for this one."
            )
    for set_, values in masters:
        set_(values)
    released = sum(weight.release() for _, _, weight in weights)
    masters.clear()  # drop references to the released values
    values = set_ = None
    _return_freed_memory()
    return SeedReport(sources=sources, released_bytes=released)


@torch.no_grad()
def rescale_(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Quantize every FP8 weight again, with scales of its current amax.

    Collective: call it on all ranks, which agree on one amax. Use it after the initialization with TransformerEngine's
    delayed scaling, whose weights otherwise start with a scale of 1. It quantizes the most exact values that are known:
    unrounded ones, else masters, else dequantized ones.

    Args:
        model: Any module.
        group: Ranks whose weights share scales although each rank built a separate layer (Megatron). By default, the
            ranks that hold other rows of the same parameter.

    Returns:
        The number of all-reduces: one for each process group of more than one rank.

    Raises:
        StaleInitError: If the unrounded values of a weight do not belong to its codes.

    Examples:
        >>> import torch
        >>> from fp8_te_init import convert_linear, rescale_
        >>> model = convert_linear(torch.nn.Linear(64, 64), recipe="tensorwise_delayed")
        >>> rescale_(model)  # the number of all-reduces: none on one rank
        0
    """
    weights = list(fp8_weights(model))
    for _, _, weight in weights:
        weight.init_values()  # raises if they are stale
    return quantize_together(
        [(weight, weight.best_values(), group or group_of_parts(parameter)) for _, parameter, weight in weights]
    )


def fp8_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, WeightState | TeWeight]]:
    """Yield name, parameter and local FP8 rows of each FP8 weight."""
    # optimizers hold the shards, not the gathered weights
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, parameter in model.named_parameters():
        weight = fp8_of(parameter)
        if weight is not None:
            yield name, parameter, weight


def _checked(optimizer: Any, model: Any, fallback: Any) -> list[Optimizer]:
    """Validate the arguments of `seed_masters`, and return the optimizers."""
    optimizers: list[Any] = [optimizer] if isinstance(optimizer, Optimizer | nn.Module) else list(optimizer)
    if not isinstance(model, nn.Module) or not all(isinstance(each, Optimizer) for each in optimizers):
        raise Fp8Error(
            "seed_masters takes an optimizer (or several), then the model: seed_masters(optimizer, model). It got "
            f"{type(optimizer).__name__} and {type(model).__name__}."
        )
    if fallback not in (None, "dequantize", "dither"):
        raise Fp8Error(f'fallback must be None, "dequantize" or "dither", got {fallback!r}.')
    return optimizers


def _values(
    name: str, weight: WeightState | TeWeight, fallback: Fallback | None, seed: int
) -> tuple[torch.Tensor, str]:
    """Return the values [n, columns] for a master, and their source.

    Raises:
        MissingInitError: If the unrounded values are unknown, and there is no fallback.
        StaleInitError: If they are stale, and there is no fallback.
    """
    try:
        values = weight.init_values()
    except StaleInitError as error:
        if fallback is None:
            raise StaleInitError(f"{name}: {error}") from error
        values = None
    if values is not None:
        return values, "init"
    if fallback is None:
        if isinstance(weight, TeWeight) and weight.local_codes.shape[0] != weight.full_shape[0]:
            raise MissingInitError(f"TransformerEngine's copy of {name} did not survive fully_shard. {ORDER}")
        raise MissingInitError(
            f"The values before rounding of {name} are not known. Build the model in "
            "fp8_model_init(preserve_high_precision_init_val=True) and seed before the first step, all optimizers in "
            'one call; load high-precision values and seed again; or take rounded ones with fallback="dequantize".'
        )
    return (dithered(weight, seed=seed, name=name) if fallback == "dither" else weight.values()), fallback


def _setter(optimizer: Any, name: str, parameter: Any, *, strict: bool) -> Callable[[torch.Tensor], None] | None:
    """Return a function that sets a parameter's master, None without a master.

    Args:
        optimizer: Any optimizer.
        name: Name of the parameter, for errors.
        parameter: The parameter.
        strict: Whether to raise if the optimizer trains the parameter without a master.

    Raises:
        MissingInitError: If it does, and `strict` is set.
    """
    if isinstance(optimizer, MasterOptimizer) and optimizer.owns(parameter):
        return lambda values: optimizer.set_master(parameter, values)
    # `is`, because == and `in` compare the elements of tensors
    owned = any(each is parameter for group in optimizer.param_groups for each in group["params"])
    if owned and hasattr(optimizer, "set_scaled_state") and getattr(optimizer, "master_weights", True):
        return _setter_of_fused(optimizer, parameter)
    # `in` first, because `state` is a defaultdict, to which a look-up adds an entry
    master = optimizer.state[parameter].get(MASTER) if parameter in optimizer.state else None
    master = getattr(parameter, "main_param", None) if master is None else master
    if isinstance(master, torch.Tensor):
        local = local_of(master)
        return lambda values: local.copy_(values.reshape(local.shape))  # pyrefly: ignore[bad-return]
    if owned and parameter.requires_grad and strict:
        if isinstance(optimizer, MasterOptimizer):
            raise MissingInitError(
                f"The groups of this MasterOptimizer hold {name}, for which it has no master: it was exchanged or was "
                "frozen when the optimizer was made. Make the optimizer after fully_shard and unfreezing."
            )
        raise MissingInitError(
            f"{type(optimizer).__name__} trains {name} without a float32 master: use "
            f"MasterOptimizer({type(optimizer).__name__}, model.parameters(), ...)."
        )
    return None


def _setter_of_fused(optimizer: Any, parameter: Any) -> Callable[[torch.Tensor], None]:
    """Return a function that sets a master in TransformerEngine's FusedAdam.

    Raises:
        MissingInitError: If the optimizer stores only remainders of its masters.
    """
    if getattr(optimizer, "store_param_remainders", False) and parameter.dtype == torch.bfloat16:
        raise MissingInitError(
            "FusedAdam(store_param_remainders=True) keeps 16 bits of each master and takes the others from the "
            "bfloat16 parameter, which FP8 codes are not. Use store_param_remainders=False."
        )

    def set_(values: torch.Tensor) -> None:
        if MASTER not in optimizer.state.get(parameter, {}):
            optimizer.initialize_state(parameter, False)  # False: without remainders
        held = local_of(optimizer.state[parameter][MASTER])
        # a copy, because the method scales its argument in place if masters are scaled
        optimizer.set_scaled_state(parameter, MASTER, values.to(held.device, torch.float32, copy=True))

    return set_


def _groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the process groups that connect all ranks of a model."""
    groups: list[Any] = [m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel)]
    meshes = [p.device_mesh for m in model.modules() for p in m._parameters.values() if isinstance(p, DTensor)]
    groups += [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
    # in the order of the modules, which is the same on all ranks
    return list({group.group_name: group for group in groups}.values())


@contextlib.contextmanager
def _raising_together(groups: Sequence[dist.ProcessGroup], device: torch.device) -> Iterator[None]:
    """Raise on all ranks if one rank raises an `Fp8Error` inside.

    The other ranks raise the class with the highest number in `_ERRORS`.
    """
    problem: Fp8Error | None = None
    try:
        yield
    except Fp8Error as error:
        problem = error
    kind = max((number for number, cls in enumerate(_ERRORS, 1) if isinstance(problem, cls)), default=0)
    flags = torch.tensor([kind], dtype=torch.int32, device=device)
    for group in groups:  # one after another, so that the maximum reaches all ranks
        (flags,), _ = max_over_ranks([flags], group)
    if not flags.item():
        return
    cls = _ERRORS[int(flags.item()) - 1]
    if problem is None:
        raise cls("Another rank could not seed its masters; its message says why. Nothing was changed.")
    raise problem if isinstance(problem, cls) else cls(str(problem)) from problem


def _return_freed_memory() -> None:
    """Return freed heap memory to the system with glibc's `malloc_trim`, if available."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

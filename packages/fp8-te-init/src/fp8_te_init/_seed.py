"""`seed_masters`: float32 masters from the best source of values before rounding, which is then dropped.

What fails is found out on all ranks before anyone goes on, and nothing is dropped then.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fp8_common import Fp8Error
from fp8_te_init._backends import requantizable
from fp8_te_init._compat import local_of
from fp8_te_init._errors import MissingInitError, StaleInitError
from fp8_te_init._find_master import Master, find_master
from fp8_te_init._host_memory import return_freed_memory
from fp8_te_init._kept_in_module import kept_for, kept_values, named_kept, release_under
from fp8_te_init._parameters import NamedWeight, fp8_weights, named_parameters
from fp8_te_init._raise_together import groups_of, raise_together
from fp8_te_init._rows import Rows
from fp8_te_init._scale_agreement import Agreement, agree_on
from fp8_te_init._shards import group_of, place_of
from fp8_te_init._sources.checkpoint import Checkpoint, CheckpointReader, CheckpointSource, reader_of
from fp8_te_init._sources.dither import dithered

MasterSource = Literal["copy", "checkpoint", "dither", "dequant"]
EXACT: tuple[MasterSource, ...] = ("copy", "checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SeedReport:
    """What `seed_masters` did on this rank.

    Attributes:
        sources: Where each seeded parameter's master came from.
        released_bytes: Bytes of kept values that were dropped.
    """

    sources: Mapping[str, MasterSource]
    released_bytes: int


@torch.no_grad()
def seed_masters(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    strict: bool = True,
    source_order: Sequence[MasterSource] | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    prefix: str = "",
    seed: int = 0,
) -> SeedReport:
    """Set the float32 masters of the FP8 weights to their values before rounding, then drop what was kept.

    All ranks call it. Everything that is kept under `model` with release="seed" is dropped on every rank: also what
    the optimizer does not own, and frozen and tied weights.

    With a checkpoint, masters are its values, and the FP8 codes are made from them again: the start of a fine-tuning,
    whatever the model was initialized with. Other low-precision parameters that have masters get both too. Parameters
    without masters are not touched: load them with `load_state_dict`.

    Args:
        optimizer: A `MasterOptimizer`; TransformerEngine's FusedAdam with masters; or an optimizer of float32 masters
            that the parameters name as `main_param` (Megatron) or its state as "master_param". All of them, if the
            weights of `model` are shared out among several.
        model: The model.
        strict: Only exact sources: "copy" (what is kept) and "checkpoint". False goes on through `source_order`.
        source_order: What to take, in this order; by default "copy" and then "dequant", with a checkpoint "checkpoint"
            alone, and without `strict` then "copy" and "dequant" for what it does not hold. "dequant" takes the
            rounded values; "dither" spreads them over their rounding cells, for random initialisations alone, and has
            to be asked for.
        checkpoint: Values by parameter name: tensors, a file of torch.save, or a folder of
            `torch.distributed.checkpoint`. High-precision ones, or the FP8 codes and scales of a model of this package.
        prefix: What stands before the names in the checkpoint.
        seed: Seed of "dither".

    Returns:
        What was done.

    Raises:
        MissingInitError: A weight has no source left, or the optimizer no masters; on all ranks, nothing dropped.
        StaleInitError: What is kept does not quantize to the codes; on all ranks, nothing dropped.
        Fp8Error: The checkpoint cannot be read or is of another model, on any rank; on all ranks, nothing dropped.
    """
    order = _checked_order(source_order, strict=strict, has_checkpoint=checkpoint is not None)
    # Before the wrapper is taken off: the group of DDP is known to the wrapper alone.
    groups = groups_of(model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    weights = fp8_weights(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    run = _Seeding(optimizers, model, order, strict=strict, seed=seed)
    with run.noting("the checkpoint"):
        run.open(checkpoint, prefix)
    if strict:
        with run.noting("the model"):
            _refuse_dequantized(model)
    device = weights[0].weight.device if weights else torch.device("cpu")
    # Before anything is read: tensors of a checkpoint that are distributed otherwise are gathered, by all ranks.
    raise_together(["the checkpoint", "the model"], run.problems, groups, device)
    for named in weights:
        with run.noting(named.name):
            run.seed(named)
    for name, _, _, parameter in named_parameters(model):
        if requantizable(parameter) is None:
            with run.noting(name):
                run.seed_plain(name, parameter)
    # All names, failed or not: the flags of all ranks have to have one length.
    raise_together([name for name, *_ in named_parameters(model)], run.problems, groups, device)
    run.finish()
    released = release_under(model, "seed_masters")
    run.keep_again(weights)
    return_freed_memory()
    return SeedReport(sources=run.sources, released_bytes=released)


class _Seeding:
    """One call of `seed_masters`: what it reads from, what it found, and the codes that are to follow their masters."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model: nn.Module,
        order: Sequence[MasterSource],
        *,
        strict: bool,
        seed: int,
    ) -> None:
        self.problems: dict[str, Exception] = {}
        self.sources: dict[str, MasterSource] = {}
        self.agreements: list[Agreement] = []
        self._later: list[Callable[[], object]] = []
        self.optimizers, self._order, self._strict, self._seed = optimizers, order, strict, seed
        self._reader: CheckpointReader | None = None
        self._aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), []).append(name)

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Note an error under a name instead of raising it."""
        try:
            yield
        except Fp8Error as error:
            self.problems[name] = error

    def open(self, checkpoint: Checkpoint | None, prefix: str) -> None:
        """Read from a checkpoint, if there is one; refuse one that knows none of the parameters."""
        if checkpoint is None:
            return
        self._reader = reader_of(checkpoint, prefix)
        if not any(self._reader.holds(alias) for aliases in self._aliases.values() for alias in aliases):
            raise Fp8Error("No parameter of the model is in the checkpoint: are its names others? See prefix=.")

    def seed(self, named: NamedWeight) -> None:
        """Set the masters of an FP8 weight; with values of a checkpoint also its codes, later."""
        masters = self._masters(named)
        source = self._in_checkpoint(named.name, named.parameter, named.weight.rows)
        # A frozen weight has no master, but may take its codes from a checkpoint.
        if not masters and (source is None or "checkpoint" not in self._order):
            return
        values, chosen = self._values(named, source)
        if masters:
            self.sources[named.name] = chosen
        if chosen != "checkpoint":
            _set(masters, values)
            return
        # only when all of the checkpoint was found to be right
        values = values.to(named.weight.device)
        self._later.append(functools.partial(_set, masters, values))
        self.agreements.append(Agreement(weight=named.weight, values=values, group=group_of(named.parameter)))

    def seed_plain(self, name: str, parameter: nn.Parameter) -> None:
        """Set the master of a parameter that is not FP8, and the parameter, if the checkpoint has it."""
        masters = [found for one in self.optimizers if (found := find_master(one, parameter)) is not None]
        if not masters or "checkpoint" not in self._order:
            return
        source = self._in_checkpoint(name, parameter, place_of(parameter))
        if source is None:
            return
        values = source.values()
        self._later.append(functools.partial(_set, masters, values))
        self._later.append(functools.partial(local_of(parameter).copy_, values))
        self.sources[name] = "checkpoint"

    def finish(self) -> None:
        """Set what comes from the checkpoint."""
        for write in self._later:
            write()
        # only after everything that can fail on one rank alone: the others would wait in this reduction
        agree_on(self.agreements, step=False)

    def keep_again(self, weights: Sequence[NamedWeight]) -> None:
        """Keep the checkpoint's values where values are kept on: those of before belong to other codes."""
        # By id: `agreements` holds the very objects that are in `weights`, which keeps them alive.
        changed = {id(agreement.weight): agreement.values for agreement in self.agreements}
        for named in weights:
            kept = kept_for(named.module, named.attribute)
            if id(named.weight) in changed and kept is not None and kept.keeps_writes:
                kept.keep(changed[id(named.weight)].to(named.weight.dtype), named.weight)

    def _masters(self, named: NamedWeight) -> list[Master]:
        found = (_master_for(one, named, self._strict) for one in self.optimizers)
        return [master for master in found if master is not None]

    def _in_checkpoint(self, name: str, parameter: nn.Parameter, rows: Rows) -> CheckpointSource | None:
        """Return what reads a parameter under any of its names; tied ones have several."""
        if self._reader is None:
            return None
        found = (alias for alias in [name, *self._aliases.get(id(parameter), [])] if self._reader.holds(alias))
        alias = next(found, None)
        return None if alias is None else CheckpointSource(self._reader, alias, rows, parameter)

    def _values(self, named: NamedWeight, checkpoint: CheckpointSource | None) -> tuple[torch.Tensor, MasterSource]:
        """Return the values [n, columns] of the first source that has any, and which source that was."""
        for source in self._order:
            values = None
            if source == "copy":
                values = _kept(named)
            elif source == "checkpoint" and checkpoint is not None:
                values = checkpoint.values()
            elif source == "dither":
                values = dithered(named.weight, seed=self._seed, name=named.name)
            elif source == "dequant":
                values = named.weight.values()
            if values is not None:
                return values, source
        raise MissingInitError(
            f"{named.name} has no source of high-precision values left ({', '.join(self._order)} were tried). Build "
            'the model with primary_weights(preserve="cpu") and seed before the first step (all optimizers in one '
            "call), give a checkpoint=... that holds it (prefix=), name source_order=, or use strict=False to start "
            "from rounded values."
        )


def _checked_order(
    order: Sequence[MasterSource] | None, *, strict: bool, has_checkpoint: bool
) -> Sequence[MasterSource]:
    """Return the sources to try. Without a choice, a checkpoint that was given comes before what is kept."""
    if order is None and has_checkpoint:
        return ("checkpoint",) if strict else ("checkpoint", "copy", "dequant")
    for source in order or ():
        if source not in ("copy", "checkpoint", "dither", "dequant"):
            raise Fp8Error(f'source_order takes "copy", "checkpoint", "dither" and "dequant", got {source!r}.')
    return [source for source in order or ("copy", "dequant") if not strict or source in EXACT]


def _refuse_dequantized(model: nn.Module) -> None:
    """Refuse a model in which a weight stopped being FP8 while its start was kept: its master would be wrong unseen."""
    for name, module, attribute, kept in named_kept(model):
        if kept.lost is not None and requantizable(module._parameters.get(attribute)) is None:
            raise StaleInitError(f"{name}: {kept.lost}")


def _set(masters: Sequence[Master], values: torch.Tensor) -> None:
    for master in masters:
        master.set(values)


def _master_for(optimizer: Optimizer, named: NamedWeight, strict: bool) -> Master | None:
    """Return the master of a weight; None if this optimizer has nothing to do with the weight."""
    master = find_master(optimizer, named.parameter)
    owned = any(parameter is named.parameter for group in optimizer.param_groups for parameter in group["params"])
    if master is None and owned and named.parameter.requires_grad and strict:
        raise MissingInitError(
            f"{type(optimizer).__name__} trains {named.name} without a float32 master. Use "
            f"MasterOptimizer({type(optimizer).__name__}, model.parameters(), ...), or strict=False to train the "
            "rounded weight itself."
        )
    return master


def _kept(named: NamedWeight) -> torch.Tensor | None:
    pending = named.weight.pending()
    if pending is not None:
        return pending  # written and not yet quantized for good: nothing to check it against
    return kept_values(named.module, named.attribute)

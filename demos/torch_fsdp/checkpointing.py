"""Checkpoints of a run: written beside, then renamed, so that each is whole or absent.

`DIR/run.json` says which run the folder belongs to. `DIR/fp8-seed0/step-000050` holds model, optimizer (both through
`torch.distributed.checkpoint`) and the run's record up to that step; `DIR/fp8-seed0/record.json` a finished run's.
"""

import hashlib
import json
import math
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fp8_common import Fp8Error

RUN, RECORD, STEP = "run.json", "record.json", "step-"


@dataclass(kw_only=True, slots=True)
class Record:
    """What a run has measured so far.

    Attributes:
        losses: training loss of each step, mean over ranks.
        seconds: duration of each step.
        counts: of the steps in which collectives were counted, as `Counts.to_dict`.
        val_loss: held-out loss after the last step; NaN before.
        digest: SHA-256 of model and optimizer state after the last step, all ranks; empty before.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: list[dict[str, Any]] = field(default_factory=list)
    val_loss: float = math.nan
    digest: str = ""

    def save(self, path: Path) -> None:
        """Write the record; Python's JSON keeps every bit of a float."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))


def claim(folder: Path, identity: dict[str, Any], *, resume: bool) -> None:
    """Make `folder` the place of this run's checkpoints, or check that it is.

    Raises:
        Fp8Error: it cannot be written to, holds another run's, holds this run's and `resume` is False, or holds
            none and `resume` is True.
    """
    label = folder / RUN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = json.loads(label.read_text()) if label.exists() else None
        if found is None and not resume:
            label.write_text(json.dumps(identity, indent=1) + "\n")
    except OSError as error:
        raise Fp8Error(
            f"Checkpoints cannot be kept in {str(folder)!r} ({error.strerror}); give --checkpoint another folder."
        ) from error
    if found is None and resume:
        raise Fp8Error(f"There is no run to resume in {str(folder)!r}; leave --resume out to start one there.")
    if found is not None and not resume:
        raise Fp8Error(f"{str(folder)!r} already holds a run; add --resume to go on with it, or name another folder.")
    if resume and found != identity:
        changed = sorted(key for key in identity if (found or {}).get(key) != identity[key])
        raise Fp8Error(
            f"The run in {str(folder)!r} was made with other {' and '.join(changed)}: it can only go on bit for bit "
            "with the same; give the same options, or another folder."
        )


class Checkpoints:
    """The checkpoints of one run; every rank makes one and calls it at the same steps.

    Args:
        folder: of the run, shared by all ranks; None keeps none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def finished(self) -> Record | None:
        """Return the record of the run if it is finished."""
        path = self.folder / RECORD if self.folder else None
        return Record.load(path) if path and path.exists() else None

    def finish(self, record: Record) -> None:
        """Keep the record; the checkpoints of a finished run are of no more use."""
        if self.folder and dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = self.folder / f".{RECORD}"
            record.save(beside)
            beside.replace(self.folder / RECORD)
            for old in self._complete():
                shutil.rmtree(old)
        dist.barrier()

    def save(self, model: nn.Module, optimizer: Optimizer, record: Record) -> None:
        """Write a checkpoint of the run as it is now, then remove the one before."""
        if self.folder is None:
            return
        name = f"{STEP}{len(record.losses):06d}"
        beside = self.folder / f".{name}"
        if dist.get_rank() == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        dist.barrier()
        dcp.save(_state(model, optimizer), checkpoint_id=beside)
        if dist.get_rank() == 0:
            record.save(beside / RECORD)
            earlier = self._complete()
            beside.rename(self.folder / name)
            for old in earlier:
                shutil.rmtree(old)
        dist.barrier()

    def load(self, model: nn.Module, optimizer: Optimizer) -> Record:
        """Put model and optimizer into the state of the newest checkpoint; a new record if there is none."""
        complete = self._complete()
        if not complete:
            return Record()
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=complete[-1])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return Record.load(complete[-1] / RECORD)

    def _complete(self) -> list[Path]:
        return sorted(self.folder.glob(f"{STEP}*")) if self.folder else []


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def state_digest(model: nn.Module, optimizer: Optimizer) -> str:
    """Return one SHA-256 for everything that a checkpoint would hold, all ranks' parts in order. All ranks call it."""
    own = hashlib.sha256()
    for path, leaf in pytree.tree_leaves_with_path(_state(model, optimizer)):
        own.update(repr(path).encode())
        local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
        if isinstance(local, torch.Tensor):
            own.update(local.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            own.update(repr(leaf).encode())
    parts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(parts, own.hexdigest())
    return hashlib.sha256("".join(parts).encode()).hexdigest()

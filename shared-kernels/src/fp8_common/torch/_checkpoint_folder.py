"""Checkpoints that are looked at before anything is loaded from them: whole, or refused.

`torch.distributed.checkpoint` reads tensor by tensor, straight into the model: a missing or short file is noticed when
half of the weights are already overwritten, and a changed byte never. These functions look first, and write so that a
cut or a change is visible: checksums of all tensors stand in the index (`_checksums`).
"""

import io
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from fp8_common._errors import Fp8Error
from fp8_common.torch._checkpoint import read_metadata
from fp8_common.torch._checksums import check_pieces, checksums_of, write_index
from fp8_common.torch._replaced_folder import check_replaceable
from fp8_common.torch._together import do_together, is_first_rank, my_turn


class PlainLoadPlanner(DefaultLoadPlanner):
    """Loads tensors and plain Python values, and refuses pickled objects of any other kind."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Look at a value that is no tensor before torch unpickles it, whatever it is."""
        # `DefaultLoadPlanner.load_bytes` unpickles without restriction; this one raises before that for anything but
        # plain values.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def save_checkpoint(state: dict[str, Any], path: str | Path) -> None:
    """Save with `torch.distributed.checkpoint` so that `path` appears only when it is whole. All ranks call it.

    Args:
        state: What `torch.distributed.checkpoint.save` takes.
        path: A folder on a file system that all ranks share; an older checkpoint there is replaced,
            nothing else is.

    Raises:
        Fp8Error: Something else than a checkpoint is at `path`, or what was written could not be read back for its
            checksums, on any rank.
    """
    target, partial = Path(path), Path(f"{path}.partial")
    do_together(lambda: check_replaceable(target, ".metadata", "checkpoint") if is_first_rank() else None)
    if is_first_rank():
        # left there by a save that was interrupted
        shutil.rmtree(partial, ignore_errors=True)
    _barrier()
    # After a barrier, since another rank may write its file before the first one has removed the old folder; and before
    # the next one, since the name may only change when every rank has written.
    dcp.save(state, checkpoint_id=partial)
    _barrier()
    # Read back: torch says nothing of the bytes that it writes. The ranks divide the work.
    parts = do_together(lambda: checksums_of(partial, read_metadata(partial), my_turn()))
    do_together(lambda: write_index(partial, read_metadata(partial), parts) if is_first_rank() else None)
    if is_first_rank():
        # a folder cannot be renamed to one that exists and is not empty
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    _barrier()


def load_checkpoint(state: dict[str, Any], path: str | Path, **options: Any) -> None:
    """Load in place with `torch.distributed.checkpoint`, after checking that the checkpoint is whole.

    Args:
        state: What `torch.distributed.checkpoint.load` fills.
        path: The folder of a checkpoint.
        **options: Further arguments of `torch.distributed.checkpoint.load`. Without a `planner`, values that are no
            tensors must be plain: a pickled object of another kind is refused.

    Raises:
        Fp8Error: The checkpoint is missing, cut off or damaged; nothing was loaded. All ranks raise.
    """
    alone = bool(options.get("no_dist"))
    group = options.get("process_group")
    # The ranks divide the work, and all of them raise.
    do_together(lambda: _verify(Path(path), my_turn(group, alone=alone)), group, alone=alone)
    dcp.load(state, checkpoint_id=path, **({"planner": PlainLoadPlanner()} | options))


def verify_checkpoint(path: str | Path, *, names: Collection[str] | None = None) -> None:
    """Check that every tensor that a checkpoint's metadata names lies in a file, whole and as it was saved.

    Checkpoints that something else than `save_checkpoint` wrote have no checksums: of those the sizes are checked.
    This process reads all files; `load_checkpoint` divides them among the ranks.

    Args:
        path: The folder of a checkpoint.
        names: Compare the checksums of these tensors alone; None compares all.

    Raises:
        Fp8Error: Saying what is missing, or which tensor has changed.
    """
    _verify(Path(path), names=names)


def _verify(folder: Path, share: tuple[int, int] = (0, 1), names: Collection[str] | None = None) -> None:
    metadata = read_metadata(folder)
    # One file holds many tensors, one after the other: it is whole if the one that ends last is.
    needed: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    for name, size in sorted(needed.items()):
        file = folder / name
        present = file.stat().st_size if file.is_file() else 0
        if present < size:
            raise Fp8Error(
                f"{file} is cut off: {present} of {size} bytes are there. Nothing was loaded; use another checkpoint."
            )
    check_pieces(folder, metadata, share, names)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()

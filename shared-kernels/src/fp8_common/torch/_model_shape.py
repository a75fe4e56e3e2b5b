"""`model_shape`: the sizes of a torch model on which its step depends, read off its parameters; data are not needed."""

import importlib
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from fp8_common._errors import Fp8Error
from fp8_common.advise import ModelShape

ACTIVE = ("top_k", "num_experts_per_tok", "experts_per_token", "n_activated_experts")
"""What modules call the number of experts that see a token."""

Weights = tuple[tuple[int, int], ...]


def shape_of_import(path: str, active: int | None = None) -> ModelShape:
    """Return the shape of what `package.module:factory` returns, built on the meta device, without memory.

    Raises:
        Fp8Error: The path names no function of no arguments that returns such a model.
    """
    module, _, factory = path.partition(":")
    if not module or not factory:
        raise Fp8Error(f"--module takes package.module:factory, got {path!r}.")
    folder = str(Path.cwd())
    sys.path[:0] = [folder]  # as `python -m` does
    try:
        with torch.device("meta"):
            model = getattr(importlib.import_module(module), factory)()
    except Exception as error:  # whatever the caller's code raises
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise Fp8Error(f"{path!r} cannot be built on the meta device: {text}.") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise Fp8Error(f"{path!r} must return a torch.nn.Module, got {type(model).__name__}.")
    return model_shape(model, active)


def model_shape(model: nn.Module, active: int | None = None) -> ModelShape:
    """Return the sizes of a model for `fp8_common.advise`.

    Blocks are the elements of the `ModuleList`, `ModuleDict` or `Sequential` with most weights; all count like the most
    frequent kind. Matrices of a block are its linear layers; stacked ones [experts, ...] and equal modules of a list
    `experts` are experts. The largest embedding outside of the blocks counts with its head, other parameters do not.

    Args:
        model: Any module, also on the meta device.
        active: Experts that see a token; None reads it from attributes like `top_k`.

    Raises:
        Fp8Error: There are no matrices, or experts and no word of how many see a token.
    """
    blocks = _blocks(model)
    (linear, expert, experts), _ = Counter(_sizes(block) for block in blocks).most_common(1)[0]
    if not linear and not expert:
        raise Fp8Error(f"{type(model).__name__} has no matrices in its blocks. Write the shapes out with --linear.")
    inside = {id(p) for block in blocks for p in block.parameters()}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m.weight) not in inside]
    table = max(tables, key=lambda one: one.weight.numel(), default=None)
    rest = [p for p in model.parameters() if id(p) not in inside]
    heads = [] if table is None else [p for p in rest if p.shape == table.weight.shape and p is not table.weight]
    return ModelShape(
        blocks=len(blocks),
        width=(linear or expert)[0][1] if table is None else table.embedding_dim,
        linear=linear,
        vocabulary=0 if table is None else table.num_embeddings,
        tied=not heads,
        expert=expert,
        experts=experts,
        active=_active(blocks, experts, active),
    )


def _blocks(model: nn.Module) -> list[nn.Module]:
    kinds = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    lists = [list(m.children()) for m in model.modules() if isinstance(m, kinds) and len(m) > 1]
    # the outermost of equally large ones comes first
    return max(lists, key=lambda one: sum(p.numel() for block in one for p in _matrices(block)), default=[model])


def _matrices(block: nn.Module) -> list[nn.Parameter]:
    tables = {id(m.weight) for m in block.modules() if isinstance(m, nn.Embedding)}
    return [p for p in block.parameters() if p.ndim in (2, 3) and id(p) not in tables]


def _sizes(block: nn.Module) -> tuple[Weights, Weights, int]:
    """Return the linear layers of a block, those of one expert, and the number of experts."""
    lists = [m for name, m in block.named_modules() if name.endswith("experts") and isinstance(m, nn.ModuleList)]
    listed = {id(p) for one in lists for p in one.parameters()}
    matrices = _matrices(block)
    linear = tuple((p.shape[0], p.shape[1]) for p in matrices if p.ndim == 2 and id(p) not in listed)
    stacked = [p for p in matrices if p.ndim == 3]
    if lists:
        return linear, tuple((p.shape[0], p.shape[1]) for p in _matrices(lists[0][0])), len(lists[0])
    return linear, tuple((p.shape[1], p.shape[2]) for p in stacked), stacked[0].shape[0] if stacked else 0


def _active(blocks: list[nn.Module], experts: int, active: int | None) -> int:
    if not experts:
        return 0
    found = [getattr(m, name, None) for block in blocks for m in block.modules() for name in ACTIVE]
    number = active if active is not None else next((n for n in found if type(n) is int), None)
    if number is None:
        raise Fp8Error(f"The model has {experts} experts in a block and says not how many see a token. Give --active.")
    return number

"""`export_for_serving`, FP8 weights in the layouts of serving engines, and `weights_to_stream`: from own rows alone."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.torch import serving
from fp8_common.torch.plugin import ShardGeometry
from fp8_te_init._checkpoint_names import SCALE
from fp8_te_init._compat import CHECKPOINT_PREFIX, local_of
from fp8_te_init._export import master_of
from fp8_te_init._parameters import named_parameters
from fp8_te_init._shards import group_of, place_of
from fp8_te_init._state import PrimaryState
from fp8_te_init._waiting import agree_on_waiting
from fp8_te_init._weight import PrimaryFloat8Weight, primary_of


@torch.no_grad()
def export_for_serving(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | Path,
    *,
    layout: str,
    codes: serving.CodesFrom = "training",
    config: Mapping[str, Any] | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Write a model for serving engines: safetensors and config.json. All ranks call it.

    No rank gathers anything: each writes its rows. The folder appears when it is whole.

    Args:
        model: A model with FP8 weights [rows, columns], unsharded or under FSDP2. Stacked experts become a matrix
            for each, whose number follows the last "experts" in the name.
        optimizer: The one that holds float32 masters; needed for codes="masters" alone.
        path: A folder on a file system that all ranks share; an older export there is replaced.
        layout: "compressed-tensors", "deepseek" (blocks of 128x128 with `weight_scale_inv`) or "mx".
        codes: "training" writes codes and scales as training used them; "masters" rounds float32 masters anew, with the
            granularity of training where the layout has it, else with the first that it has, and with canonical scales
            (MX: "rceil") whatever the recipe's. The metadata says which.
        config: The rest of config.json.
        max_file_bytes: Of one file of tensors, unless one tensor is larger.

    Raises:
        Fp8Error: Unknown layout, scales that it cannot express, a weight without master, or a file that cannot be
            written. All ranks raise, and nothing is left behind.
    """
    weights = [(name, p) for name, _, _, p in named_parameters(model)]
    if codes == "training":
        for _, parameter in weights:
            agree_on_waiting(parameter)
    serving.write_for_serving(
        lambda chosen: _parts(model, optimizer, weights, chosen, codes),
        path,
        layout=layout,
        codes=codes,
        ignored=_ignored(model),
        config=config,
        max_file_bytes=max_file_bytes,
    )


def _parts(
    model: nn.Module, optimizer: Optimizer | None, weights: list, layout: serving.ServingLayout, codes: str
) -> list[serving.ServedPart]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace(CHECKPOINT_PREFIX, ""))
    parts = []
    for found, parameter in weights:
        name, *tied = names.get(id(parameter), [found])
        primary = primary_of(parameter)
        if primary is not None and len(primary.state.full_shape) == 3:
            parts += _experts(name, tuple(tied), parameter, primary, optimizer, layout, codes)
        elif primary is not None:
            parts.append(_weight(name, tuple(tied), parameter, primary, optimizer, layout, codes))
        else:
            parts.append(_plain(name, tuple(tied), parameter))
    saved = model.state_dict(keep_vars=True)
    buffers = [(n.replace(CHECKPOINT_PREFIX, ""), b) for n, b in model.named_buffers()]
    return [*parts, *(_plain(name, (), buffer) for name, buffer in buffers if name in saved)]


def _weight(
    name: str,
    tied: tuple[str, ...],
    parameter: torch.Tensor,
    primary: PrimaryFloat8Weight,
    optimizer: Optimizer | None,
    layout: serving.ServingLayout,
    codes: str,
) -> serving.ServedPart:
    state = primary.state
    if state.part is not None:
        raise Fp8UnsupportedError(
            f"{name} is tensor-parallel, and export_for_serving writes matrices that FSDP2 cuts by rows or that are "
            "whole. Load the checkpoint into a model without tensor parallelism, and export that."
        )
    granularity = _granularity(name, parameter, primary, optimizer, layout, codes)
    if codes == "training":
        read: Any = partial(_as_trained, state)
    else:
        read = partial(_rounded, optimizer, parameter, state, granularity)
    return serving.ServedPart(
        name=name,
        shape=tuple(state.full_shape),
        read=read,
        first_row=min(state.first_row, state.full_shape[0]),
        granularity=granularity,
        writes=serving.is_written_here(parameter),
        tied=tied,
    )


def _granularity(
    name: str,
    parameter: torch.Tensor,
    primary: PrimaryFloat8Weight,
    optimizer: Optimizer | None,
    layout: serving.ServingLayout,
    codes: str,
) -> str:
    """Return the granularity of the scales that are written; refuse what cannot be."""
    cast = primary.state.cast
    if codes == "training":
        serving.check_is_e4m3(cast, name)
        layout.granularity_of(cast.granularity, name)
        return cast.granularity
    if master_of(optimizer, parameter) is None:
        raise Fp8Error(f'{name} has no float32 master to round: give the optimizer that holds it, or codes="training".')
    return cast.granularity if cast.granularity in layout.granularities else layout.granularities[0]


def _experts(
    name: str,
    tied: tuple[str, ...],
    parameter: torch.Tensor,
    primary: PrimaryFloat8Weight,
    optimizer: Optimizer | None,
    layout: serving.ServingLayout,
    codes: str,
) -> list[serving.ServedPart]:
    """Return stacked weights [experts, rows, columns] as a matrix for each expert, as engines read them."""
    state = primary.state
    granularity = _granularity(name, parameter, primary, optimizer, layout, codes)
    here = range(state.first_row, state.first_row + state.rows)

    def read(expert: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        place = expert - state.first_row
        if expert not in here:
            return state.own_codes.new_empty((0, state.full_shape[2])), None
        if codes == "training":
            scale = state.scale[expert]
            return state.own_codes[place], scale.reshape(()) if granularity == "tensorwise" else scale
        master = master_of(optimizer, parameter)
        assert master is not None  # noqa: S101  looked for before
        values = local_of(master)[place]
        # An expert is on one rank as a whole: there is nobody to agree with.
        return serving.round_for_serving(values, granularity, ShardGeometry(full_shape=values.shape), None)

    return [
        serving.ServedPart(
            name=_name_of_expert(name, expert),
            shape=tuple(state.full_shape[1:]),
            read=partial(read, expert),
            granularity=granularity,
            writes=expert in here and serving.is_written_here(parameter),
            tied=tuple(_name_of_expert(other, expert) for other in tied),
        )
        for expert in range(state.full_shape[0])
    ]


def _name_of_expert(name: str, expert: int) -> str:
    """Return `layers.0.experts.3.up_proj.weight` for `layers.0.experts.up_proj.weight`, as Transformers and vLLM do."""
    path = name.split(".")
    # Without a component of this name the number comes before the last one.
    place = len(path) - path[::-1].index("experts") if "experts" in path else len(path) - 1
    return ".".join([*path[:place], str(expert), *path[place:]])


def _as_trained(state: PrimaryState) -> tuple[torch.Tensor, torch.Tensor]:
    return state.own_codes, state.scale


def _rounded(
    optimizer: Optimizer | None, parameter: torch.Tensor, state: PrimaryState, granularity: str
) -> tuple[torch.Tensor, torch.Tensor]:
    master = master_of(optimizer, parameter)
    assert master is not None  # noqa: S101  looked for before
    values = local_of(master)[: state.rows]
    return serving.round_for_serving(values, granularity, state.geometry, group_of(parameter))


def _plain(name: str, tied: tuple[str, ...], tensor: torch.Tensor) -> serving.ServedPart:
    place = place_of(tensor)
    return serving.ServedPart(
        name=name,
        shape=tuple(tensor.shape),
        read=lambda: (local_of(tensor), None),
        first_row=place.start,
        columns=place.columns,
        dtype=tensor.dtype,
        writes=serving.is_written_here(tensor),
        tied=tied,
    )


def _ignored(model: nn.Module) -> list[str]:
    """Return the linear layers that stay in high precision."""
    named = ((name.replace(CHECKPOINT_PREFIX, ""), m) for name, m in model.named_modules())
    return [
        name
        for name, module in named
        if isinstance(module, nn.Linear) and primary_of(module._parameters.get("weight")) is None
    ]


def weights_to_stream(model: nn.Module) -> dict[str, np.ndarray]:
    """Return what a `fp8_common.WeightStream` follows: codes and scales of the FP8 weights as they are here.

    Args:
        model: A model with FP8 weights of this package. Under FSDP2 each rank returns its own rows, for a stream of its
            own. Call it between optimizer steps.

    Returns:
        uint8 codes by the name of the weight, and float32 scales into FP8 by the name that state dicts give them. They
        may share memory with the model: a WeightStream copies what it keeps.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, _, _, parameter in named_parameters(model):
        primary = primary_of(parameter)
        if primary is not None:
            agree_on_waiting(parameter)
            key = name.replace(CHECKPOINT_PREFIX, "")
            arrays[key] = primary.state.own_codes.cpu().numpy()
            arrays[f"{key}{SCALE}"] = primary.state.scale.cpu().numpy()
    return arrays

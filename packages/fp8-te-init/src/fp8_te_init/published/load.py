"""Load and save the local rows of published FP8 checkpoints."""

import dataclasses
import logging
import math
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding.fsdp import region_of
from fp8_te_init.published.adapters import is_adapter, start_adapter
from fp8_te_init.published.files import BLOCK, DTYPES, Checkpoint
from fp8_te_init.published.layers import STACKS, Multiply, hold_linear, hold_stack
from fp8_te_init.published.names import Part, Rename, name_in_file, parts
from fp8_te_init.published.weight import CODES, PublishedWeight, Stored, published_of, reshard

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Result of `load_published` on this rank.

    Attributes:
        bytes_read: Bytes of tensors that were read, without headers.
        unused: Names of tensors in the file without a parameter or buffer in the model, for example activation scales
            and draft heads. `save_published` copies them.
    """

    bytes_read: int
    unused: list[str]


@torch.no_grad()
def convert_published(
    model: nn.Module, path: str | Path, *, multiply: Multiply = "decoded", rename: Rename = None
) -> list[str]:
    """Replace weights that a checkpoint quantizes with empty published weights.

    Call it before `fully_shard`; `load_published` fills the weights. It reads only the headers of the files, which
    determine the result for each layer: E4M3 codes become weights of `nn.Linear` layers and of the stacks
    `gate_up_proj` and `down_proj` of Transformers' experts. All other parameters are unchanged. Converted weights are
    frozen. Build the model on the meta device, because its values are not used.

    Args:
        model: Any module, also under PEFT.
        path: Folder with `config.json` and safetensors files.
        multiply: "decoded" decodes values for each matmul, with the bits of a dequantized model. "fp8" multiplies codes
            with dynamically quantized activations and gradients, as engines do: faster on GPUs, and adapter gradients
            differ by up to 12 % from the decoded model's.
        rename: Function from the name of a parameter in the model to its name in the file; None for equal names.

    Returns:
        Names of the converted parameters.

    Raises:
        Fp8Error: If the folder is not a checkpoint, the model is sharded, shapes do not fit, or the checkpoint
            quantizes no parameter of this model.
        Fp8UnsupportedError: If a layer is quantized in a way that is not supported; the message names it.
    """
    if multiply not in typing.get_args(Multiply):
        raise Fp8Error(f"multiply must be one of {typing.get_args(Multiply)}, got {multiply!r}.")
    files, converted = Checkpoint(path), []
    static = files.quantization.get("activation_scheme") == "static"
    if static and multiply == "fp8":
        raise Fp8UnsupportedError(f'{path} has static activation scales: use multiply="decoded".')
    for name, parameter in list(model.named_parameters()):
        if published_of(parameter) is not None:
            continue
        weight = _converted(files, name_in_file(name, rename), parameter)
        if weight is None:
            continue
        above, _, last = name.rpartition(".")
        module = model.get_submodule(above)
        if isinstance(parameter, DTensor):
            raise Fp8Error(f"{name} is distributed already: call convert_published before fully_shard.")
        if type(module) is nn.Linear and last == "weight":
            _check_not_shared(model, name, parameter)
            hold_linear(module, weight, multiply)
        elif last in STACKS and parameter.ndim == 3:
            _check_experts(module, name)
            hold_stack(module, last, weight, name, multiply)
        else:
            raise Fp8UnsupportedError(
                f"{name} of a {type(module).__name__} has FP8 codes in the file: weights of nn.Linear and stacks of "
                "experts can be loaded."
            )
        converted.append(name)
    if not converted:
        raise Fp8Error(f"{path} has no FP8 codes for a layer of this model. Do the names differ? Pass rename=.")
    logger.info("FP8: %d parameters take the codes of %s.", len(converted), path)
    return converted


@torch.no_grad()
def load_published(
    model: nn.Module,
    path: str | Path,
    *,
    multiply: Multiply = "decoded",
    rename: Rename = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Loaded:
    """Fill a model from a published FP8 checkpoint, reading only local rows.

    Codes and scales are copied byte for byte. A model without published weights is converted first, see
    `convert_published`. Parameters on the meta device are allocated; besides the model, memory holds the local rows of
    one tensor at a time. No rank waits for another.

    Args:
        model: Model, whole or after `fully_shard`, also under PEFT.
        path: See `convert_published`.
        multiply: See `convert_published`.
        rename: See `convert_published`.
        device: Device for parameters on the meta device. By default the device of a sharded model's mesh, else the
            current accelerator, else the CPU.
        seed: Seed of adapters on the meta device: LoRA's A is drawn uniformly, B is zero, and DoRA's magnitudes follow
            from the decoded weight. Each A is drawn whole from seed and name, so that it is the same for any number of
            ranks.

    Returns:
        The number of bytes that were read, and the names of unused tensors of the file.

    Raises:
        Fp8Error: If a parameter is missing in the checkpoint or has another shape or dtype there, or a buffer that is
            missing in the checkpoint is on the meta device.
        Fp8UnsupportedError: If a layer is quantized in a way that is not supported, or an adapter on the meta device is
            neither LoRA nor DoRA.
    """
    if not any(published_of(parameter) is not None for parameter in model.parameters()):
        convert_published(model, path, multiply=multiply, rename=rename)
    files, used = Checkpoint(path), set[str]()
    sources = {name: _sources(files, name_in_file(name, rename), tensor, name) for name, tensor in _tensors(model)}
    _check_buffers(model, {name for name, names in sources.items() if names})
    allocated = _allocate(model, device)
    for name, tensor in _tensors(model):
        for part in sources[name]:
            used.update(_fill(files, part, tensor))
    for name in allocated:
        if not sources[name]:
            start_adapter(model, name, seed)
    return Loaded(bytes_read=files.bytes_read, unused=sorted(files.entries.keys() - used))


@torch.no_grad()
def save_published(model: nn.Module, path: str | Path, like: str | Path, *, rename: Rename = None) -> None:
    """Save a model in the layout of the checkpoint it came from.

    Collective: call it on all ranks, with a folder on a file system that they share. Nothing is gathered: each rank
    writes its rows. Names, headers and all other files equal those in `like`, and tensors without a parameter are
    copied from there. An unchanged model gives equal files, byte for byte. Adapters are not written: PEFT's
    `save_pretrained` saves them.

    Args:
        model: Model that `load_published` has filled.
        path: Folder to write, which is created.
        like: Folder that was loaded.
        rename: See `convert_published`.

    Raises:
        Fp8Error: If a tensor has another dtype or shape than in `like`, both folders are the same, or the first rank
            cannot create the folder.
    """
    files, folder = Checkpoint(like), Path(path)
    written = [
        (name, part)
        for name, tensor in _tensors(model)
        for part in _sources(files, name_in_file(name, rename), tensor, name)
    ]
    scales = [layout.scale for _, part in written if (layout := files.layout(part.name)) is not None]
    names = [*(part.name for _, part in written), *scales]
    on_first_rank(lambda: files.begin_copy(folder, names))
    for name, first, rows in published_tensors(model, files, rename):
        files.write(folder, name, rows, first)
    if dist.is_initialized():
        dist.barrier()


def published_tensors(
    model: nn.Module, files: Checkpoint, rename: Rename = None
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield (name in the file, first row, rows) of all local rows.

    Codes are followed by all scales of their tensor, on each rank that holds any of its codes.
    """
    for name, tensor in _tensors(model):
        weight = published_of(tensor)
        for part in _sources(files, name_in_file(name, rename), tensor, name):
            layout = files.layout(part.name)
            if weight is None or layout is None:
                if (plain := _part_of_plain(tensor, part)) is not None:
                    rows, offset = plain
                    yield part.name, offset[0] if offset else 0, rows.to(DTYPES[files.entries[part.name].dtype])
            elif (codes := _part_of_codes(weight.stored, part)) is not None:
                yield part.name, codes[1], codes[0].view(CODES)
                scale, shape = _scale_of(weight.stored, part), files.entries[layout.scale].shape
                scale = (scale if scale.numel() == math.prod(shape) else scale[:1]).reshape(shape)
                yield layout.scale, 0, scale.view(layout.dtype)


# ---------------------------------------------------------------- conversion


def _converted(files: Checkpoint, name: str, parameter: torch.Tensor) -> PublishedWeight | None:
    """Return an empty weight for a quantized parameter, else None."""
    part_layouts = [(part, files.layout(part.name)) for part in parts(files, name, tuple(parameter.shape))]
    layouts = [layout for _, layout in part_layouts]
    if not any(layouts):
        return None
    layer, first = name.removesuffix(".weight"), layouts[0]
    if any(layout is None or layout[1:] != first[1:] for layout in layouts if first):
        raise Fp8UnsupportedError(f"{layer}: its experts are quantized differently: {sorted(set(map(str, layouts)))}")
    assert first is not None  # noqa: S101  any of them is, and all are equal
    for part, _ in part_layouts:
        rows = parameter.shape[-2] if part.expert is None else part.high - part.low
        expected = (*parameter.shape[: -2 if part.expert is None else 0], rows, parameter.shape[-1])
        if files.entries[part.name].shape != expected:
            raise Fp8Error(
                f"{part.name} is {list(files.entries[part.name].shape)} in the file; {list(expected)} fits the model."
            )
    block, stacked = first.block, parameter.ndim == 3
    if stacked and block == (BLOCK, BLOCK) and any(part.low % BLOCK for part, _ in part_layouts):
        raise Fp8UnsupportedError(
            f"{layer}: {part_layouts[0][0].high} rows are no whole number of blocks of {BLOCK}, so that two "
            "matrices of the stack would share a block."
        )
    rows_of_one_scale = 1
    if stacked and block is None:  # gate and up may have one scale each
        block, rows_of_one_scale = (1, 0), part_layouts[0][0].high
    shape = () if block is None else (*parameter.shape[:-1], 1)
    if block == (BLOCK, BLOCK):
        shape = (*parameter.shape[:-2], *(-(-size // BLOCK) for size in parameter.shape[-2:]))
    dtype = torch.uint8 if first.dtype == torch.float8_e8m0fnu else first.dtype
    scale_inv = torch.empty(shape, dtype=dtype, device=parameter.device)
    return PublishedWeight.empty(parameter, scale_inv=scale_inv, block=block, rows_of_one_scale=rows_of_one_scale)


def _check_not_shared(model: nn.Module, name: str, parameter: torch.Tensor) -> None:
    others = [other_name for other_name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
    if len(others) > 1:
        raise Fp8UnsupportedError(f"{name} has FP8 codes in the file, and its weight is shared by {', '.join(others)}.")


def _check_experts(module: nn.Module, name: str) -> None:
    flags = [flag for flag in ("is_transposed", "has_bias") if getattr(module, flag, False)]
    if flags or not getattr(module, "is_concatenated", True):
        kind = type(module).__name__
        raise Fp8UnsupportedError(f"{name}: stacks of experts cannot be loaded: of {kind} with {flags}.")


# ---------------------------------------------------------------- tensors and their sources


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors: parameters and buffers, without published scales."""
    reshard(model)
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        scales = {
            f"{name}_scale_inv" for name, parameter in module._parameters.items() if published_of(parameter) is not None
        }
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in scales:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _check_buffers(model: nn.Module, in_file: set[str]) -> None:
    scales = {
        id(weight.scale_inv) for parameter in model.parameters() if (weight := published_of(parameter)) is not None
    }
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in in_file and id(buffer) not in scales:
            module = name.rpartition(".")[0]
            raise Fp8Error(
                f"The buffer {name} is on the meta device, and the file does not have it: make its module again before "
                f"the load, for example model.{module} = type(model.{module})(config)."
            )


def _sources(files: Checkpoint, name: str, tensor: torch.Tensor, own_name: str) -> list[Part]:
    """Return the parts of a parameter or buffer in the file.

    An adapter has none.

    Raises:
        Fp8Error: If a parameter is missing in the file, or the file has another shape or quantization of it.
    """
    file_parts = list(parts(files, name, tuple(tensor.shape)))
    if not file_parts and isinstance(tensor, nn.Parameter) and not is_adapter(own_name):
        raise Fp8Error(f"{own_name} is not in {files.path}; looked for {name}. Do the names differ? Pass rename=.")
    for part in file_parts:
        shape = files.entries[part.name].shape
        if part.expert is None and shape != tuple(tensor.shape):
            raise Fp8Error(f"{part.name} is {list(shape)} in the file, and {own_name} is {list(tensor.shape)}.")
        if (published_of(tensor) is None) != (files.layout(part.name) is None):
            raise Fp8Error(
                f"{part.name} is {files.entries[part.name].dtype} in the file, and {own_name} in the model is a "
                f"{type(local_of(tensor)).__name__} of {tensor.dtype}. Call convert_published with this file."
            )
    return file_parts


def _part_of_plain(tensor: torch.Tensor, part: Part) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return local elements of a plain part, and their file offset."""
    local, offset = local_of(tensor), region_of(tensor).offset
    if part.expert is None:
        return local, offset
    place = part.expert - offset[0]
    return (local[place, part.low : part.high], (0, *offset[2:])) if 0 <= place < len(local) else None


def _part_of_codes(stored: Stored, part: Part) -> tuple[torch.Tensor, int] | None:
    """Return local codes of a part, and their first row there."""
    if part.expert is None:
        return stored.codes[: stored.length], stored.first
    place = part.expert - stored.first
    return (stored.codes[place, part.low : part.high], 0) if 0 <= place < stored.length else None


def _scale_of(stored: Stored, part: Part) -> torch.Tensor:
    """Return the scales of a part, a view of the weight's."""
    if part.expert is None:
        return stored.scale_inv
    side = BLOCK if stored.block == (BLOCK, BLOCK) else 1
    return stored.scale_inv[part.expert, part.low // side : -(-part.high // side)]


# ---------------------------------------------------------------- filling


def _allocate(model: nn.Module, device: torch.device | str | None) -> list[str]:
    """Allocate all tensors on the meta device; return the parameters' names."""
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    sharded = next((p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)), None)
    place = device or sharded or torch.accelerator.current_accelerator(check_available=True) or "cpu"

    def allocated(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor

    for module in model.modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and tensor.is_meta for tensor in tensors):
            module._apply(allocated, recurse=False)
    return names


def _fill(files: Checkpoint, part: Part, tensor: torch.Tensor) -> set[str]:
    """Read local rows of a part; return the names of its tensors."""
    weight, layout = published_of(tensor), files.layout(part.name)
    if weight is None or layout is None:
        plain = _part_of_plain(tensor, part)
        if plain is not None:
            local, offset = plain
            _warn_of_rounding(files, part.name, local)
            rows = files.read(part.name, offset[0], offset[0] + len(local)) if local.ndim else files.read(part.name)
            inner = tuple(slice(low, low + size) for low, size in zip(offset[1:], local.shape[1:], strict=True))
            local.copy_(rows[(slice(None), *inner)] if local.ndim else rows)
        return {part.name}
    codes = _part_of_codes(weight.stored, part)
    if codes is not None:
        local_codes, first = codes
        local_codes.copy_(files.read(part.name, first, first + len(local_codes)).view(torch.uint8))
    target = _scale_of(weight.stored, part)
    read = files.read(layout.scale).view(target.dtype)
    target.copy_(read.reshape(target.shape) if read.numel() == target.numel() else read.reshape(-1))
    return {part.name, layout.scale}


def _warn_of_rounding(files: Checkpoint, name: str, tensor: torch.Tensor) -> None:
    """Warn if a plain tensor cannot represent the file's dtype."""
    dtype = DTYPES[files.entries[name].dtype]
    if dtype != tensor.dtype and torch.promote_types(dtype, tensor.dtype) != tensor.dtype:
        logger.warning("%s is %s in the file and %s in the model: it is rounded.", name, dtype, tensor.dtype)


def on_first_rank(function: Callable[[], None]) -> None:
    """Run a function on the first rank; all ranks raise its error.

    Raises:
        Fp8Error: If the function raises an `Fp8Error` or `OSError` on the first rank.
    """
    errors: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            function()
        except (OSError, Fp8Error) as error:
            errors = [str(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(errors)
    if errors[0] is not None:
        raise Fp8Error(errors[0])

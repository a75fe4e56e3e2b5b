"""What FP8 products keep of their input for the backward: codes where they serve the gradient of the weight."""

from typing import Literal, NamedTuple

import torch

from fp8_common._blocks import Block
from fp8_common._formats import Format
from fp8_common._recipe import CastRecipe
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch._gathered_weight import GatheredFloat8Weight
from fp8_common.torch._linear_config import LinearConfig
from fp8_common.torch._operands import Operand, cast_operand
from fp8_common.torch._row_groups import RowGroups

Tensors = tuple[torch.Tensor, ...]


class Way(NamedTuple):
    """How an input was kept.

    Attributes:
        name: "input", as it is; "codes" of the output's product, which serve here; the same "turned"; codes "across",
            cast for this product; or "decoded", codes of the output's product for one in high precision.
        fmt: The format of the codes.
        block: The block of each scale, where scales do not broadcast.
    """

    name: Literal["input", "codes", "turned", "across", "decoded"]
    fmt: Format
    block: Block | None


def keep_input(
    config: LinearConfig, rows: torch.Tensor, cast: Operand, groups: RowGroups | None
) -> tuple[Way, Tensors]:
    """Return what the weight's gradient needs of the input [rows, columns], and how to read it.

    Codes serve where they have one scale, whatever dimension is contracted, or were cast by columns too.

    Args:
        config: Of the layer.
        rows: The input.
        cast: The operand that it became.
        groups: Its rows in groups, if they are.
    """
    across = cast.across
    if across is None and not config.input_has_one_cast:
        over_rows = config.grad_weight_casts[1]
        if not config.fp8_saved_input or isinstance(rows, GatheredFloat8Weight):
            return Way("input", cast.fmt, None), (rows,)
        if not over_rows.enabled:
            return Way("decoded", cast.fmt, cast.block), (cast.codes, cast.scale_inv)
        across = cast_over_rows(rows, over_rows, groups)
    if across is not None:
        return Way("across", across.fmt, across.block), (across.codes, across.scale_inv)
    if cast.turned is not None:
        return Way("turned", cast.fmt, None), (cast.turned, cast.scale_inv)
    return Way("codes", cast.fmt, cast.block), (cast.codes, cast.scale_inv)


def kept_input(way: Way, kept: Tensors) -> torch.Tensor | Operand:
    """Return what `keep_input` kept: the input, decoded or as it was, or an operand to be contracted over its rows.

    An operand `across` is contracted over rows as it is.
    """
    if way.name == "input":
        return kept[0]
    codes, scale_inv = kept
    operand = Operand(codes, scale_inv, way.fmt, way.block)
    if way.name == "decoded":
        return dispatch.values(codes, way.fmt) * operand.wide_scale_inv
    if way.name == "turned":  # transposed once more, the turned codes are at hand
        return Operand(codes.t(), scale_inv, way.fmt, turned=codes)
    return operand if way.name == "codes" else Operand(codes, scale_inv, way.fmt, way.block, across=operand)


def cast_over_rows(x: torch.Tensor, cast: CastRecipe, groups: RowGroups | None) -> Operand:
    """Cast [rows, columns] for a product contracted over rows."""
    return cast_operand(x.t(), cast) if groups is None else groups.cast_over_rows(x, cast)

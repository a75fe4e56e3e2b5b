"""FP8 for Flax Linen: conversion of modules, operations, train state, and pipelines."""

from fp8_common.plugin import extra

with extra("fp8-jax-owg[flax]", __name__):
    import flax  # noqa: F401

from fp8_jax_owg.linen.convert import convert_to_fp8
from fp8_jax_owg.linen.operations import (
    OVERWRITE_WITH_GRADIENT,
    Fp8ConvGeneralDilatedOp,
    Fp8DirectDotGeneralOp,
    Fp8DotGeneralOp,
    Fp8Einsum,
    promote_dtype,
)
from fp8_jax_owg.linen.pipeline import LayerwiseShardablePipelined
from fp8_jax_owg.linen.train_state import TrainState

__all__ = [
    "OVERWRITE_WITH_GRADIENT",
    "Fp8ConvGeneralDilatedOp",
    "Fp8DirectDotGeneralOp",
    "Fp8DotGeneralOp",
    "Fp8Einsum",
    "LayerwiseShardablePipelined",
    "TrainState",
    "convert_to_fp8",
    "promote_dtype",
]

"""FP8 for Flax NNX: conversion of models, operations, gradients, and pipelines."""

from fp8_common.plugin import extra

with extra("fp8-jax-owg[flax]", __name__):
    import flax  # noqa: F401

from fp8_jax_owg.nnx.convert import convert_to_fp8
from fp8_jax_owg.nnx.differentiate import grad, value_and_grad
from fp8_jax_owg.nnx.operations import Fp8ConvGeneralDilatedOp, Fp8DotGeneralOp, Fp8EinsumOp, OverwriteWithGradient
from fp8_jax_owg.nnx.pipeline import LayerwiseShardablePipelined

__all__ = [
    "Fp8ConvGeneralDilatedOp",
    "Fp8DotGeneralOp",
    "Fp8EinsumOp",
    "LayerwiseShardablePipelined",
    "OverwriteWithGradient",
    "convert_to_fp8",
    "grad",
    "value_and_grad",
]

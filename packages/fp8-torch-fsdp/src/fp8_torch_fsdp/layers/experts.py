"""`Float8Experts`: stacks of expert weights with grouped FP8 matmuls."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fp8_common.torch_layers.linear.function import autocast
from fp8_common.torch_layers.linear.gated import fp8_gated_mlp, takes_gated
from fp8_torch_fsdp.layers.module import Float8Module


class Float8Experts(Float8Module):
    """Experts with FP8 matmuls, each like a separate `Float8Linear`.

    `convert_to_float8_training` creates it, as a subclass of the module's class. Under FSDP2 the weights are gathered
    as FP8 codes, which the matmuls use directly. The module keeps its parameters, gradients and state dicts.
    """

    def expert_matmul(self, name: str, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return each row multiplied by the weight of its expert.

        Args:
            name: Name of the weight.
            x: float32, bfloat16 or float16 [rows, in_features], sorted by expert.
            offsets: int32 or int64 [experts], index of the end of each expert's rows. Rows after the last end belong to
                no expert: their results and gradients are zero.

        Returns:
            [rows, out_features] in the dtype of `x` (the autocast dtype under autocast).

        Raises:
            Fp8Error: If shapes or offsets do not fit, the layout has no such weight, or the weight is distributed and
                not gathered. Values of offsets are validated on CPUs only; on other devices invalid ones give NaN.
        """
        weight: Any = getattr(self, name, None)  # `fp8_matmul` raises for unknown names
        return self.fp8_matmul(name, x, weight, offsets)

    def grouped_swiglu(
        self, up: str | tuple[str, str], down: str, x: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return down(silu(gate) * up) of each row with its expert's weights.

        With the recipe "rowwise" and bfloat16 inputs, this is one autograd function that passes FP8 codes between its
        matmuls. Otherwise it computes the matmuls of `expert_matmul`, with `torch.nn.functional.silu` between them.

        Args:
            up: Name of the weight [experts, 2 * hidden, in_features] with the rows of gate and up, gate first; or the
                names of both weights, gate first.
            down: Name of the weight [experts, out_features, hidden].
            x: As for `expert_matmul`.
            offsets: As for `expert_matmul`.

        Returns:
            [rows, out_features] in the dtype of `x` (the autocast dtype under autocast).

        Raises:
            Fp8Error: As for `expert_matmul`.
        """
        names = (*((up,) if isinstance(up, str) else up), down)
        weights: list[Any] = [getattr(self, name, None) for name in names]
        return self.gated_mlp(names, x, weights, offsets)

    def gated_mlp(
        self, names: Sequence[str], x: torch.Tensor, weights: Sequence[torch.Tensor], offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return `grouped_swiglu` with the given weights.

        Args:
            names: Names of the weights: gate and up, or both in one, and down.
            x: As for `expert_matmul`.
            weights: Weights of these names, sharded, gathered or plain, or this rank's experts of them.
            offsets: As for `expert_matmul`.
        """
        keep = [self.keeps_codes(name, weight) for name, weight in zip(names, weights, strict=True)]
        matmuls = [self.fp8[name] for name in names]
        x = autocast(x) if isinstance(x, torch.Tensor) else x
        specs = [matmul.spec for matmul in matmuls]
        if not takes_gated(x, weights, specs):
            first = zip(names[:-1], weights, strict=False)
            hidden = [self.fp8_matmul(name, x, weight, offsets) for name, weight in first]
            gate, up = hidden if len(hidden) == 2 else hidden[0].chunk(2, dim=-1)
            return self.fp8_matmul(names[-1], F.silu(gate) * up, weights[-1], offsets)
        y = fp8_gated_mlp(x, weights, specs, offsets, record=self.records, keep_codes=keep)
        if not torch.compiler.is_compiling():
            for matmul in matmuls:
                matmul.rows_per_expert = x.shape[0] / offsets.shape[0]  # for `float8_report`
        return y

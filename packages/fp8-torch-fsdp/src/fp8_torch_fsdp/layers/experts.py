"""`Float8Experts`: stacks of weights that rows in groups are multiplied by, in FP8."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fp8_common.torch_layers.linear.function import autocast
from fp8_common.torch_layers.linear.gated import fp8_gated_mlp, takes_gated
from fp8_torch_fsdp.layers.module import Float8Module


class Float8Experts(Float8Module):
    """Experts whose matmuls run in FP8: each expert as if it were a `Float8Linear` of its own.

    Made by `convert_to_float8_training`; of the module's class, it is an instance too. Under FSDP2 the weights arrive
    as FP8 codes, which the matmuls take as they are. Parameters, gradients and state dicts are those of the module.
    """

    def expert_matmul(self, name: str, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return each row multiplied by the weight of its expert.

        Args:
            name: The weight's name.
            x: [rows, in_features], sorted by expert.
            offsets: int32 or int64 [experts]: where the rows of each expert end. Rows behind the last one belong to no
                expert: they give zeros, and get no gradient.

        Returns:
            [rows, out_features] in the dtype of `x` (the autocast dtype under autocast).

        Raises:
            Fp8Error: Shapes or offsets do not fit, the layout has no such weight, or it is distributed and not
                gathered. What offsets hold is looked at on a CPU; elsewhere those that do not fit give NaN.
        """
        weight: Any = getattr(self, name, None)  # `fp8_matmul` says which names there are
        return self.fp8_matmul(name, x, weight, offsets)

    def grouped_swiglu(
        self, up: str | tuple[str, str], down: str, x: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return down(silu(gate) * up) of each row, with the weights of its expert.

        With the recipe "rowwise" and bfloat16 inputs it is one function between whose matmuls are FP8 codes alone; with
        others it is `expert_matmul`, `torch.nn.functional.silu` and `expert_matmul`.

        Args:
            up: The name of the weight of gate and up, [experts, 2 hidden, in_features], gate first; or the names of
                both, gate first.
            down: The name of the last weight.
            x: As of `expert_matmul`.
            offsets: Alike.

        Returns:
            [rows, out_features] in the dtype of `x` (the autocast dtype under autocast).

        Raises:
            Fp8Error: As of `expert_matmul`.
        """
        names = (*((up,) if isinstance(up, str) else up), down)
        weights: list[Any] = [getattr(self, name, None) for name in names]
        return self.gated_mlp(names, x, weights, offsets)

    def gated_mlp(
        self, names: Sequence[str], x: torch.Tensor, weights: Sequence[torch.Tensor], offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return `grouped_swiglu` with the weights in any state, or this rank's experts of them."""
        keep = [self.keeps_codes(name, weight) for name, weight in zip(names, weights, strict=True)]
        matmuls = [self.fp8[name] for name in names]
        x = autocast(x) if isinstance(x, torch.Tensor) else x
        specs = [matmul.spec for matmul in matmuls]
        if not takes_gated(x, weights, specs):
            hidden = [self.fp8_matmul(name, x, one, offsets) for name, one in zip(names[:-1], weights, strict=False)]
            gate, up = hidden if len(hidden) == 2 else hidden[0].chunk(2, dim=-1)
            return self.fp8_matmul(names[-1], F.silu(gate) * up, weights[-1], offsets)
        y = fp8_gated_mlp(x, weights, specs, offsets, record=self.records, keep_codes=keep)
        if not torch.compiler.is_compiling():
            for matmul in matmuls:
                matmul.rows_per_expert = x.shape[0] / offsets.shape[0]  # for `float8_report`
        return y

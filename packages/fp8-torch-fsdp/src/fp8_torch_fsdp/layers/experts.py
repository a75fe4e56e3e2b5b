"""`Float8Experts`: stacks of weights that rows in groups are multiplied by, in FP8."""

from typing import Any

import torch

from fp8_torch_fsdp.layers.module import Float8Module


class Float8Experts(Float8Module):
    """Experts whose matmuls run in FP8: each expert as if it were a `Float8Linear` of its own.

    Made by `convert_to_float8_training`; of the module's class, it is an instance too. Under FSDP2 the weights arrive
    as FP8 codes, which the matmuls take as they are. Parameters, gradients and state dicts are those of the module.
    """

    def grouped_product(self, name: str, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
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

"""`Float8Experts`: a module of stacked experts whose grouped products run in FP8."""

import torch

from fp8_torch_fsdp._own_weights import Float8Weights


class Float8Experts(Float8Weights):
    """Experts whose products run in FP8: each expert as if it were a `Float8Linear` of its own.

    Made by `convert_to_float8_training`; of the module's class, it is an instance too. Under FSDP2 the weights arrive
    as FP8 codes, which the products take as they are. Parameters, gradients and state dicts are those of the module.
    """

    def grouped_product(self, name: str, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the product of each row with the weight of its expert.

        Args:
            name: The weight's name.
            x: [rows, in_features], sorted by expert.
            offsets: int32 or int64 [experts]: where the rows of each expert end. Rows behind the last one belong to no
                expert: they give zeros, and get no gradient.

        Returns:
            [rows, out_features] in the dtype of `x` (the autocast dtype under autocast).

        Raises:
            Fp8Error: Shapes or offsets do not fit, the layout has no such weight, or it is distributed and not
                gathered. What offsets hold is looked at on a CPU, and on all ranks alike under a `GroupOffsetsCheck`;
                elsewhere those that do not fit give NaN.
        """
        return self.weight_product(name, x, offsets)

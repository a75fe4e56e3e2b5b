"""What PyTorch plugins need beside the public names.

Casts: `dispatch`, one tensor each, `foreach`, many in one launch, `delayed_ops`, histories of a model. Products: a
layer inherits `LinearOperands`, is configured with a `LinearConfig` and calls its `product`. Scales: a `ScaleLayout`
knows how the scales of a weight lie on it and on a part of it (`ShardGeometry`), and `max_over_ranks` agrees on them.
FSDP2: `fsdp` reads its private parts and makes buffers, `GatheredFloat8Weight` is what arrives. Tensor subclasses:
`tensor_subclass`.
"""

from fp8_common.torch import _delayed_ops as delayed_ops
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch import _foreach as foreach
from fp8_common.torch import _fsdp as fsdp
from fp8_common.torch import _hooks as hooks
from fp8_common.torch import _tensor_subclass as tensor_subclass
from fp8_common.torch._amax import max_over_ranks
from fp8_common.torch._gathered_weight import GatheredFloat8Weight
from fp8_common.torch._linear import LinearOperands, WeightAccess
from fp8_common.torch._linear_config import LinearConfig
from fp8_common.torch._operands import Operand, cast_tensorwise
from fp8_common.torch._scale_layout import ScaleLayout, ShardGeometry

__all__ = [
    "GatheredFloat8Weight",
    "LinearConfig",
    "LinearOperands",
    "Operand",
    "ScaleLayout",
    "ShardGeometry",
    "WeightAccess",
    "cast_tensorwise",
    "delayed_ops",
    "dispatch",
    "foreach",
    "fsdp",
    "hooks",
    "max_over_ranks",
    "tensor_subclass",
]

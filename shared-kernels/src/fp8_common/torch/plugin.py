"""What PyTorch plugins need beside the public names.

Casts: `dispatch`, one tensor each, `foreach`, many in one launch, `delayed_ops`, histories of a model. Products: a
layer inherits `LinearOperands`, is configured with a `LinearConfig` and calls `fp8_linear`. Scales: `layout_of(cast)`
knows how the scales of a weight lie on it and on a part of it (`ShardGeometry`), and `max_over_ranks` agrees on them. FSDP2:
`fsdp` reads its private parts, `buffers` are what weights travel in, `GatheredFloat8Weight` is what arrives. Tensor
subclasses: `tensor_subclass`.
"""

from fp8_common.torch import _delayed_ops as delayed_ops
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch import _foreach as foreach
from fp8_common.torch import _tensor_subclass as tensor_subclass
from fp8_common.torch._checkpoint import read_metadata
from fp8_common.torch._fsdp import buffers
from fp8_common.torch._fsdp import compat as fsdp
from fp8_common.torch._fsdp.gathered import GatheredFloat8Weight
from fp8_common.torch._linear import LinearOperands, WeightAccess, fp8_linear
from fp8_common.torch._linear_config import GemmConfig, LinearConfig, scaled_from_itself
from fp8_common.torch._operands import Operand, cast_tensorwise
from fp8_common.torch._reduce import max_over_ranks
from fp8_common.torch._replaced import mark_replaced
from fp8_common.torch._scale_layout import ScaleLayout, ShardGeometry, layout_of

__all__ = [
    "GatheredFloat8Weight",
    "GemmConfig",
    "LinearConfig",
    "LinearOperands",
    "Operand",
    "ScaleLayout",
    "ShardGeometry",
    "WeightAccess",
    "buffers",
    "cast_tensorwise",
    "delayed_ops",
    "dispatch",
    "foreach",
    "fp8_linear",
    "fsdp",
    "layout_of",
    "mark_replaced",
    "max_over_ranks",
    "read_metadata",
    "scaled_from_itself",
    "tensor_subclass",
]

"""What PyTorch plugins need beside the public names and the modules without an underscore.

Casts: `dispatch`, one tensor each, `foreach`, many in one launch, `delayed_ops`, histories of a model. Layers are made
of `fp8_common.torch.linear`, sharded weights of `fp8_common.torch.sharding`.
"""

from fp8_common.torch import _delayed_ops as delayed_ops
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch import _foreach as foreach

__all__ = ["delayed_ops", "dispatch", "foreach"]

"""FP8 primary weights that keep their initial high-precision values for the masters.

    >>> import torch
    >>> from fp8_te_init import MasterOptimizer, fp8_model_init, seed_masters
    >>> with fp8_model_init(preserve_high_precision_init_val=True):
    ...     model = torch.nn.Linear(64, 64)
    >>> optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)  # after fully_shard(model)
    >>> seed_masters(optimizer, model).sources
    {'weight': 'init'}
    >>> model(torch.ones(8, 64)).sum().backward()
    >>> optimizer.step()

The weights of linear layers hold FP8 codes without a high-precision copy; the optimizer trains float32 masters of them.
`fp8_te_init.published` loads and saves published FP8 checkpoints, into models that were built without this package.
"""

from fp8_common.plugin import check_version
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_te_init.build import convert_linear, fp8_model_init
from fp8_te_init.errors import MissingInitError, StaleInitError
from fp8_te_init.linear import PrimaryFloat8Linear
from fp8_te_init.masters.optimizer import MasterOptimizer
from fp8_te_init.masters.seed import rescale_, seed_masters
from fp8_te_init.report import export_fp32_state_dict, memory_report
from fp8_te_init.weight.replicas import broadcast_weights_
from fp8_te_init.weight.slices import quantize_master_weights
from fp8_te_init.weight.tensor import PrimaryFloat8Weight

__version__ = "0.1.0"
check_version("fp8-te-init", __version__)

__all__ = [
    "LinearConfig",
    "MasterOptimizer",
    "MissingInitError",
    "PrimaryFloat8Linear",
    "PrimaryFloat8Weight",
    "StaleInitError",
    "broadcast_weights_",
    "convert_linear",
    "export_fp32_state_dict",
    "fp8_model_init",
    "memory_report",
    "quantize_master_weights",
    "rescale_",
    "seed_masters",
]

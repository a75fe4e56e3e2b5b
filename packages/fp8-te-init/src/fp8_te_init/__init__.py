"""FP8 primary weights that remember their high-precision start.

    with primary_weights(preserve="cpu"):
        model = Model()
    fully_shard(model)

The weights of linear layers hold FP8 codes and nothing else; the values before rounding wait for the optimizer's
masters and are dropped then.
"""

from fp8_common.plugin import check_version
from fp8_common.torch import GemmConfig
from fp8_te_init._config import PrimaryConfig
from fp8_te_init._context import fp8_model_init, primary_weights
from fp8_te_init._convert import convert_linear
from fp8_te_init._errors import MissingInitError, StaleInitError
from fp8_te_init._export import export_fp32_state_dict
from fp8_te_init._linear import PrimaryFloat8Linear
from fp8_te_init._master_optimizer import MasterOptimizer
from fp8_te_init._report import MemoryReport, memory_report
from fp8_te_init._rescale import rescale_
from fp8_te_init._seed import SeedReport, seed_masters
from fp8_te_init._weight import PrimaryFloat8Weight

__version__ = "0.1.0"
check_version("fp8-te-init", __version__)

__all__ = [
    "GemmConfig",
    "MasterOptimizer",
    "MemoryReport",
    "MissingInitError",
    "PrimaryConfig",
    "PrimaryFloat8Linear",
    "PrimaryFloat8Weight",
    "SeedReport",
    "StaleInitError",
    "convert_linear",
    "export_fp32_state_dict",
    "fp8_model_init",
    "memory_report",
    "primary_weights",
    "rescale_",
    "seed_masters",
]

"""FP8 primary weights that remember their high-precision start.

    with primary_weights(preserve="cpu"):
        model = Model()
    fully_shard(model)

The weights of linear layers hold FP8 codes and nothing else; the values before rounding wait for the optimizer's
masters and are dropped then.
"""

from fp8_common.plugins import check_version
from fp8_te_init.config import PrimaryConfig
from fp8_te_init.context import fp8_model_init, primary_weights
from fp8_te_init.convert import convert_linear
from fp8_te_init.errors import MissingInitError, StaleInitError
from fp8_te_init.export import export_fp32_state_dict
from fp8_te_init.linear import PrimaryFloat8Linear
from fp8_te_init.master import MasterOptimizer
from fp8_te_init.philox_init import philox_init_, philox_init_model_
from fp8_te_init.report import MemoryReport, memory_report
from fp8_te_init.rescale import rescale_
from fp8_te_init.seed import SeedReport, seed_masters
from fp8_te_init.sources.philox import Normal, TruncatedNormal, Uniform
from fp8_te_init.weight import PrimaryFloat8Weight

__version__ = "0.1.0"
check_version("fp8-te-init", __version__)

__all__ = [
    "MasterOptimizer",
    "MemoryReport",
    "MissingInitError",
    "Normal",
    "PrimaryConfig",
    "PrimaryFloat8Linear",
    "PrimaryFloat8Weight",
    "SeedReport",
    "StaleInitError",
    "TruncatedNormal",
    "Uniform",
    "convert_linear",
    "export_fp32_state_dict",
    "fp8_model_init",
    "memory_report",
    "philox_init_",
    "philox_init_model_",
    "primary_weights",
    "rescale_",
    "seed_masters",
]

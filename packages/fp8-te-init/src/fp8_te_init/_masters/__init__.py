"""How a `MasterOptimizer` keeps float32 masters."""

from fp8_te_init._masters.whole import WholeMaster

__all__ = ["WholeMaster"]

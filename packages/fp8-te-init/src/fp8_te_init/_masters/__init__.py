"""How a `MasterOptimizer` keeps float32 masters: whole, or in three bytes beside the FP8 codes."""

from fp8_te_init._masters.base import Kept, Master, Moments
from fp8_te_init._masters.remainder import RemainderMaster, can_be_joined
from fp8_te_init._masters.stepping import PartSteps, is_elementwise, whole_state
from fp8_te_init._masters.whole import WholeMaster

__all__ = [
    "Kept",
    "Master",
    "Moments",
    "PartSteps",
    "RemainderMaster",
    "WholeMaster",
    "can_be_joined",
    "is_elementwise",
    "whole_state",
]

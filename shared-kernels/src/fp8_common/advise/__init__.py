"""Estimates of what FP8 training is worth for a model on a machine: bytes, exposed communication, step time, memory.

A model, not a measurement: `Job`, `Choice`, `Accelerator` and `Links` hold its assumptions, the page "Estimate the
speed-up" of the documents lists them and compares it with published runs.
"""

from fp8_common.advise._choices import CHOICES, Choice
from fp8_common.advise._estimate import Estimate, Job, estimate
from fp8_common.advise._machine import ACCELERATORS, LINKS, Accelerator, Links
from fp8_common.advise._plot import WORLD_SIZES, plot, speed_ups
from fp8_common.advise._recommend import Advice, advise
from fp8_common.advise._shape import SHAPES, ModelShape

__all__ = [
    "ACCELERATORS",
    "CHOICES",
    "LINKS",
    "SHAPES",
    "WORLD_SIZES",
    "Accelerator",
    "Advice",
    "Choice",
    "Estimate",
    "Job",
    "Links",
    "ModelShape",
    "advise",
    "estimate",
    "plot",
    "speed_ups",
]

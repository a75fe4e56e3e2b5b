"""`describe`: the entry point of this plugin for `fp8 doctor`."""

from fp8_common.hardware import GATHER, grouped_path, matmul_path
from fp8_common.plugin import Machine, PluginInfo
from fp8_torch_fsdp import __version__

GRANULARITIES = ("tensorwise", "rowwise", "blockwise_1x128")
"""Granularities of this package's recipes; operands in 1x128 blocks are multiplied by weights in 128x128 blocks."""


def describe(machine: Machine) -> PluginInfo:
    """Return the plugin's capabilities on `machine`, with reasons."""
    mx = machine.plugin_path("mx", "emulated", "MX codes are decoded and multiplied, on every device.")
    matmuls = (matmul_path(machine.accelerator, granularity) for granularity in GRANULARITIES)
    return PluginInfo(
        name="fp8-torch-fsdp",
        version=__version__,
        summary="FP8 linear layers for PyTorch; FSDP2 all-gathers their weights as one byte per element.",
        paths=(*matmuls, mx, grouped_path(machine.accelerator), GATHER),
        certify="fp8_torch_fsdp._certify:certificates",
    )

"""Describe this plugin to `fp8 doctor`."""

from fp8_common.hardware import GATHER, matmul_path
from fp8_common.plugin import Machine, PluginInfo
from fp8_te_init import __version__


def describe(machine: Machine) -> PluginInfo:
    """Return the plugin's capabilities on `machine`, with reasons."""
    granularities = ("tensorwise", "rowwise", "blockwise_1x128")
    mx = machine.plugin_path("mx", "unavailable", "Weights of nn.Linear have no MX scales; TransformerEngine's may.")
    return PluginInfo(
        name="fp8-te-init",
        version=__version__,
        summary="FP8 primary weights whose FP32 masters start from the values before rounding.",
        paths=(*(matmul_path(machine.accelerator, granularity) for granularity in granularities), mx, GATHER),
    )

"""Describe this plugin to `fp8 doctor`."""

from fp8_common.plugin import Machine, PluginInfo
from fp8_jax_owg import __version__


def describe(machine: Machine) -> PluginInfo:
    """Return the plugin's capabilities on `machine`, with reasons."""
    blocks = machine.plugin_path("blockwise_1x128", "unavailable", "Recipes of JAX layers are tensorwise or rowwise.")
    mx = machine.plugin_path("mx", "unavailable", blocks.why)
    return PluginInfo(
        name="fp8-jax-owg",
        version=__version__,
        summary="FP8 for JAX and Flax: delayed scaling whose state accumulates by MAX in scans and pipelines.",
        paths=(machine.matmul_path("tensorwise"), machine.matmul_path("rowwise"), blocks, mx),
        certify="fp8_jax_owg._certify:certificates",
    )

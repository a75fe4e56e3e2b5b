"""What `fp8 doctor` says about this plugin."""

from fp8_common.plugin import Machine, PluginInfo


def describe(machine: Machine) -> PluginInfo:
    """Tell what this plugin will do on `machine` and why."""
    return PluginInfo(
        name="fp8-te-init",
        version="0.1.0",
        summary="FP8 primary weights whose FP32 masters start from the values before rounding.",
        paths=(machine.product_path("tensorwise"), machine.gather_path()),
    )

"""What plugins need beside the public names: how a plugin tells of itself to `fp8 doctor`, and shared settings.

The parts that know a framework are the modules of `fp8_common.torch` and `fp8_common.jax` without an underscore.
Nothing else of fp8_common is for plugins: modules and names with an underscore change without notice.
"""

from fp8_common._machine import Machine
from fp8_common._plugins import PluginInfo, check_version
from fp8_common._records import Record

__all__ = ["Machine", "PluginInfo", "Record", "check_version"]

"""`Driver`: what Triton takes for the driver of an H100, which notes what is loaded and launched, and does neither."""

import gc
from types import SimpleNamespace

from triton.backends.compiler import GPUTarget

from fp8_common._kernels import Launch


class Driver:
    """A driver for an H100 that refuses to load during a capture.

    Attributes:
        loaded: The names of kernels.
        launched: The same, of each launch.
        arguments: Those of each launch, from the kernel's handle on.
        capturing: Whether a CUDA graph is being captured.
    """

    def __init__(self):
        self.loaded, self.launched, self.arguments, self.capturing = [], [], [], False
        limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warp_size": 32, "max_num_regs": 65536}
        self.utils = SimpleNamespace(
            load_binary=self.load, unload_module=lambda module: None, get_device_properties=lambda device: limits
        )

    def load(self, name, kernel, shared, device):
        assert not self.capturing, "a capture forbids to load modules"
        self.loaded.append(name)
        return 1, 2, 32, 0, 1024

    def launcher_cls(self, source, metadata):
        def launch(*given):
            self.launched.append(metadata.name)
            self.arguments.append(given[:4] + given[9:])

        return launch

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def unload():
    """Let go of all kernels, while the driver that loaded them is there: they unload themselves."""
    for one in gc.get_objects():
        if type(one) is Launch:
            one.loaded.clear()
            one.kernel.device_caches.clear()
    gc.collect()

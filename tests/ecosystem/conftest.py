"""Settings of these tests that JAX reads when it makes its first array, in whatever module that is."""

import importlib.util
import os

if importlib.util.find_spec("maxtext"):
    # a pipeline of MaxText has a device for each stage
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

"""Importing fp8_common loads no framework; its public names exist, and its errors have common bases."""

import subprocess
import sys

import fp8_common

FRAMEWORKS = ("torch", "jax", "triton", "flax", "hypothesis", "pytest")


def test_no_framework_is_loaded():
    code = "import fp8_common, fp8_common.testing, fp8_common._command, fp8_common.plugin, sys\n"
    code += f"print(*(name for name in {FRAMEWORKS} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_everything_public_exists_and_is_sorted_into_all():
    assert len(set(fp8_common.__all__)) == len(fp8_common.__all__)
    assert all(hasattr(fp8_common, name) for name in fp8_common.__all__)


def test_errors_derive_from_builtin_errors():
    assert issubclass(fp8_common.Fp8Error, ValueError)
    for error in (fp8_common.Fp8UnsupportedError, fp8_common.Fp8StaleError):
        assert issubclass(error, RuntimeError)
        assert issubclass(error, fp8_common.Fp8Error)

"""Import times of the installed packages: `python -m tests.release.check_imports`.

`import` of a package may take 0.15 seconds of processor time longer than that of its framework; wall time would depend
on other load. Each is timed several times in fresh processes, alternating, and the smallest times are compared.
"""

import importlib.util
import subprocess
import sys

ALLOWED = 0.15
FRAMEWORKS = {
    "fp8_common": "numpy, ml_dtypes",
    "fp8_torch_fsdp": "torch, torch.distributed.fsdp, torch.distributed.tensor",
    "fp8_jax_owg": "jax",
    "fp8_te_init": "torch, torch.distributed.fsdp, torch.distributed.tensor",
}
TIMER = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"


def seconds(modules: str) -> float:
    """Return the seconds of the processor that a fresh process takes to import modules."""
    command = [sys.executable, "-c", TIMER.format(modules)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cost(package: str, rounds: int = 7) -> tuple[float, float]:
    """Return the seconds for the framework alone and for the package with it: the smallest of several rounds."""
    framework = FRAMEWORKS[package]
    pairs = [(seconds(framework), seconds(f"{framework}, {package}")) for _ in range(rounds + 1)][1:]
    return min(alone for alone, _ in pairs), min(both for _, both in pairs)


def main() -> None:
    """Print a line for every installed package and exit with 1 if one is slow."""
    slow = []
    for package in filter(importlib.util.find_spec, FRAMEWORKS):
        alone, both = cost(package)
        print(f"{package}: {both - alone:+.3f} s over {alone:.3f} s for {FRAMEWORKS[package]}")
        if both - alone > ALLOWED:
            slow.append(package)
    if slow:
        sys.exit(f"{', '.join(slow)}: more than {ALLOWED} s. `python -X importtime -c 'import {slow[0]}'` shows where.")


if __name__ == "__main__":
    main()

"""Import times of the installed packages: `python -m tests.release.check_imports`.

`import` of a package may take 0.15 seconds of processor time after that of the parts of its framework that it needs;
wall time would depend on other load. It is timed in several fresh processes, and the smallest time counts.
"""

import importlib.util
import subprocess
import sys

ALLOWED = 0.15
TORCH = "torch, torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.checkpoint"
FRAMEWORKS = {"fp8_common": "numpy, ml_dtypes", "fp8_torch_fsdp": TORCH, "fp8_jax_owg": "jax", "fp8_te_init": TORCH}
TIMER = "import time; import {}; start = time.process_time(); import {}; print(time.process_time() - start)"


def seconds(package: str, rounds: int = 7) -> float:
    """Return the seconds of the processor that a fresh process takes to import a package: the smallest of several."""
    command = [sys.executable, "-c", TIMER.format(FRAMEWORKS[package], package)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(rounds + 1)]
    return min(float(run.stdout) for run in runs[1:])


def main() -> None:
    """Print a line for every installed package and exit with 1 if one is slow."""
    slow = []
    for package in filter(importlib.util.find_spec, FRAMEWORKS):
        found = seconds(package)
        print(f"{package}: {found:.3f} s after {FRAMEWORKS[package]}")
        if found > ALLOWED:
            slow.append(package)
    if slow:
        sys.exit(f"{', '.join(slow)}: more than {ALLOWED} s. `python -X importtime -c 'import {slow[0]}'` shows where.")


if __name__ == "__main__":
    main()

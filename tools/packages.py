"""The packages of this repository, and which of them each run of session `isolated` installs."""

from collections.abc import Iterator
from typing import NamedTuple

FRAMEWORKS = {"torch", "jax", "flax", "triton"}
AHEAD_OF_TIME = (
    *("shared-kernels/tests/aot", "packages/fp8-jax-owg/tests/aot"),
    *(f"tests/benchmarks/test_{name}.py" for name in ("static_cost", "host_time", "fused_casts")),
)
"""What compiles for GPUs and runs nothing there."""
INTERPRETED = (
    "shared-kernels/tests/interpreter",
    *(f"packages/{name}/tests/interpreter" for name in ("fp8-torch-fsdp", "fp8-te-init")),
    "tests/conformance/test_conformance.py",
)
"""What Triton's interpreter runs."""


class Alone(NamedTuple):
    """One run of session `isolated`: `tests` pass with `packages` alone, and `absent` is not installed."""

    packages: list[str]
    tests: str
    absent: set[str]


# Every package: its folder, and the extras that its features need. A new package is a line here and below.
PACKAGES = {
    "fp8-common": "shared-kernels[torch,jax,testing]",
    "fp8-torch-fsdp": "packages/fp8-torch-fsdp",
    "fp8-jax-owg": "packages/fp8-jax-owg[flax,optax,orbax,equinox]",
    "fp8-te-init": "packages/fp8-te-init",
}
ISOLATED = {
    "fp8-common": Alone(["fp8-common"], "shared-kernels/tests/numpy", FRAMEWORKS),
    "fp8-common-torch": Alone(["fp8-common[torch]"], "shared-kernels/tests/torch", {"jax", "flax"}),
    "fp8-common-jax": Alone(["fp8-common[jax]"], "shared-kernels/tests/jax", {"torch", "triton"}),
    "fp8-torch-fsdp": Alone(["fp8-common", "fp8-torch-fsdp"], "packages/fp8-torch-fsdp/tests", {"jax", "flax"}),
    "fp8-jax-owg": Alone(
        ["fp8-common[jax]", "fp8-jax-owg[flax,optax,orbax,equinox]"],
        "packages/fp8-jax-owg/tests",
        {"torch", "triton"},
    ),
    "fp8-te-init": Alone(["fp8-common", "fp8-te-init"], "packages/fp8-te-init/tests", {"jax", "flax"}),
}


def editable(*packages: str, extras: bool = True) -> Iterator[str]:
    """Yield the arguments that install packages from their folders; `name[extras]` asks for other extras."""
    for package in packages:
        name, bracket, asked = package.partition("[")
        folder, _, usual = PACKAGES[name].partition("[")
        wanted = bracket + asked or (extras and usual and f"[{usual}") or ""
        yield from ("-e", f"./{folder}{wanted}")


def folders() -> list[str]:
    """Return the folders of the packages, fp8-common first."""
    return [place.partition("[")[0] for place in PACKAGES.values()]

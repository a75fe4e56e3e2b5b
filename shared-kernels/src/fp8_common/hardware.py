"""FP8 paths of a device, as functions of its facts.

Nothing here inspects the machine.

Sources: NVIDIA's cuBLASLt documentation (FP8 matmuls and their scale modes by compute capability), and
`torch._scaled_mm` accepts, and AMD's CDNA3 and CDNA4 instruction set guides. `fp8_common._machine` gathers the
facts.
"""

import dataclasses
from typing import Literal

from fp8_common._env import BACKEND_VARIABLE, Backend
from fp8_common.formats import E4M3, E5M2, Format, get_data_format
from fp8_common.policy import ScalePolicy
from fp8_common.recipe import Granularity

Kind = Literal["cpu", "nvidia", "amd", "tpu", "other"]
Status = Literal["native", "reference", "emulated", "unavailable"]
RowsLibrary = Literal["cublas", "cutlass", ""]
GroupedMatmuls = Literal["table", "library", "own"]
GroupedProduct = Literal["rows", "over rows"]

# gfx942 multiplies the FNUZ variants, every other device with FP8 units the OCP formats.
OCP = ("e4m3", "e5m2")
FNUZ = ("e4m3fnuz", "e5m2fnuz")

KERNEL_CAPABILITY = (8, 9)
"""The first CUDA compute capability with FP8 conversion instructions, which the kernels use."""
KERNEL_FORMATS = (E4M3, E5M2)
"""The formats that kernels write."""

BLOCK_CAPABILITY = (9, 0)
"""The one compute capability for which cuBLAS multiplies with float32 scales of blocks: later ones have MX scales."""
BLOCK_CUDA = (12, 9)
"""The first CUDA that does."""
ROWS_CUDA = (12, 9)
"""The first CUDA with which cuBLAS multiplies with scales of rows, on Hopper; CUTLASS does elsewhere."""
ROWS_MAJORS = (9, 10, 11, 12)
"""The major compute capabilities for which torch has matmuls with scales of rows, besides 8.9."""
MX_MAJOR = 10
"""The major compute capability for which cuBLAS multiplies with MX scales in the order that is written here."""
MX_CUDA = (12, 8)
"""The first CUDA that does."""

GROUPED_CAPABILITY = (9, 0)
"""The compute capability for which torch has grouped FP8 matmuls with scales of rows: later ones have MX scales."""
OWN_GROUPED: dict[tuple[GroupedProduct, int, int], int] = {}
"""Minimum rows per expert for an own grouped matmul, by kind, N and K; other sizes use the library.

A shape belongs here once its kernel was measured to be 1.15 times as fast as the library on a GPU. None was measured.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The facts about one device on which its FP8 paths depend.

    Attributes:
        kind: Vendor, or "cpu".
        name: Name for people.
        capability: CUDA compute capability of an NVIDIA device, e.g. (9, 0).
        arch: LLVM target of an AMD device, e.g. "gfx942".
        cuda: The CUDA version that the torch which found it was built with, e.g. (12, 9); None if it was not torch.
    """

    kind: Kind
    name: str
    capability: tuple[int, int] | None = None
    arch: str | None = None
    cuda: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """Short technical name: "sm_90", "gfx942" or the kind."""
        if self.capability is not None:
            return f"sm_{self.capability[0]}{self.capability[1]}"
        return self.arch or self.kind


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PathStatus:
    """Status of one FP8 operation on a device, with a reason.

    Attributes:
        name: The operation: "cast", "all-gather" or a granularity of matmuls.
        status: "native": FP8 hardware or kernels; "reference": plain framework operations, equal bit for bit;
            "emulated": FP8 numbers, multiplied in a wider format; "unavailable": raises an error.
        why: One sentence.
    """

    name: str
    status: Status
    why: str


GATHER = PathStatus(
    name="all-gather",
    status="native",
    why="FP8 data travels as uint8, which every backend carries (gloo refuses float8, NCCL does below sm_90).",
)
"""How FP8 data crosses between processes: the same everywhere."""


def native_formats(device: Device) -> tuple[str, ...]:
    """Return short names of formats that the device multiplies natively."""
    if device.kind == "nvidia" and device.capability is not None and device.capability >= (8, 9):
        return OCP
    if device.kind == "amd" and device.arch is not None:
        if device.arch == "gfx942":
            return FNUZ
        if device.arch == "gfx950" or device.arch.startswith("gfx12"):
            return OCP
    return ()


def has_kernels(fmt: str | Format, policy: ScalePolicy | None = None) -> bool:
    """Return whether kernels support a format and policy.

    The reference supports everything else.
    """
    form = fmt if isinstance(fmt, Format) else get_data_format(fmt)
    return form in KERNEL_FORMATS and (policy is None or policy.formula != "e8m0")


def multiplies_blocks(capability: tuple[int, int] | None, cuda: tuple[int, int] | None) -> bool:
    """Return whether torch multiplies with block scales on a GPU.

    Block scales are float32; torch is built with the CUDA version.
    """
    return capability == BLOCK_CAPABILITY and cuda is not None and cuda >= BLOCK_CUDA


def multiplies_rows(capability: tuple[int, int] | None, cuda: tuple[int, int] | None) -> RowsLibrary:
    """Return torch's library for row scales on a GPU.

    "" if torch does not support them.

    Sources: `_scaled_rowwise_rowwise` in torch's ScaledBlas.cpp and `dispatch_fp8_rowwise_kernel_on_sm` in
    RowwiseScaledMM.cu, as of torch 2.15; pytorch#155991 added 12.x in 2025. Read, not run, except on 9.0.
    """
    if capability is None or not (capability == KERNEL_CAPABILITY or capability[0] in ROWS_MAJORS):
        return ""
    return "cublas" if capability[0] == BLOCK_CAPABILITY[0] and (cuda is None or cuda >= ROWS_CUDA) else "cutlass"


def multiplies_mx(capability: tuple[int, int] | None, cuda: tuple[int, int] | None) -> bool:
    """Return whether torch multiplies with MX scales on a GPU.

    torch is built with the CUDA version.
    """
    # not 12.0: its tensor cores take other layouts, for which nothing here was written
    return capability is not None and capability[0] == MX_MAJOR and cuda is not None and cuda >= MX_CUDA


def own_grouped(choice: GroupedMatmuls, product: GroupedProduct, rows_per_expert: int, n: int, k: int) -> bool:
    """Return whether an own grouped kernel replaces the library's.

    Args:
        choice: "own", "library", or "table" for `OWN_GROUPED`.
        product: "rows" for [rows, k] by [groups, n, k]; "over rows" for the [n, k] of each group.
        rows_per_expert: On average.
        n: Columns of the result, or rows of each.
        k: The contracted dimension, or columns of each result.
    """
    if choice != "table":
        return choice == "own"
    least = OWN_GROUPED.get((product, n, k))
    return least is not None and rows_per_expert >= least


def grouped_path(device: Device) -> PathStatus:
    """Return the path of torch's grouped matmuls, for experts."""
    name, label, capability = "groups of rows", device.label, device.capability
    if device.kind != "nvidia" or capability is None or capability < (8, 0):
        return PathStatus(name=name, status="emulated", why=f"{label}: one group after the other.")
    if capability != GROUPED_CAPABILITY:
        why = f"{label}: codes are decoded and multiplied by torch.nn.functional.grouped_mm."
        return PathStatus(name=name, status="emulated", why=why)
    table = f"own kernels multiply {len(OWN_GROUPED)} shapes, the library all others"
    if not OWN_GROUPED:
        table = "no own kernel was measured to be 1.15 times as fast, so the library multiplies all shapes"
    return PathStatus(name=name, status="native", why=f'{label}: {table}; GemmConfig(grouped="own") takes own kernels.')


def matmul_path(device: Device, granularity: Granularity) -> PathStatus:
    """Return how the device multiplies operands of one granularity."""
    formats, native = " and ".join(native_formats(device)), False
    if not formats:
        why = f": {_no_units(device)}"
    elif device.kind == "amd":
        # The backends multiply natively only on NVIDIA GPUs, even if another device has units for it.
        why = f" multiplies {formats}; this version was never run there and emulates"
    else:
        native, support = _scale_support(device, granularity)
        why = f" multiplies {formats}; {support}" if native else f": {support}"
    return PathStatus(name=granularity, status="native" if native else "emulated", why=f"{device.label}{why}.")


def cast_path(device: Device, *, backend: Backend, triton: str | None) -> PathStatus:
    """Return how values are cast to FP8 on the device.

    Args:
        device: Where the values are.
        backend: The user's choice; see `fp8_common._env.backend`.
        triton: Version of the installed Triton, or None.
    """
    if backend == "reference":
        return PathStatus(name="cast", status="reference", why=f"{BACKEND_VARIABLE}=reference asks for it.")
    # For every backend except "reference": "auto" falls back with the reason, "triton" raises with it.
    obstacle = _triton_obstacle(device, triton)
    if obstacle is None:
        return PathStatus(name="cast", status="native", why=f"Triton {triton} kernels run on {device.label}.")
    if backend == "triton":
        return PathStatus(name="cast", status="unavailable", why=f"{BACKEND_VARIABLE}=triton, but {obstacle}.")
    return PathStatus(name="cast", status="reference", why=f"{obstacle[0].upper()}{obstacle[1:]}.")


def _no_units(device: Device) -> str:
    needs = {
        "nvidia": "FP8 tensor cores begin with sm_89",
        "amd": "FP8 matrix cores begin with gfx942",
        "tpu": "which TPUs multiply FP8 is left to XLA",
    }
    reason = needs.get(device.kind, "it has no FP8 units")
    return f"{reason}; codes are decoded and multiplied in a wider format"


def _scale_support(device: Device, granularity: Granularity) -> tuple[bool, str]:
    """Return whether matmuls apply scales of this granularity, and why."""
    if granularity == "tensorwise":
        return True, "the product applies the scales"
    if granularity == "rowwise":
        if multiplies_rows(device.capability, device.cuda):
            return True, "the product applies the scales"
        return False, "torch multiplies with scales of rows on sm_89 and from sm_90 to sm_12x"
    if granularity == "mx":
        if multiplies_mx(device.capability, device.cuda):
            return True, "cuBLAS applies MX scales; this version was never run there"
        return False, "MX scales need sm_100 and torch with CUDA 12.8 or newer"
    # The remaining granularities have float32 block scales.
    built = "another framework than torch" if device.cuda is None else f"CUDA {device.cuda[0]}.{device.cuda[1]}"
    if multiplies_blocks(device.capability, device.cuda):
        return True, f"cuBLAS of {built} applies float32 block scales where 512 divides the contracted size"
    if device.capability == BLOCK_CAPABILITY:
        return False, f"cuBLAS applies float32 block scales from torch with CUDA 12.9 on, and this is {built}"
    return False, "cuBLAS applies float32 block scales on sm_90 alone"


def _triton_obstacle(device: Device, triton: str | None) -> str | None:
    """Return the obstacle for Triton kernels, None without one."""
    # AMD too: the kernels were never compiled for its targets or compared there, and the backends raise.
    if device.kind != "nvidia":
        return f"Triton kernels need an NVIDIA GPU, and this is {device.label}"
    if triton is None:
        return "Triton is not installed"
    if not native_formats(device):
        return f"this device, {device.label}, has no FP8 conversion instructions"
    return None

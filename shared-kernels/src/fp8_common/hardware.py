"""FP8 paths of a device, as functions of its facts.

Nothing here inspects the machine; `fp8_common._machine` gathers the facts. Sources: NVIDIA's cuBLASLt documentation
(FP8 matmuls and their scale modes by compute capability), the arguments that `torch._scaled_mm` accepts, and AMD's
CDNA3 and CDNA4 instruction set guides.
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

# gfx942 multiplies the FNUZ formats, all other devices with FP8 units the OCP formats.
OCP = ("e4m3", "e5m2")
FNUZ = ("e4m3fnuz", "e5m2fnuz")

ALIGNMENT = 16
"""Divides the addresses, in bytes, that vector instructions access, and the contracted and output dimensions of FP8
matmuls.
"""
KERNEL_CAPABILITY = (8, 9)
"""First CUDA compute capability with FP8 conversion instructions, which the kernels use."""
KERNEL_FORMATS = (E4M3, E5M2)
"""Formats that kernels write."""

BLOCK_CAPABILITY = (9, 0)
"""Only compute capability for which cuBLAS applies float32 block scales; later ones have MX scales."""
BLOCK_CUDA = (12, 9)
"""First CUDA version whose cuBLAS applies float32 block scales."""
ROWS_CUDA = (12, 9)
"""First CUDA version whose cuBLAS applies row scales on Hopper. CUTLASS applies them otherwise."""
ROWS_MAJORS = (9, 10, 11, 12)
"""Major compute capabilities, in addition to 8.9, for which torch has matmuls with row scales."""
MX_MAJOR = 10
"""Major compute capability whose order of MX scales in cuBLAS is supported here."""
MX_CUDA = (12, 8)
"""First CUDA version whose cuBLAS applies MX scales."""

GROUPED_CAPABILITY = (9, 0)
"""Compute capability for which torch has grouped FP8 matmuls with row scales; later ones have MX scales."""
OWN_GROUPED: dict[tuple[GroupedProduct, int, int], int] = {}
"""Minimum rows per expert for this package's grouped kernels, by kind, N and K. Other shapes use the library.

Add a shape once its kernel was measured to be 1.15 times as fast as the library on a GPU. None was measured so far.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Facts about one device that determine its FP8 paths.

    Attributes:
        kind: Vendor, or "cpu".
        name: Product name.
        capability: CUDA compute capability of an NVIDIA device, e.g. (9, 0).
        arch: LLVM target of an AMD device, e.g. "gfx942".
        cuda: CUDA version of the torch build that listed the device, e.g. (12, 9); None if torch did not list it.
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
        name: Operation: "cast", "all-gather", or the granularity of a matmul.
        status: "native" (FP8 hardware or kernels), "reference" (framework operations, equal bit for bit), "emulated"
            (FP8 values, multiplied in a wider format) or "unavailable" (raises an error).
        why: Reason, one sentence.
    """

    name: str
    status: Status
    why: str


GATHER = PathStatus(
    name="all-gather",
    status="native",
    why="FP8 codes are sent as uint8, which every backend supports (gloo rejects float8, as does NCCL below sm_90).",
)
"""Status of FP8 communication between processes, the same on every device."""


def native_formats(device: Device) -> tuple[str, ...]:
    """Return the short names of formats that the device multiplies natively."""
    if device.kind == "nvidia" and device.capability is not None and device.capability >= (8, 9):
        return OCP
    if device.kind == "amd" and device.arch is not None:
        if device.arch == "gfx942":
            return FNUZ
        if device.arch == "gfx950" or device.arch.startswith("gfx12"):
            return OCP
    return ()


def has_kernels(fmt: str | Format, policy: ScalePolicy | None = None) -> bool:
    """Return whether kernels support a data format and a policy.

    The MX kernel is not included: policies with the formula "e8m0" give False.
    """
    form = fmt if isinstance(fmt, Format) else get_data_format(fmt)
    return form in KERNEL_FORMATS and (policy is None or policy.formula != "e8m0")


def multiplies_blocks(capability: tuple[int, int] | None, cuda: tuple[int, int] | None) -> bool:
    """Return whether torch applies float32 block scales on a GPU.

    Args:
        capability: Compute capability of the GPU.
        cuda: CUDA version of the torch build.
    """
    return capability == BLOCK_CAPABILITY and cuda is not None and cuda >= BLOCK_CUDA


def multiplies_rows(capability: tuple[int, int] | None, cuda: tuple[int, int] | None) -> RowsLibrary:
    """Return the library by which torch applies row scales on a GPU.

    The result is "" if torch does not support row scales there. Sources: `_scaled_rowwise_rowwise` in torch's
    ScaledBlas.cpp and `dispatch_fp8_rowwise_kernel_on_sm` in RowwiseScaledMM.cu, as of torch 2.15; pytorch#155991 added
    12.x in 2025. Only 9.0 was run; the others are from the source.

    Args:
        capability: Compute capability of the GPU.
        cuda: CUDA version of the torch build; None counts as new enough.
    """
    if capability is None or not (capability == KERNEL_CAPABILITY or capability[0] in ROWS_MAJORS):
        return ""
    return "cublas" if capability[0] == BLOCK_CAPABILITY[0] and (cuda is None or cuda >= ROWS_CUDA) else "cutlass"


def multiplies_mx(capability: tuple[int, int] | None, cuda: tuple[int, int] | None) -> bool:
    """Return whether torch applies MX scales on a GPU.

    Args:
        capability: Compute capability of the GPU.
        cuda: CUDA version of the torch build.
    """
    # 12.0 is excluded: its tensor cores need other layouts, which are not implemented here.
    return capability is not None and capability[0] == MX_MAJOR and cuda is not None and cuda >= MX_CUDA


def own_grouped(choice: GroupedMatmuls, product: GroupedProduct, rows_per_expert: int, n: int, k: int) -> bool:
    """Return whether this package's grouped kernel replaces the library's.

    Args:
        choice: "own", "library", or "table" to decide by `OWN_GROUPED`.
        product: "rows" for [rows, k] by [groups, n, k]; "over rows" for results [groups, n, k], contracted over rows.
        rows_per_expert: Average number of rows per expert.
        n: Columns of the result for "rows"; rows of each result for "over rows".
        k: Contracted dimension for "rows"; columns of each result for "over rows".
    """
    if choice != "table":
        return choice == "own"
    least = OWN_GROUPED.get((product, n, k))
    return least is not None and rows_per_expert >= least


def grouped_path(device: Device) -> PathStatus:
    """Return the status of grouped matmuls, for experts."""
    name, label, capability = "groups of rows", device.label, device.capability
    if device.kind != "nvidia" or capability is None or capability < (8, 0):
        return PathStatus(name=name, status="emulated", why=f"{label}: one group after the other.")
    if capability != GROUPED_CAPABILITY:
        why = f"{label}: codes are decoded and multiplied by torch.nn.functional.grouped_mm."
        return PathStatus(name=name, status="emulated", why=why)
    table = f"own kernels multiply {len(OWN_GROUPED)} shapes, the library all others"
    if not OWN_GROUPED:
        table = "no own kernel was measured to be 1.15 times as fast, so the library multiplies all shapes"
    why = f'{label}: {table}; GemmConfig(grouped="own") selects own kernels.'
    return PathStatus(name=name, status="native", why=why)


def matmul_path(device: Device, granularity: Granularity) -> PathStatus:
    """Return the status of matmuls of one granularity on a device."""
    formats, native = " and ".join(native_formats(device)), False
    if not formats:
        why = f": {_no_units(device)}"
    elif device.kind == "amd":
        # The plugins use native matmuls on NVIDIA GPUs only, even if another device has FP8 units.
        why = f" multiplies {formats}; this version was never run there and emulates"
    else:
        native, support = _scale_support(device, granularity)
        why = f" multiplies {formats}; {support}" if native else f": {support}"
    return PathStatus(name=granularity, status="native" if native else "emulated", why=f"{device.label}{why}.")


def cast_path(device: Device, *, backend: Backend, triton: str | None) -> PathStatus:
    """Return the status of casts to FP8 on a device.

    Args:
        device: Device of the values.
        backend: Requested implementation; see `fp8_common._env.backend`.
        triton: Version of the installed Triton, or None.
    """
    if backend == "reference":
        return PathStatus(name="cast", status="reference", why=f"{BACKEND_VARIABLE}=reference is set.")
    # With an obstacle, "auto" falls back to the reference and "triton" raises.
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
        return True, "the matmul applies the scales"
    if granularity == "rowwise":
        if multiplies_rows(device.capability, device.cuda):
            return True, "the matmul applies the scales"
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
    """Return the reason why Triton kernels cannot run, or None."""
    # This excludes AMD GPUs: the kernels were never compiled for them or compared there, and the plugins raise.
    if device.kind != "nvidia":
        return f"Triton kernels need an NVIDIA GPU, and this is {device.label}"
    if triton is None:
        return "Triton is not installed"
    if not native_formats(device):
        return f"this device, {device.label}, has no FP8 conversion instructions"
    return None

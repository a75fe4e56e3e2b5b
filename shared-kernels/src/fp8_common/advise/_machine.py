"""`Accelerator` and `Links`: the rates of devices and networks that an estimate takes; presets and their sources."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """The rates of one device. What matmuls reach is an assumption, not a specification: measure yours.

    Attributes:
        bf16: FLOP/s that large bf16 matmuls reach.
        fp8: FLOP/s that large FP8 matmuls with one scale for each operand reach.
        attention: FLOP/s that fused attention in bf16 reaches, forward and backward together.
        bandwidth: Bytes per second that large elementwise kernels reach.
        source: Where the numbers come from.
    """

    bf16: float
    fp8: float
    attention: float
    bandwidth: float
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The network of one device, in each direction.

    Attributes:
        node: Devices of a node.
        inside: Bytes per second and device between devices of a node.
        between: Bytes per second and device between nodes.
        latency: Seconds that a collective takes for each doubling of the number of ranks.
    """

    node: int
    inside: float
    between: float
    latency: float


ACCELERATORS = {
    "h100": Accelerator(
        bf16=0.70 * 989e12,
        fp8=0.65 * 1979e12,
        attention=0.45 * 989e12,
        bandwidth=0.90 * 3.35e12,
        source="NVIDIA's H100 SXM data sheet (dense), times assumed shares: 70 % bf16, 65 % FP8, 45 % attention, 90 %",
    ),
    "h100-500w": Accelerator(
        bf16=5 / 7 * 0.70 * 989e12,
        fp8=5 / 7 * 0.65 * 1979e12,
        attention=5 / 7 * 0.45 * 989e12,
        bandwidth=0.90 * 2.4e12,
        source="the H100 of torchtitan's published runs, 96 GB of HBM2e at 2.4 TB/s, limited to 500 of 700 W: "
        "the rates of h100 times that share of power, an assumption",
    ),
    "h200": Accelerator(
        bf16=0.70 * 989e12,
        fp8=0.65 * 1979e12,
        attention=0.45 * 989e12,
        bandwidth=0.90 * 4.8e12,
        source="NVIDIA's H200 SXM data sheet (dense), times the shares of h100",
    ),
    "b200": Accelerator(
        bf16=0.70 * 2250e12,
        fp8=0.65 * 4500e12,
        attention=0.45 * 2250e12,
        bandwidth=0.90 * 8.0e12,
        source="NVIDIA's HGX B200 data sheet (dense), times the shares of h100",
    ),
}
"""Devices by name."""

LINKS = {
    "infiniband-400": Links(node=8, inside=0.8 * 450e9, between=0.8 * 50e9, latency=10e-6),
    "ethernet-100": Links(node=8, inside=0.8 * 450e9, between=0.8 * 12.5e9, latency=20e-6),
    "efa-3200": Links(node=8, inside=0.8 * 450e9, between=0.7 * 50e9, latency=20e-6),
    "pcie-100": Links(node=8, inside=0.8 * 32e9, between=0.8 * 12.5e9 / 8, latency=20e-6),
}
"""Networks by name: what one device sees of NVLink 4 or PCIe 4 inside a node, and of its share of the network cards
between nodes. Rates are specifications times 0.8 (0.7 for EFA); shares and latencies are assumptions."""

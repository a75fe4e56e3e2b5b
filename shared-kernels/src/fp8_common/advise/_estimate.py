"""The model of a training step: bytes on links, products, casts, what communication is not hidden, memory.

It is a model. Its assumptions are the fields of `Choice`, `Accelerator` and `Links` and the sentences below:

- FSDP gathers each block before its forward and again before its backward, and reduces its gradients after it;
  embedding and head are gathered once, in bf16; their gradients travel like the others.
- With secondary shards the first gather of a block in an optimizer step crosses nodes, later ones stay inside a node.
- A collective over all ranks moves (N - 1) / N of its bytes over each device's link inside a node and, from two nodes
  on, (M - 1) / M of them divided over the devices of a node between nodes; it takes the longer of both and the latency.
- A block's gather runs beside the matmuls of the block before it, a reduction beside those of the block after it; what
  takes longer than the matmuls is exposed, as are the first gathers of forward and backward and the last reduction.
- Casts and elementwise operations move bytes at the device's bandwidth, matmuls run at the rates given; nothing else
  takes time. AdamW reads and writes 28 bytes per parameter, divided over the ranks.
"""

import dataclasses
import math

from fp8_common._errors import Fp8Error
from fp8_common.advise._choices import BF16_BYTES, CHOICES, Choice
from fp8_common.advise._machine import Accelerator, Links
from fp8_common.advise._shape import ModelShape

OPTIMIZER_BYTES = 28
STATE_BYTES = 16
"""Bytes of a parameter's float32 weight, gradient and two moments."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is trained where.

    Attributes:
        shape: The model.
        ranks: Devices, over all of which the model is sharded.
        tokens: Tokens of one micro-batch on one device.
        sequence: Length of a sequence, for attention.
        micro_batches: Micro-batches of an optimizer step; each gathers anew, gradients are reduced once.
        recompute: Share of the forward's matmuls that the backward computes again (activation checkpointing).
        accelerator: The device.
        links: The network.
        measured: Tokens per second and device that bf16 reaches on this job, if known. The time that the model does not
            explain is then added to every configuration: FP8 does not change what it comes from.
    """

    shape: ModelShape
    ranks: int
    tokens: int
    sequence: int
    micro_batches: int
    recompute: float
    accelerator: Accelerator
    links: Links
    measured: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no job is."""
        for name in ("ranks", "tokens", "sequence", "micro_batches"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise Fp8Error(f"{name} must be a positive whole number, got {getattr(self, name)!r}.")
        if self.ranks > self.links.node and self.ranks % self.links.node:
            raise Fp8Error(f"{self.ranks} ranks do not fill nodes of {self.links.node}.")
        if not 0 <= self.recompute <= 1:
            raise Fp8Error(f"recompute must be a share from 0 to 1, got {self.recompute!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What one configuration costs; times in seconds for one optimizer step, bytes of one device.

    Attributes:
        choice: The configuration.
        gather_bytes: Received in all-gathers.
        reduce_bytes: Received to reduce gradients.
        between_bytes: Of both, what crosses nodes, divided over the devices of a node.
        products: Seconds of matmuls and attention.
        casts: Seconds of casts.
        other: Seconds of elementwise operations and the optimizer.
        exposed: Seconds of communication that nothing hides.
        unexplained: Seconds by which a measured step in bf16 was longer than the model's.
        state_memory: Bytes of weights, gradients, optimizer state and secondary shards, without activations.
        gathered_memory: Bytes of two gathered blocks, as they travel.
    """

    choice: Choice
    gather_bytes: float
    reduce_bytes: float
    between_bytes: float
    products: float
    casts: float
    other: float
    exposed: float
    unexplained: float
    state_memory: float
    gathered_memory: float

    @property
    def seconds(self) -> float:
        """Seconds of one optimizer step."""
        return self.products + self.casts + self.other + self.exposed + self.unexplained


def estimate(job: Job, choice: Choice) -> Estimate:
    """Return the estimate of one configuration.

    Raises:
        Fp8Error: bf16 was measured to be faster than the model says.
    """
    return dataclasses.replace(_modelled(job, choice), unexplained=_unexplained(job))


def _unexplained(job: Job) -> float:
    if job.measured is None:
        return 0.0
    step, modelled = job.micro_batches * job.tokens / job.measured, _modelled(job, CHOICES[0]).seconds
    if step < modelled:
        fastest = job.micro_batches * job.tokens / modelled
        raise Fp8Error(
            f"{job.measured:g} tokens per second in bf16 are more than the {fastest:.0f} that the model allows. "
            "Its rates are too low for this machine: give an Accelerator with those you measured."
        )
    return step - modelled


def _modelled(job: Job, choice: Choice) -> Estimate:
    forward, backward = _products(job, choice)
    casts = job.shape.blocks * choice.cast_bytes * job.tokens * job.shape.width / job.accelerator.bandwidth
    elementwise = job.shape.blocks * BF16_BYTES * job.tokens * job.shape.width / job.accelerator.bandwidth
    exposed, gathers, reduces = _communication(job, choice, forward + (casts + elementwise) / 3, backward)
    optimizer = OPTIMIZER_BYTES * job.shape.parameters / job.ranks / job.accelerator.bandwidth
    kept = choice.secondary and _nodes(job) > 1
    # of the gathers of linear layers, two for each micro-batch, one crosses
    inside = (2 * job.micro_batches - 1) * choice.weight_bytes * job.shape.blocks * job.shape.block_weights * kept
    moved = gathers - inside + reduces
    return Estimate(
        choice=choice,
        gather_bytes=gathers * _others(job.ranks),
        reduce_bytes=reduces * _others(job.ranks),
        between_bytes=moved * _others(_nodes(job)) / job.links.node,
        products=job.micro_batches * (forward + backward),
        casts=job.micro_batches * casts,
        other=job.micro_batches * elementwise + optimizer,
        exposed=exposed,
        unexplained=0.0,
        state_memory=STATE_BYTES * job.shape.parameters / job.ranks
        + kept * choice.weight_bytes * job.shape.blocks * job.shape.block_weights / job.links.node,
        gathered_memory=2 * choice.weight_bytes * job.shape.block_weights,
    )


def _products(job: Job, choice: Choice) -> tuple[float, float]:
    """Return the seconds of matmuls in the forward and in the backward of one micro-batch."""
    rate = (job.accelerator.bf16 if choice.products == "bf16" else job.accelerator.fp8) * choice.rate
    linear = 2 * job.shape.blocks * job.shape.active_weights * job.tokens / rate
    head = 2 * job.shape.vocabulary * job.shape.width * job.tokens / job.accelerator.bf16
    # causal: half of 4 * sequence * width for each token
    attention = 2 * job.shape.blocks * job.sequence * job.shape.width * job.tokens / job.accelerator.attention
    return linear + head + attention, (2 + job.recompute) * linear + 2 * head + 2.5 * attention


def _communication(job: Job, choice: Choice, forward: float, backward: float) -> tuple[float, float, float]:
    """Return exposed seconds, and the bytes of whole gathers and reductions, of one optimizer step."""
    block, other = job.shape.block_weights, job.shape.other_weights
    gather = _seconds(job, choice.weight_bytes * block)
    again = _seconds(job, choice.weight_bytes * block, within_node=choice.secondary)
    reduce = _seconds(job, choice.gradient_bytes * block)
    blocks = job.shape.blocks
    exposed = job.micro_batches * _seconds(job, 2.0 * other) if other else 0.0
    for micro in range(job.micro_batches):
        reduced = reduce if micro == job.micro_batches - 1 else 0.0
        first = again if micro else gather
        exposed += first + again + reduced
        exposed += (blocks - 1) * max(0.0, first - forward / blocks)
        exposed += (blocks - 1) * max(0.0, again + reduced - backward / blocks)
    exposed += _seconds(job, choice.gradient_bytes * other) if other else 0.0
    gathered = job.micro_batches * (2 * choice.weight_bytes * blocks * block + 2.0 * other)
    return exposed, gathered, choice.gradient_bytes * (blocks * block + other)


def _seconds(job: Job, nbytes: float, *, within_node: bool = False) -> float:
    """Return how long a collective of `nbytes`, all ranks' parts together, takes."""
    if within_node and _nodes(job) > 1:
        job = dataclasses.replace(job, ranks=job.links.node)
    if job.ranks == 1:
        return 0.0
    inside = nbytes * _others(min(job.ranks, job.links.node)) / job.links.inside
    between = nbytes * _others(_nodes(job)) / job.links.node / job.links.between
    return max(inside, between) + job.links.latency * math.log2(job.ranks)


def _nodes(job: Job) -> int:
    return max(1, job.ranks // job.links.node)


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks

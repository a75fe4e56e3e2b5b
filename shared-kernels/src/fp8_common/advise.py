"""Model of an FSDP training step in seven configurations.

All times are modelled, not measured. The assumptions are:

- FSDP gathers each block before its forward and again before its backward, and reduces its gradients after the
  backward.
- The gather of a block overlaps with the matmuls of the previous block, and a reduction with those of the next block.
  The excess of communication over matmuls is exposed, and so are the first gathers of forward and backward, and the
  last reduction.
- A collective over N ranks moves (N - 1) / N of its bytes over each device's link inside a node and, from two nodes on,
  its share between nodes.
- Casts and elementwise operations are bound by the device's bandwidth.
- AdamW reads and writes 28 bytes per parameter, divided over the ranks.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fp8_common._models import CONFIGS, SHORT
from fp8_common.errors import Fp8Error

WORTH, SAME, SEQUENCE = 1.05, 0.02, 8192
"""Least speed-up for which FP8 is recommended; relative difference of times for which the simpler configuration is
recommended; default length of a sequence in tokens."""
OPTIMIZER_BYTES, STATE_BYTES = 28, 16
"""Bytes per parameter that AdamW moves, and bytes of the float32 weight, gradient and two moments."""


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """Rates of one device.

    The rates of `ACCELERATORS` are assumed shares of the data sheet, see `of_data_sheet`.

    Attributes:
        bf16: FLOP/s of large bf16 matmuls.
        fp8: FLOP/s of large FP8 matmuls with one scale for each operand; 0 without FP8 units.
        attention: FLOP/s of fused attention in bf16.
        bandwidth: Bytes per second of elementwise kernels.
        memory: Bytes of memory.
    """

    bf16: float
    fp8: float
    attention: float
    bandwidth: float
    memory: float = math.inf

    @classmethod
    def of_data_sheet(cls, bf16: float, fp8: float, bandwidth: float, memory: float) -> Self:
        """Return a device that reaches assumed shares of its data sheet.

        bf16 matmuls reach 70 % of the rate, FP8 matmuls 65 %, attention 45 % of the bf16 rate, and elementwise kernels
        90 % of the bandwidth.

        Args:
            bf16: Dense FLOP/s in bf16.
            fp8: Dense FLOP/s in FP8; 0 without FP8 units.
            bandwidth: Bytes per second of the memory.
            memory: Bytes of memory.
        """
        return cls(0.70 * bf16, 0.65 * fp8, 0.45 * bf16, 0.90 * bandwidth, memory)


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """Network of one device, in each direction.

    `LINKS` has 80 % of the specified rates; latencies are assumptions.

    Attributes:
        inside: Bytes per second and device inside a node of eight.
        between: Bytes per second and device between nodes.
        latency: Seconds per collective for each doubling of the number of ranks.
    """

    inside: float
    between: float
    latency: float


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One configuration of a training step.

    Attributes:
        name: Name in tables.
        rate: Share of the device's FP8 rate that matmuls reach; None for bf16 matmuls.
        cast_bytes: Bytes that a Llama block moves in addition to bf16, per token and unit of width.
        weight_bytes: Bytes per gathered element.
        gradient_bytes: Bytes per element of a reduced gradient.
        before: Python line to run before `fully_shard`.
        after: Python line to run after `fully_shard`.
    """

    name: str
    rate: float | None = None
    cast_bytes: float = 0.0
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    before: str = ""
    after: str = ""


ACCELERATORS = {
    "a100": Accelerator.of_data_sheet(312e12, 0.0, 2.04e12, 80e9),
    "h100": Accelerator.of_data_sheet(989e12, 1979e12, 3.35e12, 80e9),
    "h200": Accelerator.of_data_sheet(989e12, 1979e12, 4.8e12, 141e9),
    "b200": Accelerator.of_data_sheet(2250e12, 4500e12, 8.0e12, 180e9),
}
LINKS = {
    "infiniband-400": Links(0.8 * 450e9, 0.8 * 50e9, 10e-6),
    "ethernet-100": Links(0.8 * 450e9, 0.8 * 12.5e9, 20e-6),
    "pcie-100": Links(0.8 * 32e9, 0.8 * 12.5e9 / 8, 20e-6),
}
NODE = 8
_RANKS = (1, 2, 4, *(NODE << n for n in range(12)))

# Counted bytes that a compiled Llama block of width 4096 moves outside of matmuls for 8192 tokens: bf16 4.41e9,
# tensorwise 9.93e9, delayed 10.79e9, row-wise 9.89e9. Row-wise matmuls are assumed to reach 85 % of the tensorwise
# rate.
ELEMENTS = 4096 * 8192
BF16_BYTES = 4.41e9 / ELEMENTS
FP8_GRADIENT = 1 + 4 / 128
_CONVERT = 'fp8_torch_fsdp.convert_to_float8_training(model, recipe="{}")'
_TENSORWISE, _DELAYED, _ROWWISE = (_CONVERT.format(name) for name in ("tensorwise", "tensorwise_delayed", "rowwise"))
_COMPRESS = "fp8_torch_fsdp.compress_communication(model)"
_REDUCE = "fp8_torch_fsdp.compress_communication(model, gradients=True)"
_BF16 = "# in fully_shard: mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)"
CHOICES = (
    Choice("bf16"),
    Choice("bf16, bf16 reduce-scatter", gradient_bytes=2.0, before=_BF16),
    Choice("bf16 matmuls, FP8 all-gather", None, 0.0, 1.0, after=_COMPRESS),
    Choice("tensorwise, FP8 all-gather", 1.0, 5.52e9 / ELEMENTS, 1.0, before=_TENSORWISE),
    Choice("tensorwise_delayed, FP8 all-gather", 1.0, 6.38e9 / ELEMENTS, 1.0, before=_DELAYED),
    Choice("rowwise, FP8 all-gather", 0.85, 5.48e9 / ELEMENTS, 1.0, before=_ROWWISE),
    Choice(
        "tensorwise, FP8 all-gather and reduce-scatter", 1.0, 5.52e9 / ELEMENTS, 1.0, FP8_GRADIENT, _TENSORWISE, _REDUCE
    ),
)
"""Configurations, beginning with the simplest; speed-ups are relative to the first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A stack of equal transformer blocks between embedding and head.

    Attributes:
        blocks: Number of blocks.
        width: Width of the hidden states.
        weights: Elements of the linear layers of one block, all experts included.
        active: Elements of one block that a token is multiplied with.
        vocabulary: Rows of embedding and head together; 0 leaves them out.
        rows_per_expert: Rows of an expert per token of a micro-batch: experts per token / experts; 0 without experts.
    """

    blocks: int
    width: int
    weights: int
    active: int
    vocabulary: int = 0
    rows_per_expert: float = 0.0

    @property
    def parameters(self) -> int:
        """Number of elements of blocks, embedding and head, without norms and biases."""
        return self.blocks * self.weights + self.vocabulary * self.width

    @classmethod
    def from_config(cls, path: Path) -> Self:
        """Read the shape of a decoder from its `config.json`.

        The decoder has multi-head or grouped-query attention and gated linear units, with or without experts.

        Raises:
            Fp8Error: If the file cannot be read, lacks a size, or has latent attention.
        """
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise Fp8Error(f"{str(path)!r} cannot be read as a model's configuration: {error}.") from error
        if not isinstance(config, dict):
            raise Fp8Error(f"{str(path)!r} must hold a JSON object, got {type(config).__name__}.")
        return cls.of_fields(config.get("text_config", config), str(path))

    @classmethod
    def of_fields(cls, config: Mapping[str, Any], where: str) -> Self:
        """Return the shape for the fields of a `config.json`.

        Args:
            config: Fields of the configuration.
            where: Name of the configuration in errors.

        Raises:
            Fp8Error: If a field is missing, or the model has latent attention.
        """
        experts = next(
            (config[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(name)), 0
        )
        gated = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
        needed = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", gated]
        needed += ["num_experts_per_tok"] if experts else []
        if missing := [name for name in needed if not config.get(name)]:
            raise Fp8Error(f"{where} has no {', '.join(missing)}. Pass advise() a custom ModelShape in Python.")
        if config.get("kv_lora_rank"):
            raise Fp8Error(f"{where} has latent attention. Pass advise() a custom ModelShape in Python.")
        width, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or width // heads
        attention = 2 * width * head * (heads + (config.get("num_key_value_heads") or heads))
        expert = 3 * width * config[gated]
        shared = expert * (config.get("n_shared_experts") or 0)
        shared += 3 * width * (config.get("shared_expert_intermediate_size") or 0)
        return cls(
            blocks=config["num_hidden_layers"],
            width=width,
            weights=attention + (experts * expert + shared if experts else expert),
            active=attention + (config["num_experts_per_tok"] * expert + shared if experts else expert),
            vocabulary=config["vocab_size"] * (1 if config.get("tie_word_embeddings") else 2),
            rows_per_expert=config["num_experts_per_tok"] / experts if experts else 0.0,
        )


SHAPES = {name: ModelShape.of_fields(config, name) for name, config in CONFIGS.items()}
SHAPES |= {short: SHAPES[name] for short, name in SHORT.items()}
"""Models by their name on the Hugging Face hub, and some by a short name."""


def shape_of(model: str) -> ModelShape:
    """Return the shape of a model given by name or path.

    Args:
        model: Name in `SHAPES`, with or without its owner and in any case; or a JSON file, or a folder with a
            `config.json`.

    Raises:
        Fp8Error: If the name is unknown, or `ModelShape.from_config` rejects the file.
    """
    names = {name.lower(): name for name in SHAPES}
    names |= {name.lower().rpartition("/")[2]: name for name in SHAPES}
    if known := names.get(model.lower()):
        return SHAPES[known]
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.exists() or path.suffix == ".json":
        return ModelShape.from_config(path)
    near = [names[name] for name in difflib.get_close_matches(model.lower(), names, 3)]
    raise Fp8Error(
        f"{model!r} is no file and no known model. {'Similar names' if near else 'Known models'}: "
        f"{', '.join(dict.fromkeys(near)) or ', '.join(SHAPES)}. For any other decoder, pass its config.json."
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job: model, devices and batch.

    Attributes:
        shape: Shape of the model.
        ranks: Number of devices, over all of which the model is sharded; above 8, a multiple of 8 (full nodes).
        tokens: Tokens of one micro-batch on one device.
        sequence: Length of a sequence, for attention.
        micro_batches: Micro-batches per optimizer step. Each gathers weights again; gradients are reduced once.
        recompute: Share of the forward's matmuls that the backward computes again (activation checkpointing).
        accelerator: Rates of the device.
        links: Rates of the network.
        measured: Measured tokens per second and device of this job in bf16, if known. The time that the model does not
            explain is then added to each configuration, because FP8 does not change its causes.
    """

    shape: ModelShape
    ranks: int = 8
    tokens: int = 8192
    sequence: int = SEQUENCE
    micro_batches: int = 1
    recompute: float = 0.0
    accelerator: Accelerator = ACCELERATORS["h100"]
    links: Links = LINKS["infiniband-400"]
    measured: float | None = None

    def __post_init__(self) -> None:
        """Validate the job."""
        for name in ("ranks", "tokens", "sequence", "micro_batches"):
            if getattr(self, name) < 1:
                raise Fp8Error(f"{name} must be a positive whole number, got {getattr(self, name)!r}.")
        if self.ranks > NODE and self.ranks % NODE:
            raise Fp8Error(f"{self.ranks} ranks do not fill nodes of {NODE}.")
        if self.tokens < self.sequence:
            raise Fp8Error(
                f"A micro-batch of {self.tokens} tokens is less than one sequence of {self.sequence}. Shorten the "
                "sequence, or give each device a whole one."
            )
        if not 0 <= self.recompute <= 1:
            raise Fp8Error(f"recompute must be a share from 0 to 1, got {self.recompute!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Modelled seconds of one optimizer step in one configuration.

    Attributes:
        choice: Configuration.
        matmuls: Seconds of matmuls and attention.
        casts: Seconds of casts.
        other: Seconds of elementwise operations and the optimizer, and of a measured bf16 step in excess of its model.
        exposed: Seconds of communication that does not overlap with computation.
    """

    choice: Choice
    matmuls: float
    casts: float
    other: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Seconds of one optimizer step."""
        return self.matmuls + self.casts + self.other + self.exposed


def memory(job: Job) -> float:
    """Return the bytes that a device needs before activations.

    They hold the device's shard of weights, gradients and moments, and with several ranks two gathered blocks in bf16,
    or half of embedding and head if that is larger.
    """
    shape = job.shape
    gathered = 2.0 * max(2 * shape.weights, shape.vocabulary * shape.width // 2) if job.ranks > 1 else 0.0
    return STATE_BYTES * shape.parameters / job.ranks + gathered


def rows_that_repay(device: Accelerator) -> tuple[float, float]:
    """Return the numbers of rows from which FP8 repays a weight's cast.

    The two numbers are for casts that read the weight once and twice, which move 4 and 6 bytes per element. Per
    element, each row takes six FLOPs in the three matmuls of a layer, and FP8 saves the difference of their times.
    Casts of activations are not included; if ranks cast shards only, fewer rows suffice. Without FP8 units, both are
    infinite.
    """
    saved = 6 * (1 / device.bf16 - 1 / device.fp8) if device.fp8 else 0.0
    low, high = (bytes_ / device.bandwidth / saved if saved > 0 else math.inf for bytes_ in (4, 6))
    return low, high


def _about_experts(job: Job, best: Choice) -> str:
    """Return a warning if experts get too few rows, else ""."""
    rows, (low, high) = job.tokens * job.shape.rows_per_expert, rows_that_repay(job.accelerator)
    if best.rate is None or not 0 < rows < high:
        return ""
    return (
        f" An expert gets {rows:.0f} rows of a micro-batch; casts of its weight pay from some {low:.0f} to {high:.0f} "
        "rows on. Use more tokens per device, or also measure experts in bf16."
    )


def advise(job: Job) -> tuple[str, list[Estimate]]:
    """Recommend a configuration for a job.

    Returns:
        The recommendation in words, and the estimates of all `CHOICES` that the device supports.

    Raises:
        Fp8Error: If the model does not fit in memory, or the measured bf16 step is faster than its estimate.
    """
    needed, has = memory(job), job.accelerator.memory
    if needed > has:
        enough = next((n for n in _RANKS if memory(dataclasses.replace(job, ranks=n)) < 0.8 * has), None)
        raise Fp8Error(
            f"{job.shape.parameters / 1e9:.2f} billion parameters on {_devices(job.ranks)} need {needed / 1e9:.0f} GB "
            f"on each for float32 weights, gradients, AdamW and gathered weights, before any activation; it has "
            f"{has / 1e9:.0f}. {f'Take at least {enough} devices.' if enough else 'No number of devices is enough.'}"
        )
    estimates = [estimate(job, choice) for choice in CHOICES if choice.rate is None or job.accelerator.fp8]
    base, fastest = estimates[0], min(estimates, key=lambda each: each.seconds)
    best = next(each for each in estimates if each.seconds <= fastest.seconds * (1 + SAME))
    if base.seconds < WORTH * best.seconds:
        shares = (
            f"matmuls take {base.matmuls / base.seconds:.0%}, exposed communication {base.exposed / base.seconds:.0%}"
        )
        return f"Take bf16: nothing is {WORTH - 1:.0%} faster; of its step {shares}.", estimates
    # A job that already reduces gradients in bf16 gains less.
    bf16_reduced = estimates[1]
    ratio = bf16_reduced.seconds / best.seconds
    differs = best is not bf16_reduced and bf16_reduced.seconds < base.seconds
    also = f" ({ratio:.2f}x bf16 with gradients reduced in bf16)" if differs else ""
    advice = (
        f"Take {best.choice.name}: {base.seconds / best.seconds:.2f}x bf16{also}. Matmuls {1e3 * base.matmuls:.0f} -> "
        f"{1e3 * best.matmuls:.0f} ms, exposed communication {1e3 * base.exposed:.0f} -> {1e3 * best.exposed:.0f} ms, "
        f"casts {1e3 * best.casts:.0f} ms.{_about_experts(job, best.choice)}"
    )
    return advice, estimates


def estimate(job: Job, choice: Choice) -> Estimate:
    """Estimate the step of a job in one configuration.

    Raises:
        Fp8Error: If the measured bf16 step is faster than its estimate.
    """
    modelled_step = _modelled(job, choice)
    if job.measured is None:
        return modelled_step
    tokens = job.micro_batches * job.tokens
    modelled = _modelled(job, CHOICES[0]).seconds
    if tokens / job.measured < modelled:
        raise Fp8Error(
            f"{job.measured:g} tokens per second in bf16 are more than the {tokens / modelled:.0f} that the model "
            "allows. Its rates are too low for this machine: pass an Accelerator with the rates that you measured."
        )
    return dataclasses.replace(modelled_step, other=modelled_step.other + tokens / job.measured - modelled)


def _modelled(job: Job, choice: Choice) -> Estimate:
    shape, device = job.shape, job.accelerator
    rate = device.bf16 if choice.rate is None else choice.rate * device.fp8
    linear = 2 * shape.blocks * shape.active * job.tokens / rate
    head = shape.vocabulary * shape.width * job.tokens / device.bf16
    # causal: half of 4 * sequence * width for each token
    attention = 2 * shape.blocks * job.sequence * shape.width * job.tokens / device.attention
    forward, backward = linear + head + attention, (2 + job.recompute) * linear + 2 * head + 2.5 * attention
    seconds_per_byte = shape.blocks * job.tokens * shape.width / device.bandwidth
    casts, elementwise = choice.cast_bytes * seconds_per_byte, BF16_BYTES * seconds_per_byte
    optimizer = OPTIMIZER_BYTES * shape.parameters / job.ranks / device.bandwidth
    return Estimate(
        choice=choice,
        matmuls=job.micro_batches * (forward + backward),
        casts=job.micro_batches * casts,
        other=job.micro_batches * elementwise + optimizer,
        exposed=_exposed(job, choice, forward + (casts + elementwise) / 3, backward),
    )


def _exposed(job: Job, choice: Choice, forward: float, backward: float) -> float:
    """Return the seconds of communication that does not overlap."""
    blocks, outside = job.shape.blocks, job.shape.vocabulary * job.shape.width
    gather = _collective(job, choice.weight_bytes * job.shape.weights)
    reduce = _collective(job, choice.gradient_bytes * job.shape.weights)
    total = _collective(job, (2.0 * job.micro_batches + choice.gradient_bytes) * outside) if outside else 0.0
    for micro in range(job.micro_batches):
        reduced = reduce if micro == job.micro_batches - 1 else 0.0
        total += 2 * gather + reduced
        total += (blocks - 1) * max(0.0, gather - forward / blocks)
        total += (blocks - 1) * max(0.0, gather + reduced - backward / blocks)
    return total


def _collective(job: Job, nbytes: float) -> float:
    """Return the seconds of a collective; `nbytes` includes all ranks' parts."""
    if job.ranks == 1:
        return 0.0
    nodes, local = max(1, job.ranks // NODE), min(job.ranks, NODE)
    inside = nbytes * (local - 1) / local / job.links.inside
    between = nbytes * (nodes - 1) / nodes / NODE / job.links.between
    return max(inside, between) + job.links.latency * math.log2(job.ranks)


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def report(job: Job) -> str:
    """Return the recommendation, its Python lines, and a table of estimates."""
    advice, estimates = advise(job)
    best = next(option.choice for option in estimates if advice.startswith(f"Take {option.choice.name}:"))
    code = [line for line in (best.before, "fully_shard(model)  # and its blocks", best.after) if line]
    code = ["", *(f"    {line}" for line in code)] if len(code) > 1 else []
    lines = [f"{'configuration':<47}{'step':>10}{'speed-up':>10}{'exposed':>10}{'casts':>10}"]
    for option in estimates:
        times = "".join(f"{1e3 * seconds:>7.0f} ms" for seconds in (option.exposed, option.casts))
        speed_up = estimates[0].seconds / option.seconds
        lines.append(f"{option.choice.name:<47}{1e3 * option.seconds:>7.0f} ms{speed_up:>9.2f}x{times}")
    size = f"{job.shape.parameters / 1e9:.2f} billion parameters on {_devices(job.ranks)}"
    state = f"{memory(job) / 1e9:.2f} GB a device before activations"
    return "\n".join([advice, *code, "", f"{size}, modelled, not measured; {state}", *lines])


def facts(job: Job) -> dict[str, Any]:
    """Return the recommendation, job and estimates as JSON values."""
    advice, estimates = advise(job)
    rows = [dataclasses.asdict(option) | {"seconds": option.seconds} for option in estimates]
    values = {"advice": advice, "job": dataclasses.asdict(job), "memory": memory(job), "estimates": rows}
    if math.isinf(values["job"]["accelerator"]["memory"]):
        values["job"]["accelerator"]["memory"] = None  # JSON has no infinity
    return values

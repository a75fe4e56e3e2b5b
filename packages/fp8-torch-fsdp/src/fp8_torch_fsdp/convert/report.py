"""`float8_report`: compute, gather and reduction dtype of each parameter, with reasons."""

import dataclasses
from collections import Counter

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8_common import E4M3
from fp8_common.text_table import aligned
from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding.fsdp import shards
from fp8_common.torch_layers.sharding.gathered import GatheredWeight
from fp8_torch_fsdp.all_gather.mx_all_gather import Float8AllGather, coded_bytes
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.convert.expert_layouts import is_conv1d, layout_of
from fp8_torch_fsdp.convert.roles import CONVOLUTIONS, Roles, roles_of, stacked_parameters, users_of_parameters
from fp8_torch_fsdp.convert.select import ROWS_REPAID
from fp8_torch_fsdp.layers.module import Float8Module, original_class
from fp8_torch_fsdp.reduce_scatter import Float8ReduceScatter
from fp8_torch_fsdp.scales.sync import syncs_of
from fp8_torch_fsdp.scales.weight import Fp8Weight
from fp8_torch_fsdp.traceable.linear import TraceableShards

UNKNOWN_EXPERTS = "3-D, matmuls unknown: describe them with experts={class: ExpertLayout(...)}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """Report on one parameter.

    Attributes:
        name: Fully qualified name.
        shape: Shape of the whole parameter.
        class_name: Name of the class of its module, before the conversion.
        fp8: Whether matmuls with the parameter run in FP8.
        wire: Name of the dtype that FSDP2 gathers, for example "float8_e4m3fn" or "bfloat16".
        wire_bytes: Bytes of one gather of the whole parameter.
        saved_bytes: Bytes saved compared to a gather in the reference dtype.
        gradient: Name of the dtype in which the gradient is reduced: "float8_e4m3fn" or "float8_e5m2" for gradients
            reduced as codes, otherwise FSDP2's. "" before the first forward, and if FSDP2 does not shard the parameter.
        why: Scaling of the weight, or the reason why it is not gathered in FP8.
        head: Sentence about the output head that has this weight, or "".
        rows_per_expert: Average number of rows per expert in the last eager forward; None before the first one, and for
            weights that are not of experts.
    """

    name: str
    shape: tuple[int, ...]
    class_name: str
    fp8: bool
    wire: str
    wire_bytes: int
    saved_bytes: int
    gradient: str
    why: str
    head: str = ""
    rows_per_expert: float | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter in the reference dtype."""
        return self.wire_bytes + self.saved_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Float8Report:
    """Report on all parameters of a model; `str()` returns a table.

    Attributes:
        weights: One entry for each parameter.
        casts: Number of casts of weights for the all-gather on this rank. Casts in compiled graphs are not counted.
        reductions: Number of MAX all-reduces for scales on this rank.
        sharded: Whether `fully_shard` or `fully_shard_traceable` was applied; without them nothing is gathered.
    """

    weights: tuple[WeightReport, ...]
    casts: int
    reductions: int
    sharded: bool = True

    @property
    def wire_bytes(self) -> int:
        """Bytes of one gather of all parameters."""
        return sum(weight.wire_bytes for weight in self.weights)

    @property
    def saved_bytes(self) -> int:
        """Bytes saved by FP8 gathers."""
        return sum(weight.saved_bytes for weight in self.weights)

    @property
    def bytes(self) -> int:
        """Bytes of all parameters in the reference dtype."""
        return self.wire_bytes + self.saved_bytes

    @property
    def converted(self) -> float:
        """Share of parameters with FP8 matmuls, by bytes in the reference dtype."""
        return sum(weight.bytes for weight in self.weights if weight.fp8) / max(1, self.bytes)

    @property
    def gathered(self) -> float:
        """Share of parameters gathered in FP8, by bytes in the reference dtype."""
        return sum(weight.bytes for weight in self.weights if "float8" in weight.wire) / max(1, self.bytes)

    @property
    def left(self) -> list[tuple[str, str, int, int]]:
        """Parameters without FP8 matmuls, by class and reason, largest first.

        Each entry is (class name, reason, number of parameters, bytes in the reference dtype).
        """
        count, size = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for weight in self.weights:
            if not weight.fp8:
                count[weight.class_name, weight.why] += 1
                size[weight.class_name, weight.why] += weight.bytes
        return [(*key, count[key], nbytes) for key, nbytes in size.most_common()]

    @property
    def headline(self) -> str:
        """Summary: shares, the largest parameters without FP8 matmuls, and output heads.

        Parameters without FP8 matmuls are listed by class if they have at least a thousandth of all bytes.
        """
        parts = [
            f"{size / self.bytes:.1%} {name} ({count} parameter{'s' * (count != 1)}, {why})"
            for name, why, count, size in self.left
            if size * 1000 >= self.bytes > 0
        ]
        left = f" Left: {'; '.join(parts)}." if parts else ""
        heads = "".join(f" {weight.head}" for weight in self.weights if weight.head)
        heads += _about_rows([report.rows_per_expert for report in self.weights if report.rows_per_expert is not None])
        gathered = "gathered in FP8" if self.sharded else "would be gathered in FP8 once sharded with fully_shard"
        return f"{self.converted:.1%} of the weights converted, {self.gathered:.1%} {gathered}.{left}{heads}"

    def __str__(self) -> str:
        """Return the headline and a table of all parameters with sums."""
        sizes = f"{'bytes':>15}", f"{'saved':>15}"
        table = [("name", "class", "shape", "FP8", "wire", *sizes, "gradient", "why")]
        for w in self.weights:
            shape, fp8 = "x".join(map(str, w.shape)), "yes" if w.fp8 else "no"
            sizes = f"{w.wire_bytes:15,}", f"{w.saved_bytes:15,}"
            table.append((w.name, w.class_name, shape, fp8, w.wire, *sizes, w.gradient, w.why))
        table.append(("sum", "", "", "", "", f"{self.wire_bytes:15,}", f"{self.saved_bytes:15,}", "", ""))
        return "\n".join([self.headline, *aligned(table)])


def float8_report(model: nn.Module, *, reference_dtype: torch.dtype = torch.bfloat16) -> Float8Report:
    """Report the compute, gather and reduction dtype of each parameter.

    Args:
        model: Any model, converted or not, on any device, including "meta". Under FSDP2, call it while the weights are
            sharded (`model.reshard()`).
        reference_dtype: Dtype that parameters gathered in high precision are assumed to have, and that savings are
            compared to.

    Returns:
        One entry per parameter, in the order of `model.named_parameters()`, without uninitialized lazy parameters. A
        shared parameter is listed once, under the class of its first module; it computes in FP8 if one of its modules
        does. Output heads are linear layers that share the weight of an embedding, are the only ones with as many
        outputs as the largest embedding has rows, or have the name of a head.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> report = float8_report(convert_to_float8_training(model))
        >>> [(weight.name, weight.fp8, weight.why) for weight in report.weights][:2]
        [('0.weight', True, 'dynamic tensorwise'), ('0.bias', False, 'bias, norm, or other vector')]
        >>> report.wire_bytes, report.saved_bytes
        (8448, 8192)
    """
    return report_with(roles_of(model), model, reference_dtype)


def report_with(roles: Roles, model: nn.Module, reference_dtype: torch.dtype = torch.bfloat16) -> Float8Report:
    """Return `float8_report` of a model, with the result of `roles_of`."""
    users = users_of_parameters(model)
    role_of = dict.fromkeys(roles.adapters, "adapter") | dict.fromkeys(roles.routers, "router")
    heads = {id(head._parameters.get("weight")): (head, owner) for head, owner in roles.heads.items()}
    names = {module: name for name, module in model.named_modules()}
    coded, gradients = dict[int, int](), dict[int, str]()
    for shard in shards(model):
        if shard.reduce_dtype is not None:
            gradients[id(shard.local)] = str(shard.reduce_dtype).removeprefix("torch.")
    for collective in dict.fromkeys(
        each for shard in shards(model) for each in (shard.all_gather, shard.reduce_scatter)
    ):
        if isinstance(collective, Float8AllGather):
            coded |= collective.codes
        elif isinstance(collective, Float8ReduceScatter):
            gradients |= collective.codes
    rows = []
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            continue
        holders = users[id(parameter)]
        module, local = holders[0][0], local_of(parameter)
        fp8, key = next(
            ((user, key) for user, key in holders if isinstance(user, Float8Module) and key in user.fp8), (None, "")
        )
        weight, size = _gathered_weight(local, fp8), parameter.numel() * reference_dtype.itemsize
        wire, wire_bytes = str(reference_dtype).removeprefix("torch."), size
        if weight is not None:
            wire_bytes = coded_bytes(parameter.shape) if weight.grid.is_mx else parameter.numel()
            wire = weight.grid.cast.fp8_format.dtype_name
        elif id(local) in coded:
            wire, wire_bytes = E4M3.dtype_name, coded[id(local)]
        cls, head = type(module), heads.get(id(parameter))
        row = WeightReport(
            name=name,
            shape=tuple(parameter.shape),
            class_name=(original_class(cls) if isinstance(module, Float8Module) else cls).__name__,
            fp8=fp8 is not None,
            wire=wire,
            wire_bytes=wire_bytes,
            saved_bytes=size - wire_bytes,
            gradient=gradients.get(id(local), ""),
            why=_why(weight, parameter, local, module, fp8, role_of.get(module, ""), compressed=id(local) in coded),
            head=_head(names[head[0]], head[1], fp8=fp8 is not None, gathered=wire_bytes < size) if head else "",
            rows_per_expert=None if fp8 is None else fp8.fp8[key].rows_per_expert,
        )
        rows.append(row)
    syncs = syncs_of(model)
    casts = sum(weight.casts for sync in syncs for weight in sync.weights)
    traceable = any(isinstance(getattr(each, "fp8_strategy", None), TraceableShards) for each in model.modules())
    return Float8Report(
        weights=tuple(rows),
        casts=casts,
        reductions=sum(sync.reductions for sync in syncs),
        sharded=traceable or any(True for _ in shards(model)),
    )


def _about_rows(rows: list[float]) -> str:
    """Return a sentence about experts with few rows, or ""."""
    low, high = ROWS_REPAID
    few = [count for count in rows if count < high]
    if not few:
        return ""
    return (
        f" {len(few)} weights of experts got {min(few):.0f} to {max(few):.0f} rows per expert in the last forward; "
        f"casts of a weight are repaid from some {low} to {high} on (by an H100's rates)."
    )


def _head(name: str, embedding: str, *, fp8: bool, gathered: bool) -> str:
    shared = f"shared with {embedding}, " if embedding else ""
    wire = "FP8" if gathered else "high precision"
    return f"Output head {name}: {'FP8' if fp8 else 'high-precision'} matmul, weight {shared}gathered in {wire}."


def _gathered_weight(local: torch.Tensor, user: nn.Module | None) -> Fp8Weight | None:
    """Return the state of a weight gathered in FP8, or None.

    It is an attribute of the tensor, or of the layer's strategy under `fully_shard_traceable`.
    """
    if isinstance(local, ShardedFloat8Weight):
        return local.fp8_weight
    strategy = getattr(user, "fp8_strategy", None)
    return strategy.weight if isinstance(strategy, TraceableShards) and strategy.in_fp8 else None


def _why(
    weight: Fp8Weight | None,
    parameter: nn.Parameter,
    local: torch.Tensor,
    module: nn.Module,
    fp8: Float8Module | None,
    role: str,
    *,
    compressed: bool,
) -> str:
    """Return the scaling of a parameter gathered in FP8, or the obstacle.

    Args:
        weight: State of the weight if it is gathered in FP8.
        parameter: The parameter.
        local: Its local tensor.
        module: First module that holds it.
        fp8: FP8 module that multiplies by it, or None.
        role: Role of `module`: "adapter", "router" or "".
        compressed: Whether `compress_communication` gathers it in FP8.
    """
    if weight is not None and fp8 is None:
        return f"the FP8 layer was replaced by {type(module).__module__}.{type(module).__name__}"
    if weight is not None:
        return f"{weight.grid.cast.scaling} {weight.grid.cast.granularity}"
    if compressed:
        return "mx, for high-precision layers"
    if isinstance(local, GatheredWeight):
        return "gathered at the moment: call model.reshard() first"
    if fp8 is not None and fp8.fp8_config.all_gather and fp8.fp8_layout.projections:
        return "several projections of each expert in one stack"
    if fp8 is not None:
        return "shared with a layer that is not FP8" if fp8.fp8_config.all_gather else "all_gather is False"
    if parameter.ndim < 2 or (isinstance(module, Float8Module) and parameter.ndim == 2):
        return "bias, norm, or other vector"
    if role:
        return role
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, CONVOLUTIONS):
        return "convolution"
    if any(parameter is parameter_of_stack for parameter_of_stack in stacked_parameters(module)):
        return "experts, not converted" if layout_of(module, {}) else UNKNOWN_EXPERTS
    return "linear, not converted" if isinstance(module, nn.Linear) or is_conv1d(module) else "no linear layer"

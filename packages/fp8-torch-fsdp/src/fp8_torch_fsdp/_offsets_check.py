"""`GroupOffsetsCheck`: before each product of experts all ranks agree that the offsets of each fit, or all raise.

Without it the rank that has wrong offsets raises alone on a CPU, and computes NaN on a GPU. Agreement costs a small
all-reduce for each product and lets the host wait for it, so it is for finding such an error.
"""

import zlib
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from fp8_common import Fp8Error
from fp8_common.torch.plugin import LinearOperands, fsdp, max_over_ranks
from fp8_torch_fsdp._experts import Float8Experts

MOST_RANKS = 4
"""As many ranks say in an error what is wrong; others are named."""


class GroupOffsetsCheck:
    """Lets all ranks that run a product of experts raise the same error where one of them has offsets that do not fit.

    Use it as a context manager, or `close()` it. All ranks of `model` make it, after `fully_shard`. While it is open,
    the ranks agree before each `grouped_product`, in training and evaluation: one all-reduce of 12 bytes in a process
    group of its own, and the host waits for the result, which on GPUs is to wait for all that was computed before. A
    refused product is not computed: weights and gradients stay as they are. Compiled code calls the check uncompiled,
    which breaks the graph there.

    Every rank has to call the same products in the same order, also where it has no rows. A rank that calls another
    product instead is named in the same error; one that calls none lets the others wait until the process group times
    out, which is an error there.

    Args:
        model: A model with converted experts.
        group: The ranks that run them together. By default the ranks that hold parts or copies of a weight under
            FSDP2; in one process it is that alone. Under expert parallelism, where other ranks hold other experts,
            `dist.group.WORLD` lets these raise, too. Its time-out is that of the check.

    Raises:
        Fp8Error: The model has no experts, is checked already, or has experts that FSDP2 does not shard, of more than
            one process and without `group`; and, from a product, offsets or rows that do not fit.
    """

    def __init__(self, model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        experts = {name: module for name, module in model.named_modules() if isinstance(module, Float8Experts)}
        if not experts:
            raise Fp8Error("GroupOffsetsCheck found no experts in FP8. Convert the model first.")
        if any(module.fp8_offsets_check is not None for module in experts.values()):
            raise Fp8Error("The group offsets of the model are checked already. Close the first GroupOffsetsCheck.")
        params = list(fsdp.held_parameters(model))
        groups = {
            (prefix, name): _group_of(f"{prefix}.{name}".lstrip("."), module, name, params, group)
            for prefix, module in experts.items()
            for name in module.fp8_products
        }
        self._experts = list(experts.values())
        for prefix, module in experts.items():
            own = {name: groups[prefix, name] for name in module.fp8_products}
            module.fp8_offsets_check = Agreement(prefix, own)

    def __enter__(self) -> "GroupOffsetsCheck":
        """Return the check."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop checking."""
        self.close()

    def close(self) -> None:
        """Stop checking; products are again what they were."""
        for module in self._experts:
            module.fp8_offsets_check = None


class Agreement:
    """What a module of experts calls before each of its products.

    Args:
        prefix: The name of the module.
        groups: The ranks that agree on the offsets of each weight; None is this process alone.
    """

    def __init__(self, prefix: str, groups: Mapping[str, dist.ProcessGroup | None]) -> None:
        self._prefix, self._groups = prefix, groups

    def __reduce__(self) -> tuple:
        """Make None of a copy: process groups cannot be copied, and nobody would close the check of a copied module."""
        return type(None), ()

    @torch.no_grad()
    def __call__(
        self, name: str, operands: LinearOperands, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """Raise on all ranks what any of them has to say against its product; see `Float8Experts.grouped_product`.

        Raises:
            Fp8Error: It names the weight, the ranks, and what does not fit, on all ranks alike.
        """
        product, group = f"{self._prefix}.{name}".lstrip("."), self._groups[name]
        try:
            operands.check_input(x, weight, offsets, wait=True)
            problem = ""
        except Fp8Error as error:
            problem = str(error)
        if group is not None:
            _agree(product, problem, group, weight.device)
        elif problem:
            raise Fp8Error(f"grouped_product of {product}: {problem}")


def _agree(product: str, problem: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise the same error on every rank of `group` if any has a problem, or comes to another product."""
    place = zlib.crc32(product.encode()) >> 1  # an int32, the same number on all ranks
    flags = torch.tensor([problem != "", place, -place], dtype=torch.int32, device=device)
    told: list[tuple[str, str]] = [("", "")] * group.size()
    try:
        (found,), _ = max_over_ranks([flags], group)
        wrong, greatest, least = found.tolist()
        if not wrong and greatest == -least:
            return
        dist.all_gather_object(told, (product, problem), group=group)
    except RuntimeError as error:
        raise Fp8Error(
            f"grouped_product of {product}: not every rank of the group came to this product ({error}). All of them "
            "have to call it, also without rows."
        ) from error
    raise Fp8Error(_sentence(told, dist.get_process_group_ranks(group)))


def _sentence(told: Sequence[tuple[str, str]], ranks: Sequence[int]) -> str:
    """Return what ranks told each other in one error.

    Args:
        told: Of each rank, the product that it came to, and what does not fit there, or an empty text.
        ranks: The number of each among all ranks.
    """
    who = [
        f"rank {place} of the group" + f" (rank {rank} of all)" * (place != rank) for place, rank in enumerate(ranks)
    ]
    first = told[0][0]
    other = next((place for place, (product, _) in enumerate(told) if product != first), None)
    if other is not None:
        return (
            f"grouped_product of {first} on {who[0]}, of {told[other][0]} on {who[other]}: every rank has to call the "
            "same products in the same order, also without rows."
        )
    wrong = [(own, problem) for own, (_, problem) in zip(who, told, strict=True) if problem]
    sentences = [f"{own}: {problem}" for own, problem in wrong[:MOST_RANKS]]
    if len(wrong) > MOST_RANKS:
        sentences.append(f"The same holds for {', '.join(own for own, _ in wrong[MOST_RANKS:])}.")
    return f"grouped_product of {first}: {' '.join(sentences)}"


def _group_of(
    product: str,
    module: Float8Experts,
    name: str,
    params: Sequence[fsdp.ShardedParam],
    group: dist.ProcessGroup | None,
) -> dist.ProcessGroup | None:
    """Return the ranks that agree on the offsets for a weight, as a group that nothing else is sent in."""
    if group is not None:
        ranks, like = tuple(sorted(dist.get_process_group_ranks(group))), group
    else:
        weight = module._parameters[name]
        # by the parameter too: of modules that share a weight, FSDP2 knows one as its owner
        own = [p for p in params if p.parameter is weight or (p.module is module and p.name_in_module == name)]
        if own:
            ranks, like = own[0].peers(replicas=True), own[0].process_group
        elif dist.is_initialized() and dist.get_world_size() > 1:
            raise Fp8Error(
                f"GroupOffsetsCheck does not know which ranks run {product}, because FSDP2 does not shard it. Call "
                "fully_shard first, or give group=."
            )
        else:
            return None
    return fsdp.group_of(ranks, like, apart=True) if len(ranks) > 1 else None

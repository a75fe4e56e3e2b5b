"""`OnePass`: a step of AdamW that reads codes, lower bytes, gradient and moments once, and writes them back.

On a CPU the bits are those of `torch.optim.AdamW` on float32 masters. On a GPU a kernel makes the steps of
`AdamW(fused=True)` with the bits that a CPU gives, which are not those of torch's CUDA kernels; unrun there. Options
that torch's class does not have by default are stepped by the optimizer itself, part by part.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fp8_common.torch.plugin import dispatch
from fp8_te_init._compat import local_of
from fp8_te_init._masters.moments import CODES
from fp8_te_init._masters.remainder import RemainderMaster

FIRST, SECOND = "exp_avg", "exp_avg_sq"
GROUP = 16
"""Elements that torch's loops handle at a time: what is listed is stepped with its neighbours, by torch."""
MOST_GROUPS = 64
"""Of which the numbers between are stepped by themselves; a part with more is stepped as float32 values."""
Step = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], dict[str, Any]]
"""Steps float32 values with their gradient and state; returns the state."""


class OnePass:
    """One step of one parameter.

    Args:
        bytewise: What steps rows of bytes.
        group: The options of the parameter.
        count: Steps that were made.
        device: Of the masters.
    """

    def __init__(self, bytewise: Any, group: dict[str, Any], count: torch.Tensor, device: torch.device) -> None:
        self._bytewise, self._device = bytewise, device
        names = ("lr", "betas", "eps", "weight_decay")
        numbers = torch.tensor(dispatch.AdamWStep.of(int(count) + 1, **{name: group[name] for name in names}))
        self._numbers = (
            numbers if self._device.type == "cpu" else numbers.pin_memory().to(self._device, non_blocking=True)
        )

    @classmethod
    def of(cls, master: RemainderMaster, inner: Any, group: dict[str, Any], state: dict[str, Any]) -> "OnePass | None":
        """Return the step of a parameter; None where the optimizer has to make it, as for the first one."""
        kept = [state[name] for name in (FIRST, SECOND, FIRST + CODES, SECOND + CODES) if name in state]
        if type(inner) is not torch.optim.AdamW or not _is_usual(group) or len(kept) != 2:
            return None
        elements = master.shape.numel()
        # Of what is left of 16 elements torch computes some in another way.
        if not (master.compiled and master.is_in_bytes) or not elements or elements % GROUP:
            return None
        if not all(local_of(moment).is_contiguous() for moment in kept):
            return None
        codes = master.bytes_of(0).codes
        bytewise = dispatch.adamw_in_bytes(codes, master.fmt, fused=bool(group["fused"]))
        return None if bytewise is None else cls(bytewise, group, state["step"], codes.device)

    def part(
        self, index: int, master: RemainderMaster, gradient: torch.Tensor, state: dict[str, Any], step: Step
    ) -> dict[str, Any]:
        """Step a part of `master`.

        Args:
            index: Of the part.
            master: Its bytes are written.
            gradient: Of the part, of any floating-point dtype.
            state: Of the part, moments in float32; written.
            step: Steps values where the bytes do not give them back.

        Returns:
            `state`, with the step counted.
        """
        held, count = master.bytes_of(index), state["step"]
        first, second = (state[name].view(-1) for name in (FIRST, SECOND))
        gradient = gradient.reshape(-1)
        gradient = gradient if gradient.dtype == torch.bfloat16 else gradient.to(torch.float32)
        groups = [] if held.listed is None else (held.listed // GROUP).unique().tolist()
        if len(groups) > MOST_GROUPS:
            groups = range(held.codes.numel() // GROUP)
        largest = []
        if groups:
            at = (torch.tensor(groups).unsqueeze(1) * GROUP + torch.arange(GROUP)).view(-1).to(self._device)
            values = master.read_at(index, at)
            after = step(values, gradient[at], {"step": count.clone(), FIRST: first[at], SECOND: second[at]})
            first[at], second[at] = after[FIRST], after[SECOND]
            held.codes[at], held.lower[:, at] = dispatch.top_byte(values), dispatch.lower_bytes(values)
            largest.append((values.view(torch.int32) & 0x7FFFFFFF).amax())
        for start, stop in _between(groups, held.codes.numel()):
            own, moments = slice(start, stop), (first[start:stop], second[start:stop])
            largest.append(
                self._bytewise.step(
                    held.codes[own], held.inverse, held.lower[:, own], gradient[own], moments, self._numbers
                )
            )
        master.stepped(index, torch.stack(largest).amax())
        return {**state, "step": count + 1}


def _between(groups: Sequence[int], elements: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of what lies between groups, which are in order."""
    start = 0
    for group in groups:
        if group * GROUP > start:
            yield start, group * GROUP
        start = (group + 1) * GROUP
    if start < elements:
        yield start, elements


def _is_usual(group: dict[str, Any]) -> bool:
    odd = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")
    numbers = (group["lr"], *group["betas"], group["weight_decay"])
    plain = not any(isinstance(number, torch.Tensor) for number in numbers)
    return plain and group["betas"][0] > 0.5 and not any(group.get(name) for name in odd)

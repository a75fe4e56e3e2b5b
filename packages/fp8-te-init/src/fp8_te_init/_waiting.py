"""`agree_on_waiting`: the scale of one weight that values were written to, agreed on by the ranks that hold it."""

import torch

from fp8_te_init._scale_agreement import Agreement, agree_on
from fp8_te_init._shards import group_of
from fp8_te_init._weight import primary_of
from fp8_te_init._wire import waiting_values


def agree_on_waiting(parameter: torch.Tensor) -> None:
    """Agree on the scale of a distributed weight if values wait for it; all ranks that hold parts of it come here."""
    primary = primary_of(parameter)
    if primary is None or not primary.state.unagreed:
        return
    rows = primary.quantized_rows
    agree_on(
        [Agreement(weight=rows, values=waiting_values(primary.state, rows), group=group_of(parameter))], step=False
    )

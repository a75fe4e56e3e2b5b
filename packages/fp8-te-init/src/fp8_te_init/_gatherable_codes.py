"""`GatherableCodes`: the float8 tensors of a state dict, gathered as uint8, which take codes of one format alone.

gloo's collectives know no float8, so that `full_tensor()` and `full_state_dict=True` would fail on a CPU. And
`dcp.load` copies what it reads: from one float8 format to another, `copy_` would round codes as if they were values.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from fp8_common import Fp8Error
from fp8_common.torch import FLOAT8_DTYPES
from fp8_common.torch.plugin import tensor_subclass

aten = torch.ops.aten
collectives = torch.ops._c10d_functional

# What DTensor does to a local tensor around its gathers, besides views: nothing here looks at values.
_MOVES = {
    *(aten.clone.default, aten.cat.default, aten.constant_pad_nd.default, aten.index_select.default),
    *(collectives.all_gather_into_tensor.default, collectives.wait_tensor.default),
}
# What newer releases call to wait for a collective later; by name, because older ones have no such operator.
_WAITS_LATER = "_c10d_functional::_wrap_tensor_autograd"


class GatherableCodes(torch.Tensor):
    """A float8 tensor whose moves and gathers run on bytes; the gathered whole is a plain tensor.

    Args:
        codes: float8, any shape; it is aliased.
        gathers: Over how many dimensions of its mesh the tensor is sharded: so many gathers make it whole. Of a whole
            one views keep the class, so that they refuse what it refuses; everything else is a plain tensor.
    """

    _codes: torch.Tensor
    _gathers: int

    @staticmethod
    def __new__(cls: type, codes: torch.Tensor, gathers: int) -> "GatherableCodes":
        """Wrap `codes` without copying them."""
        # A subclass with the very storage: what saves tensors looks at storages and addresses.
        self: Any = torch.Tensor._make_subclass(cls, codes)
        self._codes, self._gathers = codes, gathers
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the plain tensor: files are read without this package."""
        return self._codes.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> "GatherableCodes":
        """Copy the codes."""
        return memo.setdefault(id(self), GatherableCodes(self._codes.clone(), self._gathers))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show the codes."""
        return f"GatherableCodes({self._codes!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run moves on bytes and keep the class until nothing is left to gather; everything else sees plain codes."""
        kwargs = kwargs or {}
        source = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        if func._schema.name == _WAITS_LATER:
            return source  # every collective here has ended already
        if func is aten.copy_.default and isinstance(args[0], cls):
            _refuse_other_codes(*args[:2])
        is_view = tensor_subclass.is_view(func) and func is not aten.view.dtype
        if not (is_view or (func in _MOVES and source._gathers)):
            return func(*pytree.tree_map_only(cls, lambda c: c._codes, args), **_plain(kwargs))
        result = func(*pytree.tree_map_only(torch.Tensor, _bytes, args), **_plain(kwargs))
        left = source._gathers - (func is collectives.all_gather_into_tensor.default)
        if left < source._gathers:
            # The collective has to end here: a plain tensor may be read by whoever gets it.
            result = collectives.wait_tensor(result)
        keeps = left > 0 or is_view
        return pytree.tree_map_only(torch.Tensor, lambda t: _codes_like(source, t, left, keeps=keeps), result)


def _plain(kwargs: dict) -> dict:
    return pytree.tree_map_only(GatherableCodes, lambda c: c._codes, kwargs)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    codes = tensor._codes if isinstance(tensor, GatherableCodes) else tensor
    return codes.view(torch.uint8) if codes.itemsize == 1 else codes  # indices stay numbers


def _codes_like(source: GatherableCodes, result: torch.Tensor, gathers: int, *, keeps: bool) -> torch.Tensor:
    codes = result.view(source._codes.dtype)
    return GatherableCodes(codes, gathers) if keeps else codes


def _refuse_other_codes(target: torch.Tensor, values: torch.Tensor) -> None:
    if values.dtype in FLOAT8_DTYPES and values.dtype != target.dtype:
        raise Fp8Error(
            f"{values.dtype} codes were copied to {target.dtype} ones of a state dict, and would be rounded: "
            "they were saved under another recipe. Convert the model with that one."
        )

"""Hooks that torch offers for the whole process alone, each registered on behalf of one object."""

from fp8_common.torch._hooks.owned import OwnedHook
from fp8_common.torch._hooks.replaced import MARK, mark_replaced, watch_replaced

__all__ = ["MARK", "OwnedHook", "mark_replaced", "watch_replaced"]

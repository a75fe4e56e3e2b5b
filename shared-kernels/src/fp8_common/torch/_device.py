"""Whether FP8 products run on hardware or are emulated on a device."""

import logging
from functools import cache
from typing import Literal, Protocol

import torch

from fp8_common._errors import Fp8UnsupportedError
from fp8_common.torch._compat import assume_constant_result

logger = logging.getLogger(__name__)


class ProductChoice(Protocol):
    """Any configuration with the field `emulate`."""

    @property
    def emulate(self) -> Literal["auto"] | bool:
        """Whether to emulate: always (True), never (False), or where the device lacks FP8 products ("auto")."""


def should_emulate(device: torch.device, config: ProductChoice) -> bool:
    """Return whether products on `device` are emulated.

    Raises:
        Fp8UnsupportedError: `config.emulate` is False and the device has no FP8 products.
    """
    if config.emulate is True:
        return True
    supported = _has_fp8_products(device)
    if config.emulate is False and not supported:
        raise Fp8UnsupportedError(
            f"{device} has no FP8 matrix products: they need an NVIDIA GPU of compute capability 8.9 or higher. "
            'Use emulate="auto" or emulate=True to compute the same numbers in higher precision.'
        )
    return not supported


# Under torch.compile the answer is a constant of the graph; Dynamo would otherwise trace into the capability query.
@assume_constant_result
def _has_fp8_products(device: torch.device) -> bool:
    return _look_up(device)


# Cached, so that it warns once for each device. Apart from the marked function, because the mark needs a plain one.
@cache
def _look_up(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    # On ROCm, gfx90a calls itself 9.0 and has no FP8 units; gfx942 has some, for formats that recipes do not take.
    supported = not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)
    if not supported:
        logger.warning("FP8 matrix products are emulated in higher precision on %s.", device)
    return supported

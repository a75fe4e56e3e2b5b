"""Errors about unrounded values and masters; `fp8_common` has the others."""

from fp8_common import Fp8Error, Fp8StaleError


class StaleInitError(Fp8StaleError):
    """Preserved unrounded values do not quantize to the codes of their weight.

    Examples:
        >>> import torch
        >>> from fp8_te_init import fp8_model_init
        >>> with fp8_model_init(preserve_high_precision_init_val=True):
        ...     layer = torch.nn.Linear(16, 16)
        >>> codes = layer.weight.codes.view(torch.uint8).zero_()  # not a write to the weight
        >>> layer.weight.get_high_precision_init_val()
        Traceback (most recent call last):
        fp8_te_init.errors.StaleInitError: The values before rounding of a weight (16, 16) do not quantize to ...
    """


class MissingInitError(Fp8Error):
    """Unrounded values for a master, or the master itself, are missing.

    Examples:
        >>> import torch
        >>> from fp8_te_init import MasterOptimizer, fp8_model_init, seed_masters
        >>> with fp8_model_init():  # preserves no values
        ...     layer = torch.nn.Linear(16, 16)
        >>> optimizer = MasterOptimizer(torch.optim.SGD, layer.parameters(), lr=0.1)
        >>> seed_masters(optimizer, layer)
        Traceback (most recent call last):
        fp8_te_init.errors.MissingInitError: The values before rounding of weight are not known...
    """

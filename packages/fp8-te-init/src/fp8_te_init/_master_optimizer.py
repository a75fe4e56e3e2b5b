"""`MasterOptimizer`: trains float32 masters of this rank's rows of FP8 weights, and quantizes them after each step.

Any optimizer class of torch works: it sees the masters, and the plain parameters as they are. Masters are distributed
like their parameters, so that `torch.distributed.checkpoint` saves and reshards them like any optimizer state.
"""

import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from fp8_common import Fp8Error
from fp8_common.torch.plugin import fsdp
from fp8_te_init._backends import requantizable
from fp8_te_init._compat import float32_like, local_of
from fp8_te_init._master_values import gradient_of, is_rounded_from, needs_master, start_of, values_of, writes_to
from fp8_te_init._masters import WholeMaster
from fp8_te_init._scale_agreement import Agreement, agree_on
from fp8_te_init._shards import group_of

logger = logging.getLogger(__name__)

MASTER = "master_param"
"""Name of the master in the state of its parameter, as in TransformerEngine's FusedAdam."""


class MasterOptimizer(Optimizer):
    """An optimizer with float32 masters of FP8 (and other low-precision) parameters.

    Masters start from what is kept for a parameter, else from its rounded values; `seed_masters` does the same, checks
    it, and drops what was kept. A step issues one all-reduce, whatever the number of FP8 weights. A parameter that
    something else wrote to (a loaded checkpoint) keeps what was written: its master starts anew from that.

    Args:
        optimizer_cls: An optimizer class of torch, or one that takes the same arguments.
        params: Parameters or groups, as any optimizer takes them.
        round_through_dtype: Round masters to the dtype that a weight stands for before they are quantized, as
            TransformerEngine does: the codes are then those of a bfloat16 model that is cast at each forward.
        **options: Arguments of `optimizer_cls`.

    Attributes:
        inner: The optimizer that trains the masters.
        reductions: All-reduces issued so far on this rank.

    Raises:
        Fp8Error: `optimizer_cls` is no optimizer class.
    """

    def __init__(
        self,
        optimizer_cls: type[Optimizer],
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        *,
        round_through_dtype: bool = False,
        **options: Any,
    ) -> None:
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
            raise Fp8Error(f"MasterOptimizer needs the class of an optimizer first, got {optimizer_cls!r}.")
        self._masters: dict[torch.Tensor, WholeMaster] = {}
        self._versions: dict[torch.Tensor, int] = {}
        self._shared: dict[int, dict[str, Any]] = {}
        self._round_through_dtype = round_through_dtype
        self.reductions = 0
        # `Optimizer.__init__` calls `add_param_group` for each group, and `inner` is not there yet: the dictionaries
        # above are, and the inner optimizer takes all groups at once below.
        super().__init__(params, {})
        self.inner = optimizer_cls([self._with_masters(group) for group in self.param_groups], **options)
        self.defaults = self.inner.defaults
        self._share_options()

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of: masters too, which no other optimizer has."""
        # `Optimizer.__getstate__` returns its own three attributes alone. Tensors as keys stay right in a copy: it goes
        # through one memo, in which parameters and masters are copied once.
        own = (
            "inner",
            "reductions",
            "_masters",
            "_versions",
            "_shared",
            "_round_through_dtype",
        )
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters, as any optimizer does."""
        super().add_param_group(param_group)
        inner = getattr(self, "inner", None)
        if inner is not None:
            inner.add_param_group(self._with_masters(self.param_groups[-1]))
            self._share_options()

    @torch.no_grad()
    def master_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 master of a parameter, a DTensor for a distributed one; None if it has none."""
        master = self._masters.get(parameter)
        return None if master is None else master.tensor()

    def has_master(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter has a float32 master here."""
        return parameter in self._masters

    @torch.no_grad()
    def set_master(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the master of a parameter; `write_back` makes the parameter follow.

        Args:
            parameter: One that has a master.
            values: Of the shape of what this rank holds of it, any floating-point dtype.

        Raises:
            Fp8Error: It has no master, or another shape.
        """
        master = self._masters.get(parameter)
        if master is None:
            raise Fp8Error("This parameter has no master here: it is float32 or frozen, or belongs to no group.")
        own, wanted = local_of(values), local_of(parameter).shape
        if own.numel() != wanted.numel():
            raise Fp8Error(f"The master holds values of shape {tuple(wanted)} here, got {tuple(own.shape)}.")
        master.set(own)
        self.note(parameter)

    def masters(self) -> list[torch.Tensor]:
        """Return every master; see `master_of`."""
        return [master.tensor() for master in self._masters.values()]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore[bad-override]
        """Make a step with the masters, then quantize: one all-reduce for all FP8 weights. All ranks call it.

        Args:
            closure: Computes the loss again, as any optimizer takes it.

        Returns:
            What `closure` returned.

        Raises:
            Fp8Error: An FP8 weight that was frozen when it came here, and so has no master, has a gradient.
        """
        # First: a step from a master that does not know of a loaded checkpoint would overwrite it.
        self._take_writes()
        self._share_options()
        loss = self._step_masters(closure)
        # Again: the step may have changed options or added keys, which `state_dict` and schedulers read here.
        self._share_options()
        self.write_back(step=True)
        self._publish()
        return loss

    def _step_masters(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            self._hand_over()
            loss = self.inner.step()
        else:
            loss = self.inner.step(self._evaluation_of(closure))
        # The gradient of a master is a float32 copy, unless it was float32 before; nobody needs it after the step.
        for master in self._masters.values():
            master.key.grad = None
        return loss

    def _share_options(self) -> None:
        """Bring the groups of both optimizers together: what somebody set here goes in, everything else comes out.

        Schedulers set options here. Some optimizers (Prodigy, schedule-free ones) keep state of their own in the
        groups that they see, and add keys in a step: pushing our values then would reset them.
        """
        for index, (ours, theirs) in enumerate(zip(self.param_groups, self.inner.param_groups, strict=True)):
            shared = self._shared.get(index, {})
            for key, value in ours.items():
                # `is not`: an option may be a tensor (a learning rate), and comparing its value would wait for the
                # device.
                if key != "params" and (key not in shared or shared[key] is not value):
                    theirs[key] = value
            ours.update({key: value for key, value in theirs.items() if key != "params"})
            self._shared[index] = {key: value for key, value in ours.items() if key != "params"}

    @torch.no_grad()
    def write_back(self, *, step: bool) -> None:
        """Quantize every master into its FP8 weight, and round it into other parameters.

        Args:
            step: Whether an optimizer step made the masters; delayed scaling then records it.
        """
        agreements = []
        written = []
        for parameter, master in self._masters.items():
            # A parameter that has a master and is not FP8 is bfloat16 or float16: it is rounded, nothing has to be
            # agreed on.
            weight = requantizable(parameter)
            if weight is None:
                local_of(parameter).copy_(local_of(master.key))
                continue
            values = self._to_quantize(parameter, local_of(master.key))
            agreements.append(Agreement(weight=weight, values=values, group=group_of(parameter)))
            # autograd then refuses the backward of a forward that saw the weight of before, as for plain weights
            increment_version(parameter)
            written.append(local_of(parameter))
        self.reductions += agree_on(agreements, step=step)
        # With reshard_after_forward=False FSDP2 would go on with the codes that it gathered before the step.
        fsdp.reshard_gathered(written)
        for parameter in self._masters:
            self.note(parameter)

    def note(self, parameter: torch.Tensor) -> None:
        """Take a parameter and its master as they are now: what is written to the parameter alone, later, counts."""
        self._versions[parameter] = writes_to(parameter)

    def _to_quantize(self, parameter: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
        return master.to(parameter.dtype) if self._round_through_dtype else master

    def _take_writes(self) -> None:
        """Start the masters of parameters anew that something else wrote to; they would undo it otherwise."""
        taken = 0
        for parameter, master in self._masters.items():
            # Counting writes costs nothing, the comparison costs a cast: it runs only where the count says something
            # was written.
            # a master that was changed as well does not win: `write_back` would have said that it is meant
            if self._versions[parameter] == writes_to(parameter) or is_rounded_from(
                parameter, self._to_quantize(parameter, local_of(master.tensor()))
            ):
                continue
            master.set(values_of(parameter))
            taken += 1
        if taken:
            logger.warning(
                "%d parameters were written to since their masters were made (a loaded checkpoint, an edit): the "
                "masters start anew from what was written. Change masters and call write_back to keep their precision.",
                taken,
            )

    def _evaluation_of(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure for the inner optimizer; where that moves masters between calls (LBFGS), weights follow."""
        calls = itertools.count()

        def evaluate() -> Any:
            # In the first call of a step the weights are those that the last step wrote.
            if next(calls):
                self.write_back(step=False)
            with torch.enable_grad():
                loss = closure()
            self._hand_over()
            return loss

        return evaluate

    def _hand_over(self) -> None:
        """Give the masters the gradients of their parameters."""
        self._refuse_thawed()
        for parameter, master in self._masters.items():
            # A float32 gradient is handed over without a copy, others are converted.
            gradient = gradient_of(parameter)
            master.key.grad = None if gradient is None else gradient.to(torch.float32)

    def _refuse_thawed(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter in self._masters:
                    continue
                if requantizable(parameter) is not None:
                    raise Fp8Error(
                        f"An FP8 weight of shape {tuple(parameter.shape)} was frozen when this MasterOptimizer took "
                        "it, so it has no master, and it has a gradient now. Make the optimizer after unfreezing, or "
                        "leave frozen parameters out and give them to add_param_group then."
                    )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any optimizer does; each parameter's state has its master as "master_param"."""
        self._share_options()
        # `Optimizer.state_dict` reads `self.state`. Masters belong in a checkpoint before the first step too; after
        # this the state looks empty again, because torch.distributed.checkpoint takes a state that is not empty for
        # that of an optimizer that has stepped.
        self._publish(always=True)
        try:
            return super().state_dict()
        finally:
            self._publish()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or what `torch.distributed.checkpoint` made of it. Values keep their dtype.

        The FP8 weights are not touched: they have their own place in the checkpoint of the model.

        Raises:
            Fp8Error: The parameter groups are others, or a master is missing.
        """
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise Fp8Error(
                f"The checkpoint has parameter groups of {[len(group['params']) for group in groups]} parameters, this "
                f"optimizer of {[len(group['params']) for group in self.param_groups]}. Build it as it was saved."
            )
        # Not `Optimizer.load_state_dict`: it casts the state to the dtype of its parameter, bfloat16 for many weights.
        for ours, theirs in zip(self.param_groups, groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key not in ("params", "param_names")})
            for parameter, index in zip(ours["params"], theirs["params"], strict=True):
                # A copy of the dictionary: the master is popped from it, and the checkpoint is the caller's.
                self._load_one(parameter, dict(state_dict["state"].get(index, {})))
                if parameter in self._masters:
                    self.note(parameter)
        self._share_options()
        self._publish()

    def _load_one(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        master = self._masters.get(parameter)
        if master is not None:
            if MASTER not in state:
                raise Fp8Error(
                    f"The checkpoint has no master for a parameter of shape {tuple(parameter.shape)}: it was saved by "
                    "an optimizer without masters. Seed new ones with seed_masters instead."
                )
            values = float32_like(parameter, torch.empty(local_of(parameter).shape, device=local_of(parameter).device))
            master.set(local_of(values.copy_(state.pop(MASTER))))
        key = parameter if master is None else master.key
        if state:
            device = local_of(key).device
            self.inner.state[key] = {name: _own(value, device, name) for name, value in state.items()}

    def _publish(self, *, always: bool = False) -> None:
        """Show the inner optimizer's state under the parameters; empty before the first step, as it is elsewhere."""
        # Made anew each time: the inner optimizer owns the state, keyed by masters; this is the same by parameters,
        # without a copy of any tensor.
        self.state.clear()
        if not self.inner.state and not always:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self._masters.get(parameter)
                own = self.inner.state.get(parameter if master is None else master.key, {})
                if own or master is not None:
                    self.state[parameter] = dict(own) if master is None else {MASTER: master.tensor(), **own}

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter group for the inner optimizer."""
        params = []
        for parameter in group["params"]:
            master = self._masters.get(parameter)
            if master is None and parameter.requires_grad and needs_master(parameter):
                master = self._masters[parameter] = WholeMaster(parameter, start_of(parameter))
                self.note(parameter)
            params.append(parameter if master is None else master.key)
        return {**group, "params": params}


def _own(value: Any, device: torch.device, name: str) -> Any:
    """Return a value of a loaded state that shares nothing with the checkpoint; step counts stay on their device."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if name == "step" else value.to(device).clone()

"""`MasterOptimizer`: trains float32 masters and quantizes them into FP8 weights.

Any optimizer class of torch works: it receives the masters and the unchanged plain parameters. Masters are distributed
like their parameters, so that `torch.distributed.checkpoint` saves and reshards them like any optimizer state.
"""

import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8_common import Fp8Error
from fp8_common.torch.compat import local_of, version_of
from fp8_common.torch_layers.sharding import fsdp
from fp8_common.torch_layers.sharding.agreement import group_of_parts
from fp8_te_init.masters.sources import exchanged, gradient_elsewhere, new_master, part_like, register_master
from fp8_te_init.transformer_engine import TeWeight, fp8_of, kind_of
from fp8_te_init.transformer_engine_modules import ORDER
from fp8_te_init.weight.all_gather import quantize_together
from fp8_te_init.weight.state import Record, WeightState

logger = logging.getLogger(__name__)

MASTER = "master_param"
"""Name of the master in the state of its parameter, as in TransformerEngine's FusedAdam."""


Trained = tuple[torch.Tensor, torch.Tensor, WeightState | TeWeight | None]
"""A parameter with its local master and FP8 rows, None for other parameters."""


class MasterOptimizer(Optimizer):
    """An optimizer with float32 masters of FP8 (and other low-precision) parameters.

    Masters start from the preserved values if available, else from the rounded ones; `seed_masters` does the same and
    checks it. A step issues one all-reduce, for any number of FP8 weights, and drops the preserved values of the
    weights that it trains. Optimizers of the same FP8 weight share its master. If other code writes to a parameter (a
    loaded checkpoint), the new values are kept, and its master is re-initialized from them.

    Args:
        optimizer_cls: An optimizer class of torch, or one that takes the same arguments.
        params: Parameters or groups, as any optimizer takes them.
        round_through_dtype: Whether to round masters to the weight's dtype before they are quantized, as
            TransformerEngine does. The codes are then equal to casting a bfloat16 model at each forward.
        **options: Arguments of `optimizer_cls`.

    Attributes:
        inner: The optimizer that trains the masters.
        reductions: All-reduces issued so far on this rank.

    Raises:
        Fp8Error: `optimizer_cls` is no optimizer class, or `params` are missing.
        StaleInitError: The values before rounding of a weight do not belong to its codes.
    """

    def __init__(
        self,
        optimizer_cls: type[Optimizer],
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None = None,
        *,
        round_through_dtype: bool = False,
        **options: Any,
    ) -> None:
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)) or params is None:
            raise Fp8Error(
                "MasterOptimizer takes the class of an optimizer, then parameters, then its options: "
                f"MasterOptimizer(AdamW, model.parameters(), lr=1e-3). It got {optimizer_cls!r} first"
                f"{' and no parameters' if params is None else ''}."
            )
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        # the kind of each parameter: "native", the name of a class of TransformerEngine, or None
        self._kinds: dict[torch.Tensor, str | None] = {}
        # the versions of parameter and master when they last agreed; of the parameter None after a load
        self._agreed: dict[torch.Tensor, tuple[Any, int]] = {}
        self._shared: dict[int, dict[str, Any]] = {}
        self._round_through_dtype, self._published, self.reductions = round_through_dtype, False, 0
        # `Optimizer.__init__` calls `add_param_group` for each group while `inner` is not there yet, which takes all
        # groups at once below.
        super().__init__(params, {})
        self.inner = optimizer_cls([self._with_masters(group) for group in self.param_groups], **options)
        self.defaults = self.inner.defaults
        self._share_options()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, masters included."""
        # `Optimizer.__getstate__` returns only its own three attributes. Tensors as keys stay right in a copy: one memo
        # copies parameters and masters once. Pickles of weights have only codes, so masters are updated from external
        # writes first.
        self._follow_writes()
        attributes = (
            "inner",
            "reductions",
            "_masters",
            "_kinds",
            "_agreed",
            "_shared",
            "_round_through_dtype",
            "_published",
        )
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in attributes}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy: copied masters belong to copied weights."""
        super().__setstate__(state)
        for parameter, master in self._masters.items():
            register_master(parameter, master, rounds=self._round_through_dtype)
            # of a weight of TransformerEngine, a comparison finds whether it was written to before the copy
            known = -1 if self._is_te(parameter) else self._writes_to(parameter)
            self._agreed[parameter] = (known, version_of(local_of(master)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters, as any optimizer does."""
        super().add_param_group(param_group)
        if hasattr(self, "inner"):
            self.inner.add_param_group(self._with_masters(self.param_groups[-1]))
            self._share_options()

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter group for the inner optimizer."""
        params, rounded, cure = [], 0, ""
        for parameter in group["params"]:
            weight = fp8_of(parameter)
            low = weight is not None or parameter.dtype in (torch.bfloat16, torch.float16)
            self._kinds[parameter] = "native" if isinstance(weight, WeightState) else kind_of(parameter)
            if low and parameter.requires_grad and parameter not in self._masters:
                master = None if weight is None else weight.live_master
                if master is None and weight is not None and weight.unrounded is None:
                    rounded += 1
                    cure = f" {ORDER}" if isinstance(weight, TeWeight) and isinstance(parameter, DTensor) else cure
                self._masters[parameter] = new_master(parameter) if master is None else master
                register_master(parameter, self._masters[parameter], rounds=self._round_through_dtype)
                self._agree(parameter)
            params.append(self._masters.get(parameter, parameter))
        if rounded:
            logger.warning(
                "The masters of %d FP8 weights start from rounded values: those before rounding were not preserved, or "
                "are dropped already. Build the model in fp8_model_init(preserve_high_precision_init_val=True), make "
                "all optimizers before the first step, or load a checkpoint of the optimizer.%s",
                rounded,
                cure,
            )
        return {**group, "params": params}

    def _follow_groups(self) -> None:
        """Update the parameter groups after parameters were replaced, moved or removed.

        Call it after `fully_shard`, as Accelerate does.

        Raises:
            Fp8Error: A parameter replaces none of the old ones, or one of another shape.
        """
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            # as sets: some optimizers sort their parameters
            trained = {id(self._masters.get(parameter, parameter)) for parameter in group["params"]}
            if trained != {id(parameter) for parameter in inner_group["params"]}:
                self._exchange()
                return

    @torch.no_grad()
    def _exchange(self) -> None:
        pairs = zip(self.param_groups, self.inner.param_groups, strict=True)
        for old, parameter in exchanged(
            [(ours["params"], len(inner_group["params"])) for ours, inner_group in pairs], self._kinds
        ):
            self._transfer(old, parameter)
        for ours, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group["params"] = [self._masters.get(parameter, parameter) for parameter in ours["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._kinds = {parameter: self._kinds[parameter] for parameter in parameters}
        self._masters = {parameter: self._masters[parameter] for parameter in parameters if parameter in self._masters}
        self._agreed = {parameter: self._agreed[parameter] for parameter in self._masters}
        self._publish()

    def _transfer(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Move master and state from an old parameter to its replacement."""
        before = self._masters.get(old, old)
        self._with_masters({"params": [new]})
        after = self._masters.get(new, new)
        state = self.inner.state.pop(before, {})
        if state:
            cut = {k: part_like(v, after) if getattr(v, "shape", None) == old.shape else v for k, v in state.items()}
            self.inner.state[after] = cut
        if after is not new and before is not old:
            values, local, weight = local_of(part_like(before, after)), local_of(after), fp8_of(new)
            rounded = values.to(new.dtype)
            quantized = (
                weight.quantized(rounded if self._round_through_dtype else values) if weight is not None else rounded
            )
            # else something was written to it in between
            if torch.equal(quantized, local_of(new).detach() if weight is None else weight.local_codes):
                local.copy_(values)
            self._agree(new)

    # ------------------------------------------------------------ masters

    def _is_te(self, parameter: torch.Tensor) -> bool:
        return self._kinds[parameter] not in (None, "native")

    def _trained(self, parameters: Iterable[torch.Tensor] | None = None) -> "list[Trained]":
        trained = []
        for parameter in self._masters if parameters is None else parameters:
            kind, weight = self._kinds[parameter], None
            if kind is not None:
                weight = local_of(parameter)._state if kind == "native" else TeWeight(parameter, kind)
            trained.append((parameter, local_of(self._masters[parameter]), weight))
        return trained

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter has a master in this optimizer."""
        if parameter not in self._masters:
            self._follow_groups()
        return parameter in self._masters

    @torch.no_grad()
    def master_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 master of a parameter, None without one.

        It has the parameter's shape; it is a DTensor for a distributed parameter.

        It is the master itself: after a change of it call `write_back`.
        """
        if not self.owns(parameter):
            return None
        self._follow_writes(self._trained([parameter]))
        return self._masters[parameter]

    @torch.no_grad()
    def masters(self) -> list[torch.Tensor]:
        """Return all float32 masters in the optimizer's order; see `master_of`."""
        self._follow_groups()
        self._follow_writes()
        return list(self._masters.values())

    @torch.no_grad()
    def set_master(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the values of a master, and quantize them into its weight.

        Args:
            parameter: One that `owns` knows.
            values: A floating-point dtype, [n, columns]: the values of the local rows.

        Raises:
            KeyError: The parameter has no master.
            RuntimeError: The shape does not fit.
        """
        local = local_of(self._masters[parameter])
        local.copy_(values.reshape(local.shape))
        self._agree(parameter)

    @torch.no_grad()
    def write_back(self) -> None:
        """Quantize masters into FP8 weights and round them into other parameters.

        All ranks call it.
        """
        self._follow_groups()
        self._write_back("start")

    def _write_back(self, record: Record, trained: "list[Trained] | None" = None) -> None:
        waiting, written = [], set[int]()
        trained = self._trained() if trained is None else trained
        for parameter, local, weight in trained:
            if weight is None:  # bfloat16 or float16
                local_of(parameter).copy_(local)
                continue
            values = local.to(parameter.dtype) if self._round_through_dtype else local
            waiting.append((weight, values, group_of_parts(parameter)))
            # autograd then rejects the backward of a forward that used the previous weight, as for plain weights
            increment_version(parameter)
            if isinstance(parameter, DTensor):
                written.add(id(local_of(parameter)))
        self.reductions += quantize_together(waiting, record=record)
        for weight, *_ in waiting:
            weight.previous_state = None
        if written:
            _reshard(written)
        for parameter, local, weight in trained:
            known = 0 if isinstance(weight, WeightState) else self._writes_to(parameter)
            self._agreed[parameter] = (known, version_of(local))

    def _writes_to(self, parameter: torch.Tensor) -> int:
        """Return a version that changes with every visible write to a parameter.

        For a native weight it includes the master.
        """
        return 0 if self._kinds[parameter] == "native" else version_of(local_of(parameter))

    def _agree(self, parameter: torch.Tensor) -> None:
        """Record that a parameter and its master are equal up to rounding."""
        self._agreed[parameter] = (self._writes_to(parameter), version_of(local_of(self._masters[parameter])))

    def _follow_writes(self, trained: "list[Trained] | None" = None, *, stepping: bool = False) -> None:
        """Re-initialize masters of parameters that other code modified.

        The next step would revert the modification otherwise.
        """
        restarted = 0
        for parameter, local, weight in self._trained() if trained is None else trained:
            known, version = self._agreed[parameter]
            if weight is None:
                edited = version != version_of(local)
                # Compared each time, since torch counts no writes through `.data`. A master that was changed alone
                # waits for `write_back`.
                if not edited or known != self._writes_to(parameter):
                    own = local_of(parameter).detach()
                    local.copy_(torch.where(local.to(own.dtype) == own, local, own))
                    self._agree(parameter)
                continue
            if isinstance(weight, WeightState):
                weight.check()  # values and codes that are written reach the master at once; loads in place, here
            # Loaded masters may belong to weights that are loaded next.
            if (known is None and not stepping) or known == (0 if isinstance(weight, WeightState) else weight.version):
                continue
            values = local.to(parameter.dtype) if self._round_through_dtype else local
            if not torch.equal(weight.quantized(values), weight.local_codes):
                local.copy_(weight.best_values())
                restarted += 1
            self._agree(parameter)
        if restarted:
            logger.warning(
                "%d parameters were written to since their masters were made (a loaded checkpoint, an edit): the "
                "masters start again from the new values. Load model and optimizer of the same step; edit "
                "masters, then call write_back, because an operator on a weight reads rounded values.",
                restarted,
            )

    # ------------------------------------------------------------ steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore[bad-override]
        """Step the masters, then quantize them: one all-reduce for all FP8 weights.

        All ranks call it.

        Args:
            closure: Computes the loss again, as any optimizer takes it. Where the optimizer moves masters before it
                calls the closure (LBFGS, SAM), the weights follow.

        Returns:
            The result of `closure`.

        Raises:
            Fp8Error: An FP8 weight that was frozen when it came here, and so has no master, has a gradient.
        """
        if self._published and not self.state:  # `optimizer.state.clear()` resets the moments
            self.inner.state.clear()
        self._follow_groups()
        trained = self._trained()
        self._follow_writes(trained, stepping=True)
        self._share_options()
        self._assign_gradients()
        # `torch.distributed.checkpoint` makes such a step to have the optimizer build its state: no value changes, and
        # codes that were loaded just before have to stay.
        rates = [float(group.get("lr", 1)) for group in self.param_groups]
        idle = closure is None and not self.inner.state and not any(rates) and not self._moved()
        loss = self.inner.step() if closure is None else self.inner.step(self._evaluation_of(closure))
        # the gradient of a master is a float32 copy, unless it was float32 before; it is not used after the step
        for master in self._masters.values():
            master.grad = None
        # the step may have changed options or added keys, which `state_dict` and schedulers read here
        self._share_options()
        if idle:
            for parameter in self._masters:
                self._agree(parameter)
        else:
            self._write_back("step", trained)
            for _, _, weight in trained:  # the values before rounding of the weights that the step has changed
                if weight is not None and weight.preserve_until not in (None, "manual"):
                    weight.release()
        self._publish()
        return loss

    def _moved(self) -> bool:
        """Return whether a master changed since it last agreed with its parameter."""
        return any(version_of(local_of(master)) != self._agreed[p][1] for p, master in self._masters.items())

    def _evaluation_of(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that updates the weights from masters first."""
        calls = itertools.count()

        def evaluate() -> Any:
            if next(calls) or self._moved():
                self._write_back("nothing")
            with torch.enable_grad():
                loss = closure()
            self._assign_gradients()
            return loss

        return evaluate

    def _assign_gradients(self) -> None:
        """Give the masters the gradients of their parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, master = parameter.grad, self._masters.get(parameter)
                gradient = gradient_elsewhere(parameter) if gradient is None else gradient
                if master is not None:
                    # a float32 gradient is handed over without a copy, others are converted
                    master.grad = None if gradient is None else gradient.to(torch.float32)
                elif gradient is not None and self._kinds[parameter] is not None:
                    raise Fp8Error(
                        f"An FP8 weight of shape {tuple(parameter.shape)} was frozen when this MasterOptimizer took "
                        "it, so it has no master, and it has a gradient now. Make the optimizer after unfreezing, or "
                        "leave frozen parameters out and give them to add_param_group then."
                    )

    def _share_options(self) -> None:
        """Push the user's options to the inner optimizer, pull the rest.

        Schedulers set options here. Some optimizers (Prodigy, schedule-free ones) keep their own state in the groups
        and add keys in a step: pushing our values then would reset them.
        """
        for index, (group, inner_group) in enumerate(zip(self.param_groups, self.inner.param_groups, strict=True)):
            shared = self._shared.get(index, {})
            for key, value in group.items():
                # `is not`: an option may be a tensor (a learning rate), whose comparison would wait for the device
                if key != "params" and (key not in shared or shared[key] is not value):
                    inner_group[key] = value
            self._shared[index] = {key: value for key, value in inner_group.items() if key != "params"}
            group.update(self._shared[index])

    # ------------------------------------------------------------ checkpoints

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, with each parameter's master as "master_param"."""
        self._follow_groups()
        self._follow_writes()
        self._share_options()
        # A checkpoint needs masters before the first step too. The state is emptied again afterwards, because
        # torch.distributed.checkpoint treats an optimizer with state as one that has stepped.
        self._publish(always=True)
        try:
            return super().state_dict()
        finally:
            self._publish()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`, also after `torch.distributed.checkpoint`.

        Values keep their dtype.

        The FP8 weights are not touched: load them into the model, before or after.

        Raises:
            Fp8Error: The parameter groups are others, or a master is missing; nothing is loaded then.
        """
        self._follow_groups()
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise Fp8Error(
                f"The checkpoint has parameter groups of {[len(group['params']) for group in groups]} parameters, this "
                f"optimizer of {[len(group['params']) for group in self.param_groups]}. Build it with the saved groups."
            )
        pairs = [
            pair
            for ours, loaded in zip(self.param_groups, groups, strict=True)
            for pair in zip(ours["params"], loaded["params"], strict=True)
        ]
        missing = [p for p, index in pairs if p in self._masters and MASTER not in state_dict["state"].get(index, {})]
        if missing:
            raise Fp8Error(
                f"The checkpoint has no master for a parameter of shape {tuple(missing[0].shape)}: it was saved by an "
                "optimizer without masters. Seed new ones with seed_masters instead."
            )
        # Not `Optimizer.load_state_dict`: it casts the state to the dtype of its parameter, bfloat16 for many weights.
        for ours, loaded in zip(self.param_groups, groups, strict=True):
            ours.update({key: value for key, value in loaded.items() if key not in ("params", "param_names")})
        for parameter, index in pairs:
            # a copy of the dictionary: the master is popped from it, and the checkpoint is the caller's
            state, master = dict(state_dict["state"].get(index, {})), self._masters.get(parameter)
            if master is not None:
                master.copy_(state.pop(MASTER))
                # -1: the master counts as changed alone until the parameter changes or the next step is made
                version = None if self._kinds[parameter] is not None else self._writes_to(parameter)
                self._agreed[parameter] = (version, -1)
            if state:
                device = local_of(parameter).device
                moved = {name: _own(value, device, name) for name, value in state.items()}
                self.inner.state[parameter if master is None else master] = moved
        self._share_options()
        self._publish()

    def _publish(self, *, always: bool = False) -> None:
        """The inner optimizer's state by parameter; empty before the first step."""
        # Built at each access: the inner optimizer owns the state, keyed by masters; this maps it by parameter without
        # copying tensors.
        self.state.clear()
        self._published = bool(self.inner.state)
        if not self.inner.state and not always:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self._masters.get(parameter)
                inner_state = self.inner.state.get(parameter if master is None else master, {})
                if inner_state or master is not None:
                    self.state[parameter] = dict(inner_state) if master is None else {MASTER: master, **inner_state}


def _reshard(written: set[int]) -> None:
    """Make FSDP2 gather the given weights again, also without reshard_after_forward."""
    if written:
        for shard in fsdp.shards():
            if id(shard.local) in written:
                shard.reshard()


def _own(value: Any, device: torch.device, name: str) -> Any:
    """Return a loaded value that shares no memory with the checkpoint.

    Step counts stay on their device.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if name == "step" else value.to(device).clone()

"""`MasterOptimizer`: trains float32 masters and quantizes them into FP8 weights.

Any optimizer class of torch works: it receives the masters, and plain parameters that need none. Masters are
distributed like their parameters, so that `torch.distributed.checkpoint` saves and reshards them like any optimizer
state.
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
"""A parameter, its local master, and its local FP8 rows; None for a parameter that is not FP8."""


class MasterOptimizer(Optimizer):
    """Optimizer with float32 masters of FP8, bfloat16 and float16 parameters.

    Create it after `fully_shard`. Masters start from the unrounded values if these are preserved, else from the rounded
    ones with a warning; `seed_masters` raises instead. A step issues one all-reduce for each process group of FP8
    weights, for any number of weights. It drops the unrounded values of the weights that it trains, except with
    `release="manual"`. Several optimizers of one FP8 weight share its master. If other code writes to a parameter, for
    example by loading a checkpoint, its master restarts from the new values.

    Args:
        optimizer_cls: An optimizer class of torch, or one with the same arguments.
        params: Parameters or parameter groups, as for any optimizer.
        round_through_dtype: Whether to round masters to the weight's dtype before they are quantized, as
            TransformerEngine does. The codes then equal those of a bfloat16 model that is cast at each forward.
        **options: Arguments of `optimizer_cls`.

    Attributes:
        inner: The optimizer that trains the masters.
        reductions: Number of all-reduces that this rank has issued.

    Raises:
        Fp8Error: If `optimizer_cls` is not an optimizer class, or `params` is missing.
        StaleInitError: If the unrounded values of a weight do not belong to its codes.

    Examples:
        >>> import torch
        >>> from fp8_te_init import MasterOptimizer, fp8_model_init
        >>> with fp8_model_init(preserve_high_precision_init_val=True):
        ...     model = torch.nn.Linear(64, 64)
        >>> optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        >>> model(torch.ones(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> optimizer.master_of(model.weight).dtype
        torch.float32
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
        # "native" for a weight of this package, the class name for one of TransformerEngine, None without FP8
        self._kinds: dict[torch.Tensor, str | None] = {}
        # Versions of parameter and master when they were last equal up to rounding. After masters were loaded, the
        # first is None for FP8 weights, and the second -1. See `_write_version`.
        self._agreed: dict[torch.Tensor, tuple[Any, int]] = {}
        self._shared: dict[int, dict[str, Any]] = {}
        self._round_through_dtype, self._published, self.reductions = round_through_dtype, False, 0
        # `Optimizer.__init__` calls `add_param_group` for each group. `inner` does not exist yet, and gets all groups
        # at once below.
        super().__init__(params, {})
        self.inner = optimizer_cls([self._with_masters(group) for group in self.param_groups], **options)
        self.defaults = self.inner.defaults
        self._share_options()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, masters included."""
        # `Optimizer.__getstate__` returns only three attributes. Parameters and masters are keys here; in a deep copy
        # one memo copies each of them once. Pickled weights have no unrounded values, so masters are updated from
        # external writes first.
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
        state = {**super().__getstate__(), **{name: self.__dict__[name] for name in attributes}}
        # copies of masters have other versions: -1 marks those that wait for `write_back`
        versions = {parameter: version_of(local_of(master)) for parameter, master in self._masters.items()}
        state["_agreed"] = {
            parameter: (known, version if version == versions[parameter] else -1)
            for parameter, (known, version) in self._agreed.items()
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, and register its masters with the copied weights."""
        super().__setstate__(state)
        for parameter, master in self._masters.items():
            register_master(parameter, master, rounds=self._round_through_dtype)
            known, version = self._agreed[parameter]
            if known is not None:
                # -1: the next access compares a weight of TransformerEngine with its master
                known = -1 if self._is_te(parameter) else self._write_version(parameter)
            self._agreed[parameter] = (known, -1 if version == -1 else version_of(local_of(master)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; FP8 and low-precision parameters get masters."""
        super().add_param_group(param_group)
        if hasattr(self, "inner"):
            self.inner.add_param_group(self._with_masters(self.param_groups[-1]))
            self._share_options()

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group for the inner optimizer, with masters instead of parameters."""
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
        """Update masters and inner groups after parameters in the groups have changed.

        Other code replaces, moves or removes parameters there: Accelerate does it after `fully_shard`, for example.

        Raises:
            Fp8Error: If a parameter was added instead of replacing one, or replaces one of another shape.
        """
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            # sets, because some optimizers sort their parameters
            trained = {id(self._masters.get(parameter, parameter)) for parameter in group["params"]}
            if trained != {id(parameter) for parameter in inner_group["params"]}:
                self._exchange()
                return

    @torch.no_grad()
    def _exchange(self) -> None:
        """Rebuild the inner groups, and move masters and states to new parameters."""
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
        """Move master and state of a parameter to its replacement."""
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
            # otherwise other code has written to the parameter, and the master keeps these values
            if torch.equal(quantized, local_of(new).detach() if weight is None else weight.local_codes):
                local.copy_(values)
            self._agree(new)

    # ------------------------------------------------------------ masters

    def _is_te(self, parameter: torch.Tensor) -> bool:
        return self._kinds[parameter] not in (None, "native")

    def _trained(self, parameters: Iterable[torch.Tensor] | None = None) -> "list[Trained]":
        """Return the given parameters with masters and FP8 rows; None for all."""
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

        It has the parameter's shape, and is a DTensor if the parameter is. It is no copy: call `write_back` after
        changing it.
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
        """Replace a master's values; `write_back` or the next step quantizes them.

        Args:
            parameter: A parameter with a master (`owns`).
            values: Values of the local rows, [n, columns], in a floating-point dtype.

        Raises:
            KeyError: If the parameter has no master.
            RuntimeError: If the shape does not fit.
        """
        local = local_of(self._masters[parameter])
        local.copy_(values.reshape(local.shape))
        self._agree(parameter)
        if self._kinds[parameter] is None:
            # -1: the master counts as changed alone; otherwise the values of the parameter would replace it
            self._agreed[parameter] = (self._write_version(parameter), -1)

    @torch.no_grad()
    def write_back(self) -> None:
        """Quantize masters into FP8 weights, and round them into other parameters.

        Collective: call it on all ranks, after masters were changed. Delayed scaling restarts its history.
        """
        self._follow_groups()
        self._write_back("start")

    def _write_back(self, record: Record, trained: "list[Trained] | None" = None) -> None:
        """Write masters to parameters; see `WeightState.quantize_` for `record`."""
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
            known = 0 if isinstance(weight, WeightState) else self._write_version(parameter)
            self._agreed[parameter] = (known, version_of(local))

    def _write_version(self, parameter: torch.Tensor) -> int:
        """Return the version of a parameter; 0 for native weights.

        Writes to a native weight update its master at once, so that they need no version here.
        """
        return 0 if self._kinds[parameter] == "native" else version_of(local_of(parameter))

    def _agree(self, parameter: torch.Tensor) -> None:
        """Record that a parameter and its master are equal up to rounding."""
        self._agreed[parameter] = (self._write_version(parameter), version_of(local_of(self._masters[parameter])))

    def _follow_writes(self, trained: "list[Trained] | None" = None, *, stepping: bool = False) -> None:
        """Restart masters of parameters that other code has modified.

        Otherwise the next step would revert the modification.

        Args:
            trained: Parameters to check; None checks all.
            stepping: Whether a step begins, before which masters of loaded optimizers are compared, too.
        """
        restarted = 0
        for parameter, local, weight in self._trained() if trained is None else trained:
            known, version = self._agreed[parameter]
            if weight is None:
                edited = version != version_of(local)
                # Values are compared each time, because writes through `.data` do not change a version. If only the
                # master was changed, it waits for `write_back`.
                if not edited or known != self._write_version(parameter):
                    values = local_of(parameter).detach()
                    local.copy_(torch.where(local.to(values.dtype) == values, local, values))
                    self._agree(parameter)
                continue
            if isinstance(weight, WeightState):
                weight.check()  # loads in place reach the master here; other writes have reached it at once
            # After masters were loaded, their weights may be loaded next: only a step compares them.
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
        """Step the masters, then quantize them into the weights.

        Collective: call it on all ranks. It issues one all-reduce for each process group of FP8 weights.

        Args:
            closure: Evaluates the loss again, as for any optimizer. If the optimizer changes masters before it calls
                the closure (LBFGS, SAM), the weights are updated first.

        Returns:
            The result of `closure`, or None.

        Raises:
            Fp8Error: If an FP8 weight has a gradient and no master, because it was frozen when it was added.
        """
        if self._published and not self.state:  # `optimizer.state.clear()` resets the moments
            self.inner.state.clear()
        self._follow_groups()
        trained = self._trained()
        self._follow_writes(trained, stepping=True)
        self._share_options()
        self._assign_gradients()
        # `torch.distributed.checkpoint` makes a step with a learning rate of 0 so that the optimizer creates its state.
        # No value may change, and codes that were loaded before must stay.
        rates = [float(group.get("lr", 1)) for group in self.param_groups]
        idle = closure is None and not self.inner.state and not any(rates) and not self._moved()
        loss = self.inner.step() if closure is None else self.inner.step(self._evaluation_of(closure))
        # converted gradients are float32 copies, which would hold memory after the step
        for master in self._masters.values():
            master.grad = None
        # the step may have changed options or added keys, which `state_dict` and schedulers read from these groups
        self._share_options()
        if idle:
            for parameter in self._masters:
                self._agree(parameter)
        else:
            self._write_back("step", trained)
            for _, _, weight in trained:  # drop unrounded values, which the step has made stale
                if weight is not None and weight.preserve_until not in (None, "manual"):
                    weight.release()
        self._publish()
        return loss

    def _moved(self) -> bool:
        """Return whether a master changed since it last equaled its parameter."""
        return any(version_of(local_of(master)) != self._agreed[p][1] for p, master in self._masters.items())

    def _evaluation_of(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that first updates the weights from changed masters."""
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
        """Set the gradients of masters from their parameters.

        Raises:
            Fp8Error: If an FP8 weight has a gradient and no master.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, master = parameter.grad, self._masters.get(parameter)
                gradient = gradient_elsewhere(parameter) if gradient is None else gradient
                if master is not None:
                    # a float32 gradient is shared, others are converted
                    master.grad = None if gradient is None else gradient.to(torch.float32)
                elif gradient is not None and self._kinds[parameter] is not None:
                    raise Fp8Error(
                        f"An FP8 weight of shape {tuple(parameter.shape)} was frozen when this MasterOptimizer took "
                        "it, so it has no master, and it has a gradient now. Make the optimizer after unfreezing, or "
                        "leave frozen parameters out and give them to add_param_group then."
                    )

    def _share_options(self) -> None:
        """Synchronize the options of parameter groups with the inner optimizer.

        Options that were set on this optimizer, for example by a scheduler, are copied to the inner one. All others are
        copied back: optimizers such as Prodigy and schedule-free ones keep state in their groups, which must not be
        reset.
        """
        for index, (group, inner_group) in enumerate(zip(self.param_groups, self.inner.param_groups, strict=True)):
            shared = self._shared.get(index, {})
            for key, value in group.items():
                # `is not`, because comparing options that are tensors, such as a learning rate, waits for the device
                if key != "params" and (key not in shared or shared[key] is not value):
                    inner_group[key] = value
            self._shared[index] = {key: value for key, value in inner_group.items() if key != "params"}
            group.update(self._shared[index])

    # ------------------------------------------------------------ checkpoints

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, with masters as "master_param".

        State is listed by parameter, as for any optimizer; masters are included before the first step, too.
        """
        self._follow_groups()
        self._follow_writes()
        self._share_options()
        # Before the first step, the state is emptied again afterwards: torch.distributed.checkpoint treats an optimizer
        # with state as one that has stepped.
        self._publish(always=True)
        try:
            return super().state_dict()
        finally:
            self._publish()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load masters and state that `state_dict` returned.

        Values keep their dtype. FP8 weights do not change: load them into the model, before or after.

        Raises:
            Fp8Error: If the parameter groups have other sizes, or a master is missing. Nothing is loaded then.
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
        # `Optimizer.load_state_dict` would cast the state to the dtype of its parameter, often bfloat16.
        for ours, loaded in zip(self.param_groups, groups, strict=True):
            ours.update({key: value for key, value in loaded.items() if key not in ("params", "param_names")})
        for parameter, index in pairs:
            # a copy, because the master is popped from the caller's dictionary
            state, master = dict(state_dict["state"].get(index, {})), self._masters.get(parameter)
            if master is not None:
                master.copy_(state.pop(MASTER))
                # -1: the master counts as changed alone until the parameter changes or the next step
                version = None if self._kinds[parameter] is not None else self._write_version(parameter)
                self._agreed[parameter] = (version, -1)
            if state:
                device = local_of(parameter).device
                moved = {name: _copied(value, device, name) for name, value in state.items()}
                self.inner.state[parameter if master is None else master] = moved
        self._share_options()
        self._publish()

    def _publish(self, *, always: bool = False) -> None:
        """Rebuild `state` by parameter from the inner optimizer's, without copying tensors.

        Args:
            always: Whether to list masters before the first step, when the state is empty otherwise.
        """
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
    """Make FSDP2 gather weights again, given the ids of their local tensors."""
    if written:
        for shard in fsdp.shards():
            if id(shard.local) in written:
                shard.reshard()


def _copied(value: Any, device: torch.device, name: str) -> Any:
    """Return a copy of a loaded value on a device; steps stay."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if name == "step" else value.to(device).clone()

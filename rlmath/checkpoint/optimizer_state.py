"""Megatron's optimizer and schedule in the form in which they are saved, and back.

Megatron's distributed checkpoints were made for Apex's and Transformer Engine's Adam. Torch's Adam,
which is used without CUDA, would resume wrongly from such a state: all parameters would share one
``step`` tensor, which every parameter's update advances.
"""

from __future__ import annotations

from typing import Any

import torch

from rlmath.checkpoint.model_state import sharding
from rlmath.checkpoint.optimizer_shards import keep_to_bounded_memory


def initialize_states(optimizer: Any) -> None:
    """Give every parameter the state that Adam would give it before its first step.

    Adam makes it in its first step, but a checkpoint from before that step needs it, and so does a
    load.
    """
    for one in optimizer_parts(optimizer):
        inner = one.optimizer
        if not _is_torch_adam(inner):
            one.init_state_fn(inner)
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def sharded_optimizer_state(optimizer: Any, model_state: dict[str, Any], loading: bool) -> Any:
    """The optimizer's state with its place in the whole; a collective of the data-parallel group.

    Args:
        model_state: The model's sharded state, whose tensors must be the parameters themselves.
        loading: For a load (values are about to be replaced) rather than a save.
    """
    initialize_states(optimizer)
    for part in optimizer_parts(optimizer):
        if hasattr(part, "gbuf_ranges"):
            keep_to_bounded_memory(part)
    state = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=sharding())
    for part, own in zip(optimizer_parts(optimizer), _states(optimizer, state), strict=True):
        if _is_torch_adam(part.optimizer) and "param_state" not in own:
            # The plain optimizer leaves out a step of zero, and torch's Adam does not load without.
            own.get("optimizer", own)["state"].setdefault("common_step", torch.tensor(0.0))
    return state


def load_optimizer_state(optimizer: Any, state: Any) -> None:
    """Set the optimizer's state to one that was loaded.

    Hyperparameters stay those that the optimizer was built with: a resumed run may have others.
    """
    step = _saved_step(state)
    for part, own in zip(optimizer_parts(optimizer), _states(optimizer, state), strict=True):
        # Fused Adams keep the step in the group: that one is state.
        hyperparameters = [
            {key: value for key, value in group.items() if key not in ("params", "step")}
            for group in part.param_groups
        ]
        if "param_state" in own:
            # The saved state may have experts in a separate part and this one not, or vice versa:
            # tensors are matched by name, and only the step is taken from the groups.
            groups = [values | {"step": step} for values in hyperparameters]
            own["optimizer"] = {"param_groups": groups}
        _load_part(part, own)
        for group, values in zip(part.param_groups, hyperparameters, strict=True):
            group.update(values)


def _saved_step(state: Any) -> Any:
    """Adam's step, which all parts share; 0 where no group has one."""
    if not isinstance(state, dict):
        return 0
    for group in state.get("param_groups", []):
        if "step" in group:
            return group["step"]
    return next((step for value in state.values() if (step := _saved_step(value))), 0)


def _load_part(part: Any, state: dict[str, Any]) -> None:
    tensors = state.pop("param_state", None)
    torch_adam = _is_torch_adam(part.optimizer)
    if tensors is not None and not torch_adam:
        # A fused Adam that loads a state makes both moments again, beside the existing ones: 8
        # bytes a parameter of GPU memory. Tensors are loaded below, into the existing ones;
        # besides them there is the step.
        for group, saved in zip(part.param_groups, state["optimizer"]["param_groups"], strict=True):
            group["step"] = int(saved["step"])
    else:
        part.load_state_dict(state)
    steps = _take_steps(part.optimizer) if torch_adam else {}
    if tensors is not None:
        # Main parameters are leaves that want gradients, and Megatron writes into them. It expects
        # no step among Adam's tensors.
        with torch.no_grad():
            part.load_parameter_state_from_fully_reshardable(tensors)
    for parameter, step in steps.items():
        part.optimizer.state[parameter]["step"] = torch.tensor(step)


def _take_steps(inner: Any) -> dict[torch.Tensor, float]:
    """Remove and return the steps that Megatron set; it omits steps of zero."""
    for group in inner.param_groups:
        # A copy for its own use; torch's Adam looks at the parameters' only.
        group.pop("step", None)
    return {
        parameter: float(inner.state[parameter].pop("step", 0.0))
        for group in inner.param_groups
        for parameter in group["params"]
    }


def clear_optimizer_state(optimizer: Any) -> None:
    """Adam's moments and step as before its first step; parameters and schedule stay."""
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            if "step" in group:  # Where fused Adams keep it.
                group["step"] = 0
        for state in inner.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


def load_schedule_state(scheduler: Any, state: dict[str, Any]) -> None:
    """Resume at the saved step of the schedule that the settings of this run describe."""
    scheduler.num_steps = int(state["num_steps"])
    scheduler.step(0)


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers of a rank that have parameters: dense ones, and experts apart."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _states(optimizer: Any, state: Any) -> list[Any]:
    """The part of a state that belongs to each of the optimizer's parts."""
    count = len(optimizer_parts(optimizer))
    return [state] if count == 1 else [state[index] for index in range(count)]


def _is_torch_adam(inner: Any) -> bool:
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)

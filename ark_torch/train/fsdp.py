"""Resets FSDP2's host state, so that a step can begin: after a failed one, and after an evaluation.

A failed capture leaves gathered parameters in the capture's memory, and events recorded in it. The reset covers what
FSDP2 itself resets at the end of a backward pass.
"""

from __future__ import annotations

from typing import Any


def reset(modules: list[Any]) -> None:
    """Resets every fully_shard module to its idle state, with sharded parameters."""
    for module in modules:
        state = module._get_fsdp_state()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        context, communication, group = state._state_ctx, state._comm_ctx, state._fsdp_param_group
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        context.post_optim_event = None
        for name in ("all_gather_state", "reduce_scatter_state"):
            if hasattr(communication, name):
                setattr(communication, name, None)
        if hasattr(communication, "post_forward_order"):
            communication.post_forward_order.clear()
        if group is None:
            continue
        group._training_state = idle
        for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"):
            if hasattr(group, name):
                setattr(group, name, None)
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if getattr(parameter, "_unsharded_param", None) is not None:
                parameter._unsharded_param.grad = None
        module.reshard()


def reshard(modules: list[Any]) -> None:
    """Frees parameters that an evaluation has left gathered, as FSDP2 does with the root's.

    A capture would not gather them again, and a replay would not free them: both would go on with old weights.
    """
    for module in modules:
        if not all(group.is_sharded for group in _groups_of(module)):
            module.reshard()


def _groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # of PyTorch 2.11 and later
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []

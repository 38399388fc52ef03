"""FSDP2's state on the host after a step that broke off: as between two steps, so that the next one can begin.

A capture that fails leaves parameters gathered, in memory that goes with the capture, and events that were recorded in
it. What is reset here is what FSDP2's own end of a backward pass resets.
"""

from __future__ import annotations

from typing import Any


def reset(modules: list[Any]) -> None:
    """Brings every module of fully_shard back to its idle state, with sharded parameters."""
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

"""Whether a trace in this very process is what a new process would make of it, as what is kept must
be."""

from __future__ import annotations

import sys
import threading

from planner.core.schema import FactoryModel, Model
from planner.ledger.key import is_as_imported


def may_trace_here(model: Model) -> bool:
    """Where torch is imported and as it begins; no other thread may be at work with it; and what is
    imported of a factory's files must be what they hold."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and threading.current_thread() is threading.main_thread()
        and torch.is_grad_enabled()
        and torch.get_default_dtype() is torch.float32
        and not torch.is_inference_mode_enabled()
        and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        and torch._C._len_torch_function_stack() == 0  # a default device is one of these modes
        and torch._C._len_torch_dispatch_stack() == 0
        and (not isinstance(model, FactoryModel) or is_as_imported(model.parts[0]))
    )

"""The ledger of any real module: two training steps run on fake tensors, as CUDA would run them.

Needs torch: imported only by what traces a real module.
"""

from planner.trace.faults import BrokenTraceError
from planner.trace.ledger import trace_estimate
from planner.trace.run import Trace, trace_training

__all__ = ["BrokenTraceError", "Trace", "trace_estimate", "trace_training"]

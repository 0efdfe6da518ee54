"""The same numbers from the real module, run under FakeTensorMode as CUDA would run it.

Needs torch: imported only by what traces a real module.
"""

from planner.trace.cpu_memory import measure_cpu_memory_events
from planner.trace.ledger import trace_estimate
from planner.trace.run import BrokenTraceError, Trace, trace_training

__all__ = [
    "BrokenTraceError",
    "Trace",
    "measure_cpu_memory_events",
    "trace_estimate",
    "trace_training",
]

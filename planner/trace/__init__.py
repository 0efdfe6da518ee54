"""The same numbers from the real module, run under FakeTensorMode as CUDA would run it.

Needs torch: imported only by what traces a real module.
"""

from planner.trace.run import Trace, trace_training

__all__ = ["Trace", "trace_training"]

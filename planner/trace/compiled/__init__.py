"""What `torch.compile` makes of a real module: its graph, its partition, its buffers.

`partition` asks torch itself, as far as the two halves of the graph; `buffers` says which kernels
Inductor makes of each half and what they keep in memory; `module` runs them in the training step
that is traced. Needs torch.
"""

from planner.trace.compiled.module import CompiledGraph, compile_graph, run_compiled
from planner.trace.compiled.partition import Partition, partition_compiled

__all__ = ["CompiledGraph", "Partition", "compile_graph", "partition_compiled", "run_compiled"]

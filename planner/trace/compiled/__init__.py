"""What `torch.compile` makes of a real module: its graphs, their partition, their buffers.

`partition` asks torch itself, as far as the two halves of a graph; `buffers` says which kernels
Inductor makes of each half and what they keep in memory; `module` runs them in the training step
that is traced; `regions` says what is compiled, the model or each of its blocks. Needs torch.
"""

from planner.trace.compiled.module import CompiledGraph
from planner.trace.compiled.partition import Partition, partition_compiled
from planner.trace.compiled.regions import Regions, compile_regions

__all__ = ["CompiledGraph", "Partition", "Regions", "compile_regions", "partition_compiled"]

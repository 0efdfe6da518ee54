"""An emulated GPU under torch's own CUDA code: for looking at memory where no GPU is."""

from planner.machine.emulated.machine import (
    EmulatedGpu,
    EmulatedMachine,
    emulated_gpu,
    holding,
    is_emulated,
    started,
)

__all__ = ["EmulatedGpu", "EmulatedMachine", "emulated_gpu", "holding", "is_emulated", "started"]

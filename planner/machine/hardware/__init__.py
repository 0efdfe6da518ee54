"""GPUs: the catalogue, and what a driver lists. Light to import: no torch, no pydantic."""

from planner.machine.hardware.catalogue import all_gpus, find_gpu, recognise_gpu
from planner.machine.hardware.gpu import DetectedGpu, Gpu

__all__ = ["DetectedGpu", "Gpu", "all_gpus", "find_gpu", "recognise_gpu"]

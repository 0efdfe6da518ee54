"""GPUs: the catalogue, and what a driver lists. Light to import: no torch, no pydantic."""

from planner.machine.hardware.gpu import DetectedGpu, Gpu, all_gpus, find_gpu, recognise_gpu

__all__ = ["DetectedGpu", "Gpu", "all_gpus", "find_gpu", "recognise_gpu"]

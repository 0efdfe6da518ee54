"""GPUs: the catalogue, and what is in this machine. Light to import: no torch, no pydantic."""

from planner.hardware.catalogue import all_gpus, find_gpu, recognise_gpu
from planner.hardware.detect import DetectedGpu, detect_gpus
from planner.hardware.gpu import Gpu

__all__ = ["DetectedGpu", "Gpu", "all_gpus", "detect_gpus", "find_gpu", "recognise_gpu"]

"""DeepSpeed's ZeRO over the ledger of one device: what each stage holds, copies and sends."""

from planner.step.zero.weaving import Woven, on_one_device, unknown, weave_zero

__all__ = ["Woven", "on_one_device", "unknown", "weave_zero"]

"""DeepSpeed's ZeRO over the ledger of one device: what each stage holds, copies and sends."""

from planner.step.zero.insert_events import ZeroLedger, insert_zero_events, on_one_device, unknown

__all__ = ["ZeroLedger", "insert_zero_events", "on_one_device", "unknown"]

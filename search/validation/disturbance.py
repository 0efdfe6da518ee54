"""What of a record may be another's doing: the budget's, or that of other processes."""

from __future__ import annotations

from planner.schema import MeasurementRecord

# Words of the flags that meters leave where bytes may not be the setting's own.
OTHER_PROCESSES = "other processes"
CAUGHT_SHORTAGES = ("cached memory was given back", "out-of-memory errors were caught")


def is_disturbed(record: MeasurementRecord) -> bool:
    """Whether a failure may be another's: the budget ended it, or others held or took some of the
    device, all of which a row of a matrix may have."""
    whole = record.device.memory_cap_bytes or record.device.total_bytes
    return record.judged_in(whole).inconclusive


def has_own_bytes(record: MeasurementRecord) -> bool:
    """Whether the record's bytes are those of its setting alone: neither counted with what other
    processes hold, nor after memory ran short and cached segments were given back."""
    words = (OTHER_PROCESSES, *CAUGHT_SHORTAGES)
    return not any(word in flag for word in words for flag in record.flags)

"""Run in place of what measures a device's rates: those of a card, without torch."""

from __future__ import annotations

import json
from dataclasses import asdict

from planner.machine.hardware import find_gpu
from planner.throughput.prediction import rates_for

if __name__ == "__main__":
    print(json.dumps(asdict(rates_for(find_gpu("a100-sxm-40gb")))))

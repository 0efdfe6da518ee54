"""What a search starts to measure the device's rates, with a thirtieth of the time for each."""

from __future__ import annotations

from planner.throughput import bench
from search.probe.device_rates import main

bench._TRIAL_SECONDS /= 30

if __name__ == "__main__":
    main()

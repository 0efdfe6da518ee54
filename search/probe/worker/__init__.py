"""The worker's side of a probe: the only place that trains."""

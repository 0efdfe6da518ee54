"""The tuner's side of a probe: it starts a worker, listens, and leaves no process behind."""

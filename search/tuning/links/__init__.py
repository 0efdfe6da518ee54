"""The link between this machine's devices: collectives timed over a world of ranks."""

"""The link between this machine's devices: what of it is to be timed, what was, which it is."""

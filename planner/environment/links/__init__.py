"""The link between this machine's devices: timed by ranks of their own, kept, read back."""

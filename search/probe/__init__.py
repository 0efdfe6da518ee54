"""One probe: a short real training run of one setting, in a process of its own."""

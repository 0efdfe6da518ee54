"""What is seen on a device beside measurements: each sight in a process of its own."""

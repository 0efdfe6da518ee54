"""What to probe next."""

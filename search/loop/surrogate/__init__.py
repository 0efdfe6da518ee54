"""What is expected of settings that were not probed: prior, posterior and the cost of a probe."""

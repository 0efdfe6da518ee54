"""What a search has found: the recommendation, and why settings were not probed."""

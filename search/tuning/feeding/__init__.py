"""Step and loader together: which of them bounds, and the run that proves it."""

"""A page of charts, tables and text in one HTML file: it knows nothing of steps and of searches."""

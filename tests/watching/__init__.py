"""A running training, held against its plan."""

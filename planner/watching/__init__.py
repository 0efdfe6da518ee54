"""A running training, held against its plan: `planner.watch`, and hooks for trainers."""

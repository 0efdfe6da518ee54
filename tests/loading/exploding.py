"""A module of the user's that must not be imported to find it."""

raise RuntimeError("imported")

"""A program of the user's own, unchanged, on an emulated GPU: what it needs, where, and whether it
fits."""

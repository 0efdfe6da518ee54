"""Window attention by itself: what is timed, and how."""

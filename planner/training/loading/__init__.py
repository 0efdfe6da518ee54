"""The user's data: found and named without torch, and loaded as a training loads them."""

"""How fast a loader feeds: probes of it, each in a process of its own."""

"""Facts judged, one file per layer. Every judge takes the facts and yields findings."""

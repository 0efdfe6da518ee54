"""One setting under torch's profiler: where its time goes, measured, beside what was predicted."""

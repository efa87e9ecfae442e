"""Drive a live cluster at more than it can serve: `python -m benchmarks.overload`."""

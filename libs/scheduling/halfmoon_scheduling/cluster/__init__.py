"""Track the live workers, what is promised at each of them, and workers that change role."""

"""Hold what one start of a worker is made of, whatever its role."""

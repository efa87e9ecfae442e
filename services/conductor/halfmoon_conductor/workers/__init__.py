"""Drive the scheduling core and link it to the workers."""

"""Help threads that know nothing of transfers."""

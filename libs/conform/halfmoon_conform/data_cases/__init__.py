"""Read and run the cases of `cases/*.yaml`."""

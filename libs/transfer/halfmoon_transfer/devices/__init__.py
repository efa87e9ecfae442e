"""Register device memory as regions, through the drivers for CUDA and for an emulated device."""

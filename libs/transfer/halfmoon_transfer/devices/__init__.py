"""Memory of devices as regions: by pointers and through host memory, whatever the device."""

"""Between processes of one host: device memory opened by handle, copied by the device."""

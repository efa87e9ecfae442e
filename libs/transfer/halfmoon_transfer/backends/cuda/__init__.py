"""Copy between processes of one host in device memory that was opened by handle."""

"""Between processes of one host: memory mapped by both, copied without a system call."""

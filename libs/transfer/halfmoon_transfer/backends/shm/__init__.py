"""Copy between processes of one host in memory that both have mapped, without a system call."""

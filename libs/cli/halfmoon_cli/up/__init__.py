"""Start the services of a cluster as processes of this machine: `halfmoon up`."""

"""Choose the next batch, the next rail and the nearest NIC, without sockets or clocks."""

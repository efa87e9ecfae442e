"""Put and get blocks in kvstores of several projects; see `__main__`."""

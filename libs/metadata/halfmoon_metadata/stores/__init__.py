"""Implement the metadata store: in memory, over HTTP, in Redis and in etcd."""

"""The metadata stores: in memory, over HTTP, in Redis, in etcd."""

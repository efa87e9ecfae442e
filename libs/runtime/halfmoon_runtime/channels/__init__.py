"""Carry messages between services, over ZeroMQ or in memory: workers bind ports, callers dial."""

"""The KV pool from outside: its nodes, and bytes under keys."""

"""Define what services exchange: ids, block hashes, messages, the codec and its errors.

Nothing here opens a socket, reads a clock or runs a task. A team that replaces one service
with its own needs this package's JSON Schema and golden bytes, and nothing else of ours.
"""

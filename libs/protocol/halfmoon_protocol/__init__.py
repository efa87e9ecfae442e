"""What Halfmoon's parts say to each other: ids, block hashes, messages, codec, errors.

Nothing here opens a socket, reads a clock or runs a task. A team that replaces one service
with its own needs this package's JSON Schema and golden bytes, and nothing else of ours.
"""

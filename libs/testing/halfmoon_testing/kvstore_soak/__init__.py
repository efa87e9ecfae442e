"""Many operations on several live nodes under bad luck, compared with what the nodes owe.

Clients put, get, copy and drop prompts at random, and some leave without a word (`acts`).
Meanwhile nodes are killed, stopped and continued, their disks fill up, bytes are overwritten on
disk and in memory, and the metadata server goes away (`misfortunes`). Beside them listens what
listens in a conductor (`clients`). Every block that is read is compared byte by byte with what it
must be; what a node owes (`ledger`) it must serve.

Choices follow from the seed; which of two operations comes first does not. Processes and files
are the caller's (`scene.Pool`); tests/kvstore has some. No part of a node.
"""

"""Operate several live kvstore nodes under faults, and compare them with a model.

Clients put, get, copy and drop prompts at random, and some disconnect abruptly (`operations`).
Meanwhile nodes are killed, stopped and continued, and their disks fill up. Bytes are overwritten on
disk and in memory, and the metadata server goes away (`faults`). A listener follows the KV events
as a conductor does (`connections`). Every block read is compared byte by byte with the right bytes;
a node must serve each block that it owes (`model`).

Choices follow from the seed; the order of concurrent operations does not. The caller brings
processes and files (`harness.KvstoreProcesses`), as tests/kvstore does.
"""

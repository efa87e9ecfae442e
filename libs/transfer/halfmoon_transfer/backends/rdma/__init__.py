"""Over RDMA verbs: one-sided reads and writes by the NICs, several rails, a side channel."""

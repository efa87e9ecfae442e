"""Run a forward over the paged KV pool: plan, tensors, attention, and a probe of the model."""

"""Serve conductors as a prefill or a decode worker, with any engine over one pool of pages."""

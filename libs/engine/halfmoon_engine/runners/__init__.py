"""Run a model over pages: by transformers, or natively."""

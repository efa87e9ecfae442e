"""Predict how long things will take: costs of prefill and decode, and decode's load later on."""

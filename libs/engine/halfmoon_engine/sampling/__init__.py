"""Choose tokens from logits: sampling parameters, log probabilities, grammar masks."""

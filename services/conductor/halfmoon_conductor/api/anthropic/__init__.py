"""Define the shapes of Anthropic's Messages API."""

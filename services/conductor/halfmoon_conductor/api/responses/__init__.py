"""Define the shapes of OpenAI's Responses API."""

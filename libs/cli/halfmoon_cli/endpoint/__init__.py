"""An endpoint that speaks OpenAI's API as its client sees it: where it is, what it says."""

"""Tell what a model thinks before it answers apart from the answer."""

"""Serve operators: the web page, and the /debug routes that it reads."""

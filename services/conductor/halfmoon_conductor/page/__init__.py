"""What operators look at: the web page, and the /debug routes that it reads."""

"""Define the plain data that passes between the rooms, from a request to its tokens."""

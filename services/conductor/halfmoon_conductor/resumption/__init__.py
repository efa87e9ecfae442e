"""Let clients go on with a stream whose connection broke: keep events, number them, bound both."""

"""Write durations for people."""


def describe_seconds(value: float) -> str:
    """Return a duration in seconds or milliseconds, with two or three digits."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.2g} ms"

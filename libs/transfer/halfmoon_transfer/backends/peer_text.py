"""Make a peer's text fit for logs and errors."""


def printable_text(text: str) -> str:
    """Replace characters that are not printable: a peer must not write lines of our log."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "\ufffd" for each in text)

"""Define how byte-level vocabularies write bytes as characters.

Printable Latin-1 characters stand for themselves. The other bytes, in order, are the characters
from U+0100 on (GPT-2's alphabet, which all byte-level tokenizers keep).
"""

_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _VISIBLE]

#: The character of each byte.
BYTE_TEXTS = {byte: chr(byte) for byte in _VISIBLE} | {
    byte: chr(0x100 + index) for index, byte in enumerate(_OTHERS)
}
#: The byte of each character.
BYTE_OF = {text: byte for byte, text in BYTE_TEXTS.items()}

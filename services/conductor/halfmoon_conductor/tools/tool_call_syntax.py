"""How models write that they call a tool.

*hermes* (Qwen too): ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of
them, anywhere. *llama3_json*: the whole answer is ``{"name": …, "parameters": {…}}``.
"""

from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def tool_call_format_of(template: str) -> ToolCallFormat | None:
    """What a model whose chat template this is has learned to write; None: no tools."""
    if "tools" not in template:
        return None
    if OPEN in template:
        return "hermes"
    return "llama3_json" if '"parameters"' in template else None

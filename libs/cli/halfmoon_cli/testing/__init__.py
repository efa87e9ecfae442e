"""For tests of commands: an endpoint that misbehaves as told, and a terminal to run them on."""

from halfmoon_cli.testing.endpoint import Script, ScriptedEndpoint
from halfmoon_cli.testing.terminal import Terminal, on_terminal

__all__ = ["Script", "ScriptedEndpoint", "Terminal", "on_terminal"]

"""Import a subcommand once it is named: together, their imports take more than a second.

A subcommand's module imports what takes long within its functions: its own `--help` is quick too.
"""

import importlib
from collections.abc import Callable
from typing import Any

import msgspec
import typer
from typer.core import TyperGroup


class LazyCommand(msgspec.Struct, frozen=True):
    """Hold where a subcommand is, and what the list of commands says of it."""

    #: `module:attribute` of a function or of a `typer.Typer` with commands of its own.
    place: str
    #: The first paragraph of its docstring.
    summary: str

    def load(self) -> Callable[..., Any] | typer.Typer:
        """Import the subcommand."""
        module, _, attribute = self.place.partition(":")
        command: Callable[..., Any] | typer.Typer = getattr(
            importlib.import_module(module), attribute
        )
        return command


class LazyGroup(TyperGroup):
    """A group of commands that exchanges a command's placeholder for the command on its use.

    The placeholders are enough for `--help`, for suggestions and for shell completion.
    """

    #: By name; what `lazy_app` was given.
    lazy_commands: dict[str, LazyCommand]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the command that the first argument names, then go on as any group does."""
        if args and (lazy := self.lazy_commands.get(args[0])) is not None:
            self.commands[args[0]] = _built(args[0], lazy.load())
        return super().resolve_command(ctx, args)


def lazy_app(commands: dict[str, LazyCommand], **settings: Any) -> typer.Typer:
    """Return an application whose commands are imported on use.

    Args:
        commands: by name, in the order of `--help`.
        settings: those of `typer.Typer`.
    """
    group = type("LazyGroupOf", (LazyGroup,), {"lazy_commands": commands})
    app = typer.Typer(cls=group, **settings)
    for name, lazy in commands.items():
        app.command(name, help=lazy.summary)(_placeholder)
    return app


def _placeholder() -> None:
    raise AssertionError("a placeholder was run instead of its command")


def _built(name: str, command: Callable[..., Any] | typer.Typer) -> Any:
    """Build what typer makes of a command within a group."""
    host = typer.Typer(add_completion=False)
    if isinstance(command, typer.Typer):
        host.add_typer(command, name=name)
    else:
        host.command(name)(command)
    host.callback()(lambda: None)
    return typer.main.get_group(host).commands[name]

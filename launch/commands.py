"""What commands and groups of them look like in `--help`. Knows typer; nothing of what they do."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _without_bool(parameters: list[Any]) -> list[Any]:
    # A switch takes no value: typer would show one, <bool>.
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = " "
    return parameters


class Command(TyperCommand):
    """A command whose switches are shown without a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_bool(super().get_params(ctx))


class Group(TyperGroup):
    """The same for the flags before a command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_bool(super().get_params(ctx))

"""What commands and groups of them look like in `--help`, and what they say to unknown flags. Knows
typer and the flags of settings; nothing of what commands do."""

from __future__ import annotations

import difflib
from typing import Any

from typer.core import TyperCommand, TyperGroup

from launch.settings import FLAGS

_NEAR = 0.75  # likeness of two flags that may be a slip of each other


def _plain(parameters: list[Any]) -> list[Any]:
    """Parameters as the help should show them: a switch takes no value (typer would show one,
    <bool>), and an argument is called what it is called, without its type and braces."""
    for parameter in parameters:
        name = parameter.metavar
        if getattr(parameter, "is_flag", False) and name is None:
            parameter.metavar = " "
        elif name and getattr(parameter, "param_type_name", "") == "argument":
            usage = name if parameter.required else f"[{name}]"
            parameter.display_type_rich = lambda ctx: None
            parameter._usage_display_name = lambda usage=usage: usage
    return parameters


class Command(TyperCommand):
    """A command whose switches are shown without a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # the parser's own type lies in a private module of typer
            if hasattr(error, "possibilities") and hasattr(error, "option_name"):
                self._explain(ctx, error)
            raise

    def _explain(self, ctx: Any, error: Any) -> None:
        """Of an unknown flag: that it is another command's, or which ones are really near."""
        name = error.option_name
        if any(name == flag.option for flag in FLAGS):
            error.possibilities = []
            error.message = f"{name} is a setting that `{self.name}` does not use"
            return
        own = [x for p in self.get_params(ctx) for x in (*p.opts, *p.secondary_opts)]
        error.possibilities = difflib.get_close_matches(name, own, cutoff=_NEAR)


class Group(TyperGroup):
    """The same for the flags before a command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

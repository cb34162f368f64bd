"""What commands and groups of them look like in `--help`, and what they say to unknown flags. Knows
typer and the flags of settings; nothing of what commands do."""

from __future__ import annotations

import difflib
import inspect
import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

from launch.settings import FLAGS
from moeserve.errors import ConfigError

# What typer's checks say of a value, and what is said here.
_MUST = (
    (re.compile(r"greater than or equal to (\S+)"), r"at least \1"),
    (re.compile(r"less than or equal to (\S+)"), r"at most \1"),
    (re.compile(r"greater than (\S+)"), r"above \1"),
    (re.compile(r"less than (\S+)"), r"below \1"),
    (re.compile(r"valid integer"), "a whole number"),
    (re.compile(r"valid number"), "a number"),
)
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


def _in_paragraphs(text: str | None) -> str | None:
    """Without the line ends of the source: the terminal's width decides."""
    return None if text is None else re.sub(r"(?<!\n)\n(?![\n ])", " ", inspect.cleandoc(text))


def _problem_with_value(error: Any, given: list[str]) -> str | None:
    """In the words of all other checks: the flag, what it was given, what it must be. None: it is
    another kind of error."""
    parameter, said = getattr(error, "param", None), str(getattr(error, "message", ""))
    if parameter is None or getattr(parameter, "param_type_name", "") != "option":
        return None
    for form, must in _MUST:
        if match := form.search(said):
            must = match.expand(must)
            break
    else:
        return None
    for number, word in enumerate(given):
        name, equals, value = word.partition("=")
        if name in parameter.opts:
            value = value if equals else " ".join(given[number + 1 : number + 2])
            return f"{name} {value!r}: must be {must}"
    return f"{parameter.opts[-1]}: must be {must}"


class Command(TyperCommand):
    """A command whose switches are shown without a value."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.help = _in_paragraphs(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # the parser's own type lies in a private module of typer
            if hasattr(error, "possibilities") and hasattr(error, "option_name"):
                self._explain(ctx, error)
            problem = _problem_with_value(error, given)
            if problem is not None:
                raise ConfigError([problem]) from None
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

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.help = _in_paragraphs(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

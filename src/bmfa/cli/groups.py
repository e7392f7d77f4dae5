"""Commands as documented functions: options are parameters, and their help is the docstring's `Args`.

A parameter that is a dataclass is a group of options: typer sees its fields in its place.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

from typer import Argument, Option

_ENTRY = re.compile(r"^    (\w+)(?: \((.*?)\))?: (.*(?:\n        .*)*)", re.MULTILINE)
POSITIONAL = Argument()


def expanded(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that typer runs in place of a command.

    Example:
        >>> def screen(image: str, limit: int = 3) -> None:
        ...     '''Show some images.
        ...
        ...     Args:
        ...         image (IMAGE): A file.
        ...         limit (N): Number of images.
        ...     '''
        >>> limit = inspect.signature(expanded(screen)).parameters["limit"]
        >>> get_args(limit.annotation)[1].help, limit.default
        ('Number of images.', 3)
    """
    hints = get_type_hints(run, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(run).parameters.items():
        if name in groups:
            entries, kinds = (
                _entries(groups[name]),
                get_type_hints(groups[name], include_extras=True),
            )
            parameters += [
                _declared(one.name, kinds[one.name], one.default, entries)
                for one in fields(groups[name])
            ]
        else:
            parameters.append(_declared(name, hints[name], parameter.default, _entries(run)))

    @wraps(run)
    def with_fields(**values: Any) -> Any:
        made = {
            name: kind(**{one.name: values.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
        }
        return run(**made, **values)

    with_fields.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_fields.__annotations__ = {one.name: one.annotation for one in parameters}
    with_fields.__doc__ = (inspect.getdoc(run) or "").partition("\n\nArgs:")[0]
    return with_fields


def _entries(thing: Any) -> dict[str, tuple[str, str]]:
    """Return the metavar and the text of every entry in the `Args` of a docstring, or of a class and
    its bases."""
    classes = reversed(thing.__mro__) if inspect.isclass(thing) else [thing]
    found: dict[str, tuple[str, str]] = {}
    for one in classes:
        arguments = inspect.cleandoc(one.__doc__ or "").partition("\nArgs:\n")[2]
        for name, metavar, text in _ENTRY.findall(arguments):
            found[name] = (metavar, " ".join(text.split()))
    return found


def _declared(
    name: str, kind: Any, default: Any, entries: dict[str, tuple[str, str]]
) -> inspect.Parameter:
    """Return a parameter with the option, or the positional argument, that it declares."""
    bare, *given = get_args(kind) if hasattr(kind, "__metadata__") else (kind,)
    metavar, text = entries.get(name, ("", ""))  # python -OO has no docstrings
    if POSITIONAL in given:
        info: Any = Argument(metavar=metavar, help=text)
    else:
        info = Option(f"--{name.replace('_', '-')}", metavar=metavar or None, help=text)
        info.callback = given[0] if given else None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[bare, info]
    )

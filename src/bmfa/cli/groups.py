"""Groups of options: a command takes a dataclass, and the command line its fields as options."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

from typer import Option


def option(usage: str, help: str, **more: Any) -> Any:
    """Declare an option as its help page shows it, for example `option("--limit N", "...")`."""
    name, _, metavar = usage.partition(" ")
    return Option(name, metavar=metavar or None, help=help, **more)


def expanded(run: Callable[..., Any]) -> Callable[..., Any]:
    """Give typer a function in which every parameter that is a dataclass is replaced by its fields."""
    hints = get_type_hints(run, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(run).parameters.values():
        parts = [parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name])]
        if parameter.name in groups:
            kinds = get_type_hints(groups[parameter.name], include_extras=True)
            parts = [
                inspect.Parameter(
                    one.name,
                    parameter.KEYWORD_ONLY,
                    default=one.default,
                    annotation=kinds[one.name],
                )
                for one in fields(groups[parameter.name])
            ]
        parameters += parts

    @wraps(run)
    def with_fields(**values: Any) -> Any:
        made = {
            name: kind(**{one.name: values.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
        }
        return run(**made, **values)

    with_fields.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_fields.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_fields

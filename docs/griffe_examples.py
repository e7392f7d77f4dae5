"""A griffe extension: "Example:" sections of docstrings are rendered like "Examples:" sections."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section before the docstring is parsed; griffe knows only the plural."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )

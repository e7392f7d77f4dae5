"""All figures of the page by name; `build` loads the modules that draw them."""

from bmfa.evidence.page.build import FIGURES as ALL

__all__ = ["ALL"]

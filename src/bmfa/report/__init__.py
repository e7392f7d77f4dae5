"""Records to figures and one page."""

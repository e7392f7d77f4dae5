"""What the chapters of the page share; `build` and `figures` put the chapters together."""

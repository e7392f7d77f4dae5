"""Ways to compute the same thing: reference (the specification), eager (torch)."""

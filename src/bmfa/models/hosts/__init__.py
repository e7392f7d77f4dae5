"""How the attention of each library is found and replaced."""

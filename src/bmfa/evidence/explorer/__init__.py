"""The explorer: one image of a model on a page where query, layer, head and rule can be chosen."""

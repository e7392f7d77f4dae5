"""Plans of `bmfa tune`: their figure."""

"""Pictures and annotations in their usual layouts, and the embedded picture set."""

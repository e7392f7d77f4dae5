"""Rules at equal leaves and merging policies at equal operations, on the drawn task with masks."""

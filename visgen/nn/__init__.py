"""Building blocks without an opinion on the task."""

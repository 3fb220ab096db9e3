"""Programs that build data sets."""

"""Makes the catalogue and the files agree at a start, and rebuilds a lost catalogue."""

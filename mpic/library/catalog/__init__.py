"""The catalogue: one SQLite database of a library's contents."""

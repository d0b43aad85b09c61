"""The presses, one file each."""

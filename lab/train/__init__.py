"""Trains the demo models on generated data (`mpic train`)."""

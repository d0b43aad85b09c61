"""Trains adapters of any model (`mpic train packet`)."""

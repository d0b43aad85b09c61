"""Copies of libraries: backup and restore, archives, bulk import of references."""

"""Copies of libraries: one format of backups, and what reads them; bulk import of references; gifts to other users."""

"""Backups and how they are restored; imports and syncs of references."""

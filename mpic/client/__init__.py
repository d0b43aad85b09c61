"""Talking to a running server."""

from mpic.client.http import DEFAULT_URL, APIError, Client, data_url

__all__ = ["DEFAULT_URL", "APIError", "Client", "data_url"]

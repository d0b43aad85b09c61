"""The HTTP server: an OpenAI-shaped REST API over a library and an engine."""

from mpic.server.app import create_app

__all__ = ["create_app"]

"""The web interface at ``/ui``: chat, library, references and policies over the REST API of the same process.

It is a client like any other: what it may see and do is what the API lets the logged-in user's key see and do.
``gate.py`` stands in front of Gradio, ``api.py`` behind it; between them there are only pages.
"""

from mpic.webui.mount import mount

__all__ = ["mount"]

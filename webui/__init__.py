"""The web interface at ``/ui``: a Gradio app, which calls the REST API through the Python SDK with the visitor's key.

``app.py`` builds the visible page, ``gate.py`` decides who may come in, and ``page.py`` has the routes that are not
Gradio's. Gradio is imported when the page is first asked for.
"""

from mpic.webui.mount import mount

__all__ = ["mount"]

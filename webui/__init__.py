"""The web interface at ``/ui``: chats, library, references, savings and policies over the REST API of the same process.

The page is plain HTML, CSS and JavaScript (``static/``), without a build step. It is a client like any other: its
requests are the API's own, to which ``proxy.py`` adds the key of the logged-in user. Here are only the files of the
page, the login, thumbnails, and facts about the server for the page (``about.py``).
"""

from mpic.webui.mount import mount

__all__ = ["mount"]

"""``mpic ls``: short for ``mpic files list``."""

from __future__ import annotations

from mpic.cli.common import client_command, command_app
from mpic.cli.files import list_

app = command_app()
client_command(app, "ls")(list_)

"""``mpic keys``."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from mpic.cli.common import Json, command_app, err, print_json, print_listing, print_result
from mpic.config import load_config
from mpic.keys import Key, KeyLimits, KeyStore

app = command_app(
    "API keys: who may call the server, as which user, and how much.\n\n"
    "Without keys the server answers this machine only, without asking who it is. From the first key on, every request "
    "needs a key, that of this machine and of the web page too "
    "(`Authorization: Bearer KEY`), and `mpic serve --host 0.0.0.0` is allowed. Keys may be made and revoked while the "
    "server runs; a revoked key is refused from its next request on, and its running answers end within a second.\n\n"
    "What was uploaded before belongs to the user `local`: `mpic keys create local` makes a key for it. To copy a file "
    "to another user: `mpic files content NAME` with that key, then `mpic upload` with the other's. The way "
    "back to a server without keys: stop it, remove `keys.sqlite` and `keys.needed` from its data folder, "
    "start it; uploads of the keys' users stay, and are found again when their keys are made again."
)

DataDir = Annotated[Path | None, typer.Option(help="the library's folder, as given to mpic serve")]
Config = Annotated[Path | None, typer.Option(help="the TOML file given to mpic serve")]
AtLeastOne = typer.Option(min=1)
FIRST_KEY = """\
This is the first key here. From now on every request needs one, those of this machine and of the web page too:
programs set MPIC_API_KEY (or --api-key, or the header Authorization: Bearer KEY), the web page asks for it.
What was uploaded until now belongs to the user `local`: `mpic keys create local` makes a key that sees it.
The way back is in `mpic keys --help`."""


def _in_terminal() -> bool:
    return sys.stdin.isatty()


def _opened(data_dir: Path | None, config: Path | None) -> closing[KeyStore]:
    settings = load_config(config, {"data_dir": str(data_dir) if data_dir else None})
    return closing(KeyStore(Path(settings.library.data_dir)))


@app.command("create")
def create(
    user: Annotated[
        str, typer.Argument(help="the user of the key; several keys of one user see the same files")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="make the first key without asking")] = False,
    role: Annotated[
        str,
        typer.Option(
            help="user; admin: may also change references and see metrics; metrics: sees these and nothing else"
        ),
    ] = "user",
    requests_per_minute: Annotated[int | None, AtLeastOne] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="requests under way at once")] = None,
    bytes: Annotated[int | None, typer.Option(min=1, help="bytes of originals the user may keep")] = None,
    files: Annotated[
        int | None, typer.Option(min=1, help="uploads and cached texts the user may keep")
    ] = None,
    data_dir: DataDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a key. It is printed once; only its SHA-256 is stored.

    The first key changes who may call the server, even while it runs: the command says so and, in a terminal, asks
        first.
    """
    limits = KeyLimits(requests_per_minute, concurrent, bytes, files)
    with _opened(data_dir, config) as store:
        if not store.exist():
            err.print(FIRST_KEY)
            if not yes and _in_terminal() and not typer.confirm("Make it?", err=True):
                raise typer.Exit(1)
        secret, key = store.create(user, role, limits)  # ty: ignore[invalid-argument-type] (`create` refuses other roles)
    if as_json:
        print_json({"key": secret, **_show(key)})
        return
    print(secret)
    err.print(f"for {key.user} ({key.role}); it is not shown again")


@app.command("list")
def listing(data_dir: DataDir = None, config: Config = None, as_json: Json = False) -> None:
    """List all keys, newest first, revoked ones too, by their public prefix."""
    with _opened(data_dir, config) as store:
        keys = [_show(key) for key in reversed(store.listing())]
        closed = store.exist()
    rows = []
    for key in keys:
        limits = ", ".join(f"{name} {value:,}" for name, value in key["limits"].items() if value is not None)
        state = f"revoked {key['revoked_at']}" if key["revoked_at"] else "valid"
        rows.append((key["prefix"], key["user"], key["role"], key["created_at"], limits or "none", state))
    columns = ("prefix", "user", "role", "created", "limits", "state")
    answers = "nobody: the keys it had are lost" if closed else "this machine only"
    print_listing(keys, as_json, columns, rows, f"no keys: the server answers {answers}")


@app.command("revoke")
def revoke(
    prefixes: Annotated[list[str], typer.Argument(help="prefixes from mpic keys list, or whole keys")],
    data_dir: DataDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Revoke keys, at once and for good. Running requests end within a second.

    Revoking the last key does not open the server to everybody.
    """
    with _opened(data_dir, config) as store:
        keys = [_show(store.revoke(prefix)) for prefix in prefixes]
    print_result(keys, f"revoked {', '.join(key['prefix'] for key in keys)}", as_json)


def _show(key: Key) -> dict[str, Any]:
    shown = dataclasses.asdict(key)
    for name in ("created_at", "revoked_at"):
        if shown[name] is not None:
            shown[name] = datetime.fromtimestamp(shown[name], UTC).isoformat(" ", "seconds")
    return {**shown, "prefix": f"mpic_{key.prefix}"}

"""``mpic models``, ``mpic models check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from mpic.cli.common import DEFAULT_URL, ApiKey, Json, Url, command_app, out, print_json
from mpic.cli.laboratory import group_with

if TYPE_CHECKING:
    from mpic.api.resources import Health
    from mpic.client import MPIC

_LABORATORY = {"check": "Check model families: can they be linked, and are answers right?"}

app = command_app()


@app.callback(cls=group_with("models", _LABORATORY), invoke_without_command=True)
def models(
    context: typer.Context, as_json: Json = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Show the served model, how it runs, and the policies on offer; or check which families can be served.

    To serve another: `mpic serve --model FOLDER_OR_HUB_ID`.
    """
    if context.invoked_subcommand is None:
        from mpic.client import MPIC

        with MPIC(url, api_key or "") as client:
            _show(client, as_json)


def _show(client: MPIC, as_json: bool) -> None:
    if as_json:
        print_json(client.models.list())
        return
    health, (model, *_) = client.health(), client.models.list()
    info = health.model
    state = "ready" if health.ready else f"not ready: {health.engine.get('error')}"
    out.print(
        f"{model.id}: {', '.join(model.modalities)}, {model.context_length:,} tokens of context\n"
        f"  {state}; {info['dtype']} on {info['device']}, attention {info['attention']}\n"
        f"  policy {_policy(health)}; also {', '.join(p for p in health.policies if p != health.policy)}"
    )


def _policy(health: Health) -> str:
    """Return the server's default policy and, for ``auto``, the policy it stands for."""
    if health.auto is None or not health.auto.default:
        return health.policy
    return f"auto ({health.auto.why})"

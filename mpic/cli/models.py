"""``mpic models``."""

from __future__ import annotations

from mpic.cli.common import DEFAULT_URL, Json, Key, Url, connect, noun, out, print_json

app = noun()


@app.command()
def models(url: Url = DEFAULT_URL, api_key: Key = None, as_json: Json = False) -> None:
    """What is served: the model, how it runs, and the policies on offer.

    To serve another: `mpic serve --model FOLDER_OR_HUB_ID`.
    """
    with connect(url, api_key) as client:
        if as_json:
            print_json(client.models.list())
            return
        health, (model, *_) = client.health(), client.models.list()
    info = health.model
    state = "ready" if health.ready else f"not ready: {health.engine.get('error')}"
    out.print(
        f"{model.id}: {', '.join(model.modalities)}, {model.context_length:,} tokens of context\n"
        f"  {state}; {info['dtype']} on {info['device']}, attention {info['attention']}\n"
        f"  policy {health.policy}; also {', '.join(p for p in health.policies if p != health.policy)}",
        markup=False,
        highlight=False,
    )

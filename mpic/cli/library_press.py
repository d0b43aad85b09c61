"""``mpic library press``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from mpic.cli.common import Json, print_outcome, progress
from mpic.cli.folder import ConfigFile, DataDir, open_library

if TYPE_CHECKING:
    from mpic.config import EngineConfig
    from mpic.library.pressing import Pressed
    from mpic.model.loaded import LoadedModel
    from mpic.press import Press


def press(
    name: Annotated[str, typer.Argument(help="a press, such as `knorm-50`", metavar="PRESS")],
    replace: Annotated[
        bool, typer.Option("--replace/--keep", help="remove or keep the uncompressed forms")
    ] = False,
    user: Annotated[str | None, typer.Option(help="only this user's; `@shared`: the references'")] = None,
    model: Annotated[str | None, typer.Option(help="the server's model; default: as configured")] = None,
    device: Annotated[str | None, typer.Option(help="the server's device; default: as configured")] = None,
    dtype: Annotated[str | None, typer.Option(help="the server's dtype; default: as configured")] = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Compress chunks that are stored uncompressed, as compiling them under a press would have done.

    Stop the server for it. The model is loaded, because it says how its layers rotate keys, but no chunk is compiled:
    presses that look at queries (`tova-R`, `snapkv-R`) cannot do this. It may be repeated, and goes on where it was
    interrupted. Nothing is evicted to make room. With `--replace` requests that ask for uncompressed chunks compile
    them again. Exit status 1 if a chunk could not be compressed; the table shows why.

    Example: `mpic library press knorm-50 --replace`, then `mpic serve --press knorm-50`
    """
    from mpic.config import load_config

    flags = {"model": model, "device": device, "dtype": dtype}
    chosen = _parse(name)
    settings = load_config(config, flags).engine
    with open_library(data_dir, config) as library:  # refuses before a model is loaded
        from mpic.engine.native.presser import press_stored
        from mpic.library.pressing import candidates, press_chunks

        total = sum(row["bytes"] for row in candidates(library, user))
        loaded = _load(settings, chosen)
        with progress("pressing", total, as_json) as advance:
            done = press_chunks(
                library,
                chosen,
                loaded.digest,
                lambda chunk: press_stored(loaded, chosen, chunk),
                replace,
                user,
                advance,
            )
    _show(done, chosen, loaded.info.name, as_json)


def _parse(name: str) -> Press:
    """Return the press of a name. Raise UnknownPress if there is none, UnsupportedParameter if it cannot compress
    what is stored."""
    from mpic.errors import UnsupportedParameter
    from mpic.press import parse_press, refuse_stored

    press = parse_press(name)
    if press is None:
        raise UnsupportedParameter("'none' removes nothing: name a press, such as knorm-50", param="press")
    refuse_stored(press)
    return press


def _load(settings: EngineConfig, press: Press) -> LoadedModel:
    """Load the model of a configuration. Raise ModelRefused, and UnsupportedParameter for a press that cannot
    compress its chunks."""
    from mpic.engine.native.presser import check_press
    from mpic.errors import UnsupportedParameter
    from mpic.link.engines import NO_PRESS
    from mpic.model.load import load_model

    if settings.engine != "native":
        raise UnsupportedParameter(NO_PRESS.format(engine=settings.engine), param="engine")
    loaded = load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        quantize=settings.quantize,
        trust_remote_code=settings.trust_remote_code,
    )
    check_press(loaded, press.name)
    return loaded


def _show(done: list[Pressed], press: Press, model: str, as_json: bool) -> None:
    count = Counter(one.outcome for one in done)
    pressed = [one for one in done if one.outcome == "pressed"]
    before, after = sum(one.before for one in pressed), sum(one.after for one in pressed)
    left = [one for one in done if one.outcome == "left"]
    counts = {outcome: count[outcome] for outcome in ("pressed", "already", "model", "left")}
    value: dict[str, Any] = {"press": press.name, "model": model, "counts": counts}
    value |= {"bytes_before": before, "bytes_after": after, "left": [one._asdict() for one in left]}
    words = (
        f"{count['pressed']:,} chunks pressed by {press}: {decimal(before)} before, {decimal(after)} after"
    )
    if count["already"]:
        words += f"; {count['already']:,} were there already"
    if count["model"]:
        words += f"; {count['model']:,} of other models than {model} were left alone"
    rows = [(one.name, one.path, one.why) for one in left]
    print_outcome(value, as_json, ("name", "file", "why"), rows, words)

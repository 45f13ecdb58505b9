"""The commands that need the new model: encode, and warm for a cascade."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

import vecferry
from vecferry.errors import DataError
from vecferry.options import ENCODER, as_json, bad_rows, encoder, index_filter


@click.command()
@click.argument("texts")
@click.option(
    "--model", required=True, help="A folder, a .gguf file or a name on the hub; or the server's name for it."
)
@encoder
@click.option(
    "--side",
    type=click.Choice(["document", "query"]),
    default="document",
    show_default=True,
    help="Whose prompt the texts are given.",
)
@click.option("--id", help="Column of the ids; by default one of the usual names, or numbers from 0.")
@click.option("--text", help="Column of the texts; by default one of the usual names, or the only one that fits.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Texts run together.")
@bad_rows
@click.option("-o", "--output", required=True, help="New folder for the vectors, in Parquet.")
@as_json
def encode(texts: str, model: str, output: str, as_json: bool, **arguments: Any) -> None:
    """Encode TEXTS (Parquet, JSON lines, or one text a line) into a store of vectors that knows its space.

    Say the prompts of both sides whichever is encoded: they make one space. Stopped, the same command goes on.
    """
    from vecferry.cli import show

    given = chosen(arguments)
    result = vecferry.encode(texts, vecferry.load_encoder(model, **given), output, progress=True, **arguments)
    show(result, as_json)


def chosen(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the options of an encoder that were given out of a command's arguments."""
    return {name: value for name in ENCODER if (value := arguments.pop(name)) not in (None, ())}


@click.command()
@click.argument("index")
@click.option("--map", "map_folder", type=click.Path(path_type=Path), help="The map's folder.")
@index_filter
@click.option("--queries", help="The query log: a store of query vectors by the new model, repeated as they came.")
@click.option("--budget", type=click.IntRange(min=1), help="Texts to encode at most.")
@click.option("--cache", type=click.Path(path_type=Path), help="Folder of true vectors; made if it isn't there.")
@click.option("--texts", help="Parquet files with columns id and text.")
@click.option("--encode", help="The new model as `encode --model` takes it, or MODULE:FUNCTION from texts to vectors.")
@encoder
@click.option("-c", "c", type=click.IntRange(min=1), default=200, show_default=True, help="Candidates of each query.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Parquet file for what to encode elsewhere.")
@click.option("--add", "vectors", help="Store of true vectors to add to the cache, instead of all this.")
@as_json
def warm(
    index: str, map_folder: Path | None, vectors: str | None, encode: str | None, as_json: bool, **arguments: Any
) -> None:
    """Encode the documents that a query log needs most, into the cache of a cascade.

    With --encode they are encoded here. With -o they are written to a file in order of need: encode them elsewhere,
    then put the vectors into the cache with --add.
    """
    from vecferry.cli import show

    log = [name for name in ("queries", "budget") if arguments[name] is not None]
    given = chosen(arguments)
    if given and encode is None:
        raise vecferry.UsageError(f"--{min(given).replace('_', '-')} goes with --encode MODEL")
    if vectors is not None:
        if log or encode or arguments["output"] or arguments["cache"] is None:
            raise vecferry.UsageError("--add takes --map, --filter and --cache, and no other option")
        with vecferry.Cascade(index, map_folder, cache=arguments["cache"], filter=arguments["filter"]) as cascade:
            click.echo(f"{cascade.add(vectors):,} vectors added to {arguments['cache']}", err=True)
        return
    if len(log) < 2:
        raise vecferry.UsageError(
            "warm needs --queries and --budget; or --add, for vectors that were encoded elsewhere"
        )
    model = None if encode is None else load_model(encode, given)
    result = vecferry.warm(index, map_folder, encode=model, progress=True, **arguments)
    show(result, as_json)
    if result.output is not None:
        cache = arguments["cache"] or "CACHE"
        made = [
            f"--{name} {folder}" for name, folder in (("map", map_folder), ("filter", arguments["filter"])) if folder
        ]
        click.echo(
            f"next: encode them, then: vecferry warm {index} {' '.join(made)} --cache {cache} --add VECTORS", err=True
        )


def load_model(name: str, given: dict[str, Any]) -> Any:
    """Return the function MODULE:FUNCTION, or the encoder of that name."""
    if "endpoint" in given:
        return vecferry.load_encoder(name, **given)
    if not re.fullmatch(r"[\w.]+:\w+", name):
        try:
            return vecferry.load_encoder(name, **given)
        except vecferry.UsageError as error:
            raise vecferry.UsageError(f"--encode {name}: {error}; a function is named as MODULE:FUNCTION") from error
    if given:
        raise vecferry.UsageError(f"--{min(given).replace('_', '-')} is for a model, --encode {name} is a function")
    return load_function(name)


def load_function(name: str) -> Callable[[list[str]], Any]:
    """Import MODULE:FUNCTION, also from the current folder; what it raises is not a bug of vecferry."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise vecferry.UsageError(f"--encode {name}: no such function ({error}); give it as MODULE:FUNCTION") from error

    def encode(texts: list[str]) -> Any:
        try:
            return found(texts)
        except Exception as error:
            traceback.print_exc()
            raise DataError(f"--encode {name} failed on {len(texts)} texts: {error!r}") from error

    return encode

"""The commands about filters and the heads that they are made of: filter, lens, spectrum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import vecferry
from vecferry.options import allow_lossy, as_json, metric, qrels, seed

KINDS = (
    "auto",
    "embedfilter",
    "embedfilter-centered",
    "no-tail",
    "no-head",
    "edges",
    "ideal",
    "pca",
    "whiten",
    "first",
    "random",
    "random-directions",
    "random-orthonormal",
)
"""What `filters.KINDS` holds, and auto; named here so that help doesn't load all that filters need."""

model = click.option("--model", help="A language model: a folder, a .gguf file, or a name on the hub.")
tau = click.option(
    "--tau", type=click.IntRange(min=1), default=2, show_default=True, help="Keep 1/tau of the dimensions."
)
offset = click.option("--offset", type=click.IntRange(min=0), help="First direction kept; the middle by default.")


@click.command("filter")
@model
@click.option("--tau", type=click.IntRange(min=1), required=True, help="Keep 1/tau of the dimensions.")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="auto",
    show_default=True,
    help="What to keep: embedfilter the middle of the head's spectrum, pca and whiten what varies among the vectors "
    "of --store; auto tries all and takes the kind by which queries find most.",
)
@offset
@click.option("--store", help="Vectors of the model: pca, whiten and auto need them, and every kind is measured there.")
@click.option("--queries", help="Store of query vectors by the model; without it documents stand in, which flatters.")
@qrels
@click.option(
    "--map",
    type=click.Path(path_type=Path),
    help="The map that it will stand behind: what that holds out is held out here too.",
)
@click.option("--corpus", type=click.Path(path_type=Path), help="Texts to count tokens in, for ideal.")
@click.option("--smoothing", default=0.5, show_default=True, help="Added to each token's count, for ideal.")
@click.option("--center-log", is_flag=True, help="Subtract the mean of the log frequencies, for ideal.")
@click.option("--space", help="Name of the vectors' space; the store's, or else the model's name, by default.")
@metric
@allow_lossy
@seed
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder for the filter.")
@as_json
def filter_command(output: Path, as_json: bool, **arguments: Any) -> None:
    """Make a filter that carries documents and queries of one model into 1/tau of their dimensions.

    Pass it to migrate, check and warm with --filter, and queries through it with transform --map.
    """
    from vecferry.cli import show
    from vecferry.inspection import MapInspection

    if output.exists():
        raise vecferry.UsageError(f"{output} exists: choose another name for the filter, or delete it first")
    f = vecferry.make_filter(**arguments)
    f.save(output)
    show(MapInspection(f), as_json)
    click.echo(f"next: vecferry migrate INDEX SMALLER_INDEX --filter {output} --dry-run", err=True)


@click.command()
@model
@click.option("--text", help="A text, which the model encodes.")
@click.option("--store", help="Store of the model's vectors, with --id.")
@click.option("--id", help="Id of the row to look at.")
@click.option("--filter", type=click.Path(path_type=Path), help="A filter's folder; EmbedFilter for --tau by default.")
@tau
@offset
@click.option("-k", type=click.IntRange(min=1), default=10, show_default=True, help="Tokens to show.")
@click.option("--prompt", help="What the text is put into: a template with {text}, or promptEOL, echo, ...")
@click.option("--pooling", type=click.Choice(["mean", "last", "echo"]), help="How tokens become a vector; last.")
@as_json
def lens(as_json: bool, model: str | None, prompt: str | None, pooling: str | None, **arguments: Any) -> None:
    """Show the tokens that a vector speaks of, before and after filtering: the logit lens."""
    from vecferry.cli import show
    from vecferry.lens import lens as look

    if model is None:
        raise vecferry.UsageError("lens decodes with a model's own head: name it with --model")
    given = {"prompt": prompt, "pooling": pooling}
    show(look(model, encoder={k: v for k, v in given.items() if v is not None}, **arguments), as_json)


@click.command()
@click.option("--model", required=True, help="A language model: a folder, a .gguf file, or a name on the hub.")
@click.option(
    "--corpus",
    type=click.Path(path_type=Path),
    required=True,
    help="Texts to count tokens in: Parquet, JSON lines, or one a line.",
)
@tau
@offset
@click.option("--smoothing", default=0.5, show_default=True, help="Added to each token's count.")
@click.option("--no-plot", is_flag=True, help="Leave out the picture, which needs matplotlib.")
@seed
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder for the results.")
@as_json
def spectrum(model: str, as_json: bool, no_plot: bool, **arguments: Any) -> None:
    """Show which directions of a model's head speak of frequent tokens: numbers, a table and a plot."""
    from vecferry.cli import show
    from vecferry.spectroscopy import spectroscopy

    show(spectroscopy(model, plot=not no_plot, **arguments), as_json)

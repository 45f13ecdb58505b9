"""The options that commands share, each written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Join option decorators into one that commands share."""

    def apply(function: F) -> F:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return apply


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")
seed = click.option("--seed", default=0, show_default=True, help="Seed of every random choice.")
bad_rows = click.option(
    "--bad-rows",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What to do with NaN, infinite, zero and malformed rows.",
)
allow_lossy = click.option("--allow-lossy", is_flag=True, help="Accept a source of quantised codes.")
qrels = click.option("--qrels", type=click.Path(path_type=Path), help="Relevance labels: TREC format or three columns.")
queries = together(
    click.option("--queries", help="Store of query vectors by the new model."),
    click.option("--source-queries", help="Store of the same queries by the old model, for the status quo."),
    qrels,
)
stores = together(
    click.option("--source", required=True, help="The index: a store of the old model's vectors."),
    click.option("--target", required=True, help="A store of the new model's vectors for some of the same ids."),
)
solver = click.option(
    "--solver",
    type=click.Choice(["pinv", "ridge", "procrustes", "sgd"]),
    default="ridge",
    show_default=True,
    help="How to fit.",
)
metric = click.option(
    "--metric",
    type=click.Choice(["cosine", "ip", "l2"]),
    help="How the space ranks where the map leads; cosine if its norms agree.",
)
gate = together(
    click.option("--gate", help="Condition on the new index, such as 'agreement@10>=0.35 and ndcg@10>=0.2'."),
    click.option("--slice", help="Payload column: measure each of its values by itself too."),
    click.option(
        "--slice-file",
        type=click.Path(path_type=Path),
        help="Parquet file with ids (id) and the column, if no store has it.",
    ),
)
outputs = together(
    click.option("--junit", type=click.Path(path_type=Path), help="File for the verdict as JUnit XML."),
    click.option("--html", type=click.Path(path_type=Path), help="File for the report as one self-contained page."),
)

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
seed = click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed of every random choice.",
)
bad_rows = click.option(
    "--bad-rows",
    type=click.Choice(["fail", "skip", "keep"]),
    default="fail",
    show_default=True,
    help="What to do with NaN, infinite, zero and malformed rows; keep only says why they can't be kept.",
)
duplicates = click.option(
    "--duplicates",
    "duplicate_ids",
    type=click.Choice(["fail", "keep-last"]),
    default="fail",
    show_default=True,
    help="What to do with ids that occur more than once.",
)
payload = together(
    click.option("--drop-payload", is_flag=True, help="Leave behind the columns that the target can't hold."),
    click.option(
        "--payload", type=click.Path(path_type=Path), help="Parquet file for the columns that the target can't hold."
    ),
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
    type=click.Choice(["auto", "ridge", "pinv", "procrustes", "sgd"]),
    default="auto",
    show_default=True,
    help="How to fit; auto tries several maps and takes the one that retrieves best.",
)
solving = together(
    solver,
    click.option(
        "--objective",
        type=click.Choice(["mse", "rank"]),
        default="mse",
        show_default=True,
        help="What sgd lowers: squared error, or how wrongly documents are ordered for queries (by cosine).",
    ),
    click.option(
        "--effort",
        type=click.IntRange(0, 2),
        default=1,
        show_default=True,
        help="Time that auto takes: 0 without rank distillation, 2 to judge that on more folds.",
    ),
)
metric = click.option(
    "--metric",
    type=click.Choice(["cosine", "ip", "l2"]),
    help="How the space ranks where the map leads; cosine if its norms agree.",
)
index_filter = click.option(
    "--filter", type=click.Path(path_type=Path), help="The filter that the index was made with; it is asked through it."
)
gate = together(
    click.option(
        "--gate",
        help="Condition on the new index, such as 'agreement@10>=0.35 and ndcg@10>=0.2'; without one nothing blocks.",
    ),
    click.option("--slice", help="Payload column: measure each of its values by itself too."),
    click.option(
        "--slice-file",
        type=click.Path(path_type=Path),
        help="Parquet file with ids (id) and the column, if no store has it.",
    ),
)
source_exact = click.option(
    "--source-exact", help="Exact source vectors (held-out ids at least): tells what its codes lost."
)
mixing = together(
    source_exact,
    click.option("--encoded", help="New model's vectors for some ids, to stand in the index if they are found there."),
)
outputs = together(
    click.option("--junit", type=click.Path(path_type=Path), help="File for the verdict as JUnit XML."),
    click.option("--html", type=click.Path(path_type=Path), help="File for the report as one self-contained page."),
)
encoder = together(
    click.option(
        "--prompt",
        multiple=True,
        help="What texts are put into: a template with {text}, or promptEOL, promptEOL-mistral, promptEOL-original, "
        "echo or e5; the vectors of several are averaged.",
    ),
    click.option("--query-prompt", multiple=True, help="The same for queries, where theirs is another."),
    click.option(
        "--pooling",
        type=click.Choice(["cls", "mean", "last", "echo"]),
        help="How tokens become one vector; the model's or the prompt's own way by default.",
    ),
    click.option("--normalize/--no-normalize", default=None, help="Divide vectors by their length; as the model does."),
    click.option(
        "--max-length", type=click.IntRange(min=1), help="Tokens of a text at most; 512 or the model's limit."
    ),
    click.option("--revision", help="Revision on the hub, or what to call the weights that a server has."),
    click.option("--name", help="Name of the model in the space's; the folder's or the hub's by default."),
    click.option(
        "--precision",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        help="What decoders calculate in; auto is bfloat16 where the machine has it.",
    ),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where the model runs."),
    click.option("--endpoint", help="Address of an OpenAI-compatible server that has the model, up to its /v1."),
    click.option("--key-variable", help="Environment variable that holds the server's key; OPENAI_API_KEY by default."),
    click.option(
        "--requests-per-minute", type=click.FloatRange(min=0, min_open=True), help="Pace to keep with a server."
    ),
)
ENCODER = (
    "prompt",
    "query_prompt",
    "pooling",
    "normalize",
    "max_length",
    "revision",
    "name",
    "precision",
    "device",
    "endpoint",
    "key_variable",
    "requests_per_minute",
)
"""What the options of `encoder` are called as arguments of `vecferry.load_encoder`."""

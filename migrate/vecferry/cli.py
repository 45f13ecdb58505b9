"""The command line: one thin function for each verb of the Python API."""

from __future__ import annotations

import json
import sys
import traceback
import unicodedata
from pathlib import Path
from typing import Any, Literal

import click

import vecferry
from vecferry.cli_encode import encode, warm
from vecferry.cli_filters import filter_command, lens, spectrum
from vecferry.errors import DataError, StoppedError, VecferryError
from vecferry.options import (
    allow_lossy,
    as_json,
    bad_rows,
    duplicates,
    gate,
    index_filter,
    metric,
    mixing,
    outputs,
    payload,
    qrels,
    queries,
    seed,
    solver,
    solving,
    source_exact,
    stores,
)
from vecferry.signals import handlers_kept, stoppable

CRASHED = 70


class Group(click.Group):
    """Turn the library's errors into messages and exit codes, in one place."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line, and leave the signals' handlers as they were."""
        with handlers_kept():
            return super().main(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; SIGTERM stops it as Ctrl-C does."""
        with stoppable():
            try:
                return super().invoke(ctx)
            except VecferryError as error:
                fail(str(error), error.exit_code)
            except KeyboardInterrupt:
                fail("stopped; nothing half-done was published", StoppedError.exit_code)
            except OSError as error:
                fail(str(error), DataError.exit_code)
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except Exception:  # not 1: that would read as a failed gate
                traceback.print_exc()
                fail("this is a bug in vecferry: please report it with the lines above", CRASHED)


def fail(message: str, code: int) -> None:
    """Print an error, on one line, and exit with its code."""
    lines = [line.strip() for line in message.splitlines()]
    click.echo(printable(f"vecferry: {' '.join(filter(None, lines))}"), err=True)
    sys.exit(code)


def show(result: Any, as_json: bool) -> None:
    """Print a result: for people, or as JSON alone on stdout."""
    click.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False) if as_json else printable(result.table()))


def printable(text: str) -> str:
    """Replace control characters, with which a name from a file of somebody else's could steer the terminal."""
    return "".join(c if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in text)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(vecferry.__version__, prog_name="vecferry")
def cli() -> None:
    """Migrate a vector index to another embedding model without re-encoding the corpus, and prove it.

    Exit codes: 0 done or passed, 1 gate failed, 2 usage, 3 bad input data, 4 incompatible map, direction or space,
    5 stopped and resumable, 70 a bug in vecferry.
    """


@cli.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("vecferry-demo"),
    show_default=True,
    help="New folder for the results.",
)
@as_json
def demo(out: Path, as_json: bool) -> None:
    """Run the whole job on the real data inside the package: 4,500 texts, two encoders."""
    from vecferry.demo import demo as run

    run(out, as_json=as_json)


@cli.command()
@as_json
def doctor(as_json: bool) -> None:
    """Look at the packages and the machine, and say how each fault is cured.

    Exit code 2 if something would stop a migration in the current folder, 0 otherwise, whatever is noted.
    """
    from vecferry.doctor import doctor as look

    diagnosis = look()
    show(diagnosis, as_json)
    sys.exit(diagnosis.exit_code)


@cli.command()
@click.argument("source")
@click.option("--scan", is_flag=True, help="Read all rows: bad rows and ids that occur more than once.")
@as_json
@seed
def inspect(source: str, scan: bool, as_json: bool, seed: int) -> None:
    """Describe a store (kind, rows, dimension, metric, structure, ids, payload, norms, spectrum), or a map."""
    show(vecferry.inspect(source, scan=scan, seed=seed), as_json)


@cli.command()
@click.argument("source")
@click.option("-n", "size", type=int, help="Documents to draw; 5,000 by default, or half of a smaller index.")
@click.option(
    "--strategy",
    type=click.Choice(["random", "spread"]),
    default="random",
    show_default=True,
    help="How to draw the rows to fit on.",
)
@qrels
@seed
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Parquet file for ids, payload and role."
)
def sample(
    source: str, size: int | None, strategy: Literal["random", "spread"], qrels: Path | None, seed: int, output: Path
) -> None:
    """Draw the documents to encode with the new model: some to fit on, some held out."""
    drawn = vecferry.sample(source, size, strategy=strategy, qrels=qrels, seed=seed, output=output)
    click.echo(drawn.table())
    lossy = " --allow-lossy" if drawn.lossy else ""
    click.echo(
        f"next: encode the texts of these ids with the new model (a store of ids and vectors: VECTORS; `encode` makes "
        f"one of texts), then: vecferry fit --source {source} --target VECTORS --sample {output}{lossy} -o MAP",
        err=True,
    )


@cli.command()
@stores
@queries
@click.option("--cost-per-1k-texts", type=click.FloatRange(min=0), help="Price of encoding 1,000 texts.")
@solver
@metric
@bad_rows
@allow_lossy
@seed
@as_json
def assess(as_json: bool, **arguments: Any) -> None:
    """Say whether to migrate and which way, from some hundred pairs: one page with its evidence and its rule."""
    show(vecferry.assess(**arguments), as_json)


@cli.command()
@stores
@queries
@click.option(
    "--sample", type=click.Path(path_type=Path), help="The file that `vecferry sample` wrote: which rows are held out."
)
@click.option(
    "--direction",
    type=click.Choice(["document", "query"]),
    default="document",
    show_default=True,
    help="What the map carries: old documents into the new space, or new queries into the old one (the index stays).",
)
@solving
@metric
@click.option("--source-model", help="Name of the old model.")
@click.option("--target-model", help="Name of the new model.")
@click.option("--source-prompt", help="Prompt that the old model's documents were encoded with.")
@click.option("--target-prompt", help="Prompt that the new model's documents were encoded with.")
@bad_rows
@allow_lossy
@seed
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder for the map.")
@as_json
def fit(output: Path, as_json: bool, **arguments: Any) -> None:
    """Learn the map from the paired sample, and hold out what the gate will measure with."""
    from vecferry.inspection import MapInspection
    from vecferry.mapcard import brief

    if output.exists():
        raise vecferry.UsageError(f"{output} exists: choose another name for the map, or delete it first")
    m = vecferry.fit(**arguments)
    m.save(output)
    if as_json:
        show(MapInspection(m), as_json)
    else:
        click.echo(f"{brief(m)}\nwritten to {output}; all of it: vecferry inspect {output}")
    source, lossy = arguments["source"], " --allow-lossy" if arguments["allow_lossy"] else ""
    after = {
        "document": f"vecferry migrate {source} NEW_INDEX --map {output}{lossy} --dry-run",
        "query": f"vecferry transform NEW_QUERIES --map {output} -o OUT, and search {source} with them",
    }
    click.echo(f"next: {after[arguments['direction']]}", err=True)


@cli.command()
@click.argument("source")
@click.argument("destination")
@click.option("--map", "map_folder", type=click.Path(path_type=Path), help="The map's folder.")
@click.option(
    "--filter", type=click.Path(path_type=Path), help="A filter's folder: compress; without --map in its own space."
)
@click.option("--index", help="FAISS factory string of the target; the source's own structure by default.")
@gate
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="How the target stores elements.",
)
@click.option("--resume", is_flag=True, help="Continue an unfinished migration.")
@click.option("--dry-run", is_flag=True, help="Say what it would take, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Swap with an existing target, kept as DST.bak.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8192, show_default=True, help="Rows at a time.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads; all cores by default.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to multiply."
)
@bad_rows
@duplicates
@payload
@allow_lossy
@mixing
@seed
@outputs
@as_json
def migrate(
    source: str,
    destination: str,
    map_folder: Path | None,
    junit: Path | None,
    html: Path | None,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Translate every vector of SOURCE into a new store at DESTINATION, published when it passes the gate."""
    from vecferry.outputs import prepare_outputs, write_outputs

    prepare_outputs(junit, html)
    result = vecferry.migrate(source, destination, map_folder, progress=True, **arguments)
    show(result, as_json)
    if isinstance(result, vecferry.Report):
        write_outputs(result, junit, html)
        click.echo(f"next: {result.next_step()}", err=True)
        sys.exit(result.exit_code)


@cli.command()
@click.argument("destination")
@click.option("--map", "map_folder", type=click.Path(path_type=Path), help="The map's folder: measure on its hold-out.")
@index_filter
@click.option("--truth", help="Store of the whole corpus encoded by the new model: measure at full size.")
@queries
@gate
@source_exact
@click.option(
    "--baseline", type=click.Path(path_type=Path), help="Earlier report (--json) that the index must be as good as."
)
@click.option(
    "--max-drop", type=float, help="How far the gate's metrics may drop below the baseline's.  [default: 0.01]"
)
@seed
@outputs
@as_json
def check(
    destination: str, map_folder: Path | None, junit: Path | None, html: Path | None, as_json: bool, **arguments: Any
) -> None:
    """Measure an index against true re-embedding, and apply the gate."""
    from vecferry.outputs import prepare_outputs, write_outputs

    prepare_outputs(junit, html)
    report = vecferry.check(destination, map=map_folder, **arguments)
    show(report, as_json)
    write_outputs(report, junit, html)
    sys.exit(report.exit_code)


@cli.command()
@click.argument("vectors")
@click.option("--map", "map_folder", type=click.Path(path_type=Path), required=True, help="The map's folder.")
@click.option("-o", "--output", required=True, help="Address of the new store.")
def transform(vectors: str, map_folder: Path, output: str) -> None:
    """Map the vectors of a store into a new store: old vectors, or new queries by a map of direction "query"."""
    from vecferry.transforming import transform_store

    rows = transform_store(vectors, map_folder, output)
    click.echo(f"{rows:,} vectors written to {output}", err=True)


@cli.command()
@click.argument("destination")
def rollback(destination: str) -> None:
    """Swap a migrated index with the one it replaced (DST.bak)."""
    click.echo(f"{destination} is the old index again; the new one is {vecferry.rollback(destination)}")


cli.add_command(encode)
cli.add_command(warm)
cli.add_command(filter_command)
cli.add_command(lens)
cli.add_command(spectrum)

"""Run the command line with small checkpoints, so that a kill finds the stage in all of its states.

python kill_child.py ARGUMENTS OF vecferry ...
"""

import sys

import vecferry_adapters._faiss_writer as faiss_writer
import vecferry_adapters._parquet_writer as parquet_writer

faiss_writer.CHECKPOINT = 1 << 16
parquet_writer.GROUP_ROWS = 128
parquet_writer.PART_GROUPS = 2

if __name__ == "__main__":
    from vecferry.cli import cli

    cli(sys.argv[1:])

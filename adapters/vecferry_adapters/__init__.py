"""The stores that vecferry reads and writes, one file each; found by entry point, like anybody else's."""

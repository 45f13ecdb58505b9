"""Make docs/report.png: the page of a gate on the demo's index, as Chromium shows it.

python benchmarks/make_picture.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import vecferry
from vecferry.demo import DATA, demo
from vecferry.page import page

PICTURE = Path(__file__).parents[1] / "docs" / "report.png"
GATE = "agreement@10>=0.35 and retention.ndcg@10>=0.6 and worst-slice.agreement@10>=0.3"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium: make browser-deps installs it on Debian as root")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that the page shows no path of this machine
        demo(Path("vecferry-demo"))
        report = vecferry.check(
            "vecferry-demo/new.faiss",
            map="vecferry-demo/map",
            gate=GATE,
            slice="pos",
            slice_file=DATA / "documents.parquet",
            baseline="vecferry-demo/report.json",
        )
        Path("page.html").write_text(page(report), encoding="utf-8")
        size = ["--window-size=980,1500", "--hide-scrollbars", "--user-data-dir=profile", f"--screenshot={PICTURE}"]
        subprocess.run(
            [browser, *FLAGS, *size, Path("page.html").resolve().as_uri()], check=True, stderr=subprocess.DEVNULL
        )
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

"""The conformance suite that every adapter must pass, vecferry's own and a third party's. Needs pytest.

Subclass `AdapterSuite` in a test module, say how a store of this kind is made by other means than the adapter,
and give a reason for everything that the store can't do:

    class TestMyStore(AdapterSuite):
        kind = "mystore"
        no_payload = "a .my file holds vectors and ids only"

        def make(self, folder, rows):
            my_library.write(folder / "source.my", rows.vectors, rows.ids)
            return f"mystore:{folder / 'source.my'}"

        def target(self, folder):
            return f"mystore:{folder / 'target.my'}"

`ReaderSuite` is its reading half, for stores of the same kind that are made in another way.
"""

from __future__ import annotations

from vecferry.testing.reading import ReaderSuite
from vecferry.testing.rows import ID_TYPES, assert_same, contents, cut, sample_ids, sample_payload
from vecferry.testing.writing import AdapterSuite

__all__ = ["ID_TYPES", "AdapterSuite", "ReaderSuite", "assert_same", "contents", "cut", "sample_ids", "sample_payload"]

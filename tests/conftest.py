"""Let pytest explain failing assertions of the adapter suite too."""

import pytest

pytest.register_assert_rewrite("vecferry.testing")

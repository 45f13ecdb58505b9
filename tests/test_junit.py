"""JUnit XML, read back by another parser than wrote it."""

from __future__ import annotations

from typing import Any
from xml.dom import minidom

import pytest

from vecferry.gate import Decision, Judgement
from vecferry.junit import junit
from vecferry.report import Report

HOSTILE = "a <b> & \"quotes\" 'here' ]]> \x00\x1b[31m \ud800 \uffff \U0001f600 é\nnext"


def read(text: str) -> Any:
    return minidom.parseString(text.encode("utf-8")).documentElement


def report(*outcomes: Any, message: str = "is 0.4") -> Report:
    judgements = tuple(Judgement(f"agreement@{i}>=0.3", outcome, message) for i, outcome in enumerate(outcomes, 1))
    return Report(
        {"destination": "faiss:new"}, decision=Decision("all", judgements), timing={"rewrite": 1.5, "build": 2}
    )


def test_each_condition_is_a_test_case_and_an_unclear_one_fails() -> None:
    root = read(junit(report("pass", "fail", "inconclusive")))
    suite = root.getElementsByTagName("testsuite")[0]
    assert root.tagName == "testsuites"
    for element in (root, suite):
        counts = [element.getAttribute(name) for name in ("tests", "failures", "errors", "time")]
        assert counts == ["3", "2", "0", "3.500"]
    assert suite.getAttribute("skipped") == "0"
    assert suite.getAttribute("name") == "faiss:new"
    cases = suite.getElementsByTagName("testcase")
    assert [case.getAttribute("name") for case in cases] == [f"agreement@{i}>=0.3" for i in (1, 2, 3)]
    assert {case.getAttribute("classname") for case in cases} == {"vecferry.gate"}
    failures = [case.getElementsByTagName("failure") for case in cases]
    assert [len(found) for found in failures] == [0, 1, 1]
    assert [found[0].getAttribute("type") for found in failures[1:]] == ["fail", "inconclusive"]
    assert failures[1][0].getAttribute("message") == "is 0.4"
    assert failures[2][0].firstChild.data == "inconclusive: is 0.4"
    assert "gate all: FAIL" in suite.getElementsByTagName("system-out")[0].firstChild.data


def test_without_a_gate_one_case_is_skipped() -> None:
    suite = read(junit(Report({}))).getElementsByTagName("testsuite")[0]
    assert [suite.getAttribute(name) for name in ("tests", "failures", "skipped")] == ["1", "0", "1"]
    assert len(suite.getElementsByTagName("skipped")) == 1


def test_whatever_text_comes_the_file_is_well_formed() -> None:
    failure = read(junit(report("fail", message=HOSTILE))).getElementsByTagName("failure")[0]
    bad = "a <b> & \"quotes\" 'here' ]]> \ufffd\ufffd[31m \ufffd \ufffd \U0001f600 é\nnext"
    assert failure.getAttribute("message") == bad
    assert failure.firstChild.data == f"fail: {bad}"


@pytest.mark.parametrize("code", [0, 8, 0xB, 0x1F, 0xD800, 0xDFFF, 0xFFFE])
def test_characters_that_xml_cannot_hold_are_replaced(code: int) -> None:
    text = junit(report("fail", message=f"a{chr(code)}z"))
    assert "a\ufffdz" in text
    read(text)

"""A verdict as JUnit XML, which continuous integration systems read: one test case for each condition."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from vecferry.report import Report

# what XML 1.0 can't hold, escaped or not (section 2.2)
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """Write the conditions of a report's gate as a test suite.

    A condition that failed is a failure of type "fail"; one that is inconclusive blocks as well, and is a failure of
    type "inconclusive". A report without a decision has one test case, skipped, so that no system takes an empty
    file for a broken one. The report's table goes along as the suite's output.
    """
    judgements = report.decision.judgements if report.decision is not None else ()
    failures = sum(judgement.outcome != "pass" for judgement in judgements)
    counts = {
        "tests": str(max(1, len(judgements))),
        "failures": str(failures),
        "errors": "0",
        "time": f"{sum(report.timing.values()):.3f}",
    }
    suites = ElementTree.Element("testsuites", counts | {"name": "vecferry"})
    named = {"name": _text(report.facts.get("destination") or "vecferry"), "skipped": "0" if judgements else "1"}
    suite = ElementTree.SubElement(suites, "testsuite", counts | named)
    for judgement in judgements:
        case = _case(suite, judgement.condition)
        if judgement.outcome != "pass":
            message = _text(judgement.message)
            failure = ElementTree.SubElement(case, "failure", {"type": judgement.outcome, "message": message})
            failure.text = f"{judgement.outcome}: {message}"
    if not judgements:
        ElementTree.SubElement(_case(suite, "gate"), "skipped", {"message": "no gate: nothing was decided"})
    ElementTree.SubElement(suite, "system-out").text = _text(report.table())
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", {"classname": "vecferry.gate", "name": _text(name), "time": "0"})


def _text(value: object) -> str:
    """Replace what XML can't hold: ids and names of slices come from anywhere."""
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", str(value))

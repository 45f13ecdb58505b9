"""The written rule, on numbers made up to lie on each side of it."""

from __future__ import annotations

from typing import Any

import pytest

from vecferry.measured import Cell
from vecferry.verdict import KEEPS, RE_EMBED, RULE, TRANSLATE, Judged, judge, standing

UNLABELLED = Cell("break-even.ndcg", 10, reason="no labels: pass --qrels")


def ratio(low: float, value: float, high: float, queries: int = 200) -> Cell:
    return Cell("ratio", 10, value, low, high, documents=1000, queries=queries)


def way(name: str, kept: Any, worth: Any, agreement: float = 0.4) -> Judged:
    return Judged(name, ratio(agreement - 0.02, agreement, agreement + 0.02), ratio(*kept), ratio(*worth))


def ways(gain: tuple[float, float, float]) -> list[Judged]:
    """Translation keeps about half, a small cascade nearly 90 %, a larger one nearly all."""
    return [
        way(TRANSLATE, (0.45, 0.55, 0.65), tuple(0.55 * g for g in gain)),
        way("cascade, c = 50", (0.84, 0.89, 0.94), tuple(0.89 * g for g in gain)),
        way("cascade, c = 100", (0.93, 0.96, 0.99), tuple(0.96 * g for g in gain)),
        way(RE_EMBED, (1, 1, 1), gain),
    ]


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((1.01, 1.2, 1.4), "pays"),
        ((0.99, 1.2, 1.4), "borderline"),
        ((1, 1.2, 1.4), "borderline"),
        ((0.6, 0.8, 1.01), "borderline"),
        ((0.6, 0.8, 0.99), "loses"),
        ((1, 1, 1), "borderline"),
    ],
)
def test_standings_are_those_of_the_whole_interval(interval: tuple[float, float, float], said: str) -> None:
    assert standing(ratio(*interval)) == said
    assert standing(ratio(*interval, 29)) == "unknown"
    assert standing(UNLABELLED) == "unknown"


def test_an_upgrade_that_pays_goes_the_first_way_that_pays_and_keeps_enough() -> None:
    gain = (1.4, 1.5, 1.6)
    verdict = judge(ways(gain), ratio(*gain))
    assert (verdict.outcome, verdict.way, verdict.instead) == ("migrate", "cascade, c = 100", "cascade, c = 100")
    assert verdict.standings == {
        TRANSLATE: "loses",
        "cascade, c = 50": "pays",
        "cascade, c = 100": "pays",
        RE_EMBED: "pays",
    }
    text = " ".join(verdict.reasons)
    assert text.startswith("Migrate: cascade, c = 100. It finds 1.44 [1.34, 1.54] times what doing nothing finds")
    assert "Translate the corpus: is worse than doing nothing, and keeps 55 % [45, 65] of re-embedding" in text
    assert "Cascade, c = 50: pays too, but keeps only 89 % [84, 94]" in text


def test_translation_is_recommended_where_it_is_true() -> None:
    found = [way(TRANSLATE, (KEEPS, 0.95, 1), (1.1, 1.3, 1.5)), *ways((1.3, 1.4, 1.5))[1:]]
    assert judge(found, ratio(1.3, 1.4, 1.5)).way == TRANSLATE
    found[0] = way(TRANSLATE, (KEEPS - 0.001, 0.95, 1), (1.1, 1.3, 1.5))
    assert judge(found, ratio(1.3, 1.4, 1.5)).way == "cascade, c = 100"
    found[0] = way(TRANSLATE, (KEEPS, 0.95, 1), (0.99, 1.3, 1.5))  # keeps enough, but isn't shown to pay
    verdict = judge(found, ratio(1.3, 1.4, 1.5))
    assert verdict.way == "cascade, c = 100"
    assert "isn't shown to beat doing nothing" in " ".join(verdict.reasons)


def test_re_embedding_is_what_is_left() -> None:
    found = [ways((1.3, 1.4, 1.5))[0], ways((1.3, 1.4, 1.5))[-1]]
    assert judge(found, ratio(1.3, 1.4, 1.5)).way == RE_EMBED


def test_an_upgrade_that_is_none_is_not_made() -> None:
    gain = (0.6, 0.7, 0.8)
    verdict = judge(ways(gain), ratio(*gain))
    assert (verdict.outcome, verdict.way, verdict.instead) == ("don't", "do nothing", "cascade, c = 100")
    assert verdict.reasons[0].startswith("Don't migrate: on these labels the new model finds less")
    assert "The upgrade itself is none" in verdict.reasons[0]
    assert verdict.reasons[1] == (
        "If the old model goes away: cascade, c = 100, which keeps 96 % [93, 99] of re-embedding."
    )
    short = judge([*ways(gain)[:2], ways(gain)[-1]], ratio(*gain))
    assert short.reasons[1] == (
        "If the old model goes away: re-embed all; no other way is sure to keep 90 %. Short of that, cascade, c = 50 "
        "keeps 89 % [84, 94] of it."
    )


def test_a_borderline_upgrade_is_called_so() -> None:
    gain = (0.9, 1.05, 1.2)
    verdict = judge(ways(gain), ratio(*gain))
    assert (verdict.outcome, verdict.way, verdict.instead) == ("borderline", "do nothing", "cascade, c = 100")
    assert "isn't shown to find more" in verdict.reasons[0]


def test_without_labels_it_cannot_tell() -> None:
    found = [Judged(w.name, w.agreement, UNLABELLED, UNLABELLED) for w in ways((1, 1, 1))]
    verdict = judge(found, UNLABELLED)
    assert (verdict.outcome, verdict.way, verdict.instead) == ("can't tell", None, None)
    text = " ".join(verdict.reasons)
    assert "Can't tell whether the new model is better" in text
    assert "no labels: pass --qrels" in text
    assert "translate the corpus 0.40" in text
    few = judge(ways((1.4, 1.5, 1.6)), ratio(1.4, 1.5, 1.6, queries=20))
    assert few.outcome == "can't tell"
    assert "20 labelled queries are too few" in few.reasons[0]


def test_the_rule_is_written_with_its_number() -> None:
    assert f"at least {KEEPS}" in RULE
    assert judge(ways((1, 1, 1)), ratio(1, 1, 1)).to_json()["rule"] == RULE.splitlines()

"""JSON files that anybody may have written: bounded before they are parsed, and checked against annotated types."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from vecferry.errors import DataError

MOST = 16 << 20
"""Bytes of the largest file; cards, manifests and checkpoints take some kilobytes."""
DEPTH = 32
PLAIN = (None, NoneType, bool, int, float, str)
_TOKENS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
"""Strings, which may hold brackets of their own, and brackets; a string without an end goes on to that of the text."""


def read_json(path: Path, most: int = MOST) -> dict[str, Any]:
    """Read a JSON object from a file; raise DataError, which names the file, for anything else.

    Refused are files of more than `most` bytes, values nested deeper than DEPTH, NaN and infinite numbers, integers
    beyond 64 bits, keys that occur twice, and strings that aren't Unicode. A file that can't be opened is an OSError.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"{path} has more than {most:,} bytes, which no such file has: it is damaged or another file")
    try:
        return parse_json(data)
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object, as `read_json` does; raise ValueError for anything else."""
    text = data.decode("utf-8")
    depth = 0
    for token in _TOKENS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > DEPTH:
            raise ValueError(f"its values are nested deeper than {DEPTH}")
    value = json.loads(
        text, parse_int=_integer, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_distinct
    )
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can be escaped, but never printed
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise ValueError(f"the number {text[:20]}… is beyond 64 bits")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(held := dict(pairs)) < len(pairs):
        raise ValueError(f"a key occurs twice among {', '.join(sorted(key for key, _ in pairs))[:200]}")
    return held


def typed(kind: Any, value: Any, name: str) -> Any:
    """Return a JSON value as the annotated type `kind`; raise ValueError, which says where, if it isn't of that type.

    Dataclasses are made of objects and tuples of lists. Of a TypedDict keys that it doesn't name are let through.
    """
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        for one in (one for one in arguments if one is not NoneType):
            try:
                return typed(one, value, name)
            except ValueError as error:
                reason = error
        raise reason
    if origin is Literal:
        return value if value in arguments else _refuse(value, name, f"one of {', '.join(map(str, arguments))}")
    if isinstance(value, list) and origin in (list, tuple):
        return origin(typed(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if isinstance(value, dict):
        if origin is not None and issubclass(origin, Mapping):
            return {key: typed(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
        if dataclasses.is_dataclass(kind):
            required = [f.name for f in dataclasses.fields(kind) if _required(f)]
            return _made(kind, value, name, required, strict=True)
        if is_typeddict(kind):
            hints = get_type_hints(kind, include_extras=True)  # __required_keys__ can't tell from annotations as text
            required = [key for key, hint in hints.items() if kind.__total__ and get_origin(hint) is not NotRequired]
            return _made(kind, value, name, required, strict=False)
    allowed: Any = {None: NoneType, float: (int, float)}.get(kind, kind) if kind in PLAIN else ()
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        _refuse(value, name, str(getattr(origin or kind, "__name__", kind)))
    return value


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _made(kind: Any, value: dict[str, Any], name: str, required: Iterable[str], *, strict: bool) -> Any:
    hints = get_type_hints(kind)
    missing = [key for key in required if key not in value]
    unknown = [key for key in value if key not in hints] if strict else []
    if missing or unknown:
        known = ", ".join([*(f"{key} is missing" for key in missing), *(f"{key} is unknown" for key in unknown)])
        raise ValueError(f"in {name}, {known[:200]}")
    return kind(**{key: typed(hints.get(key, Any), item, f"{name}.{key}") for key, item in value.items()})


def _refuse(value: Any, name: str, wanted: str) -> None:
    raise ValueError(f"{name} is {str(value)[:40]!r}, not {wanted}")

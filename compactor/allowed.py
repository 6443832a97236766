"""What may stand in a setting, in words: from the types and bounds of a pydantic model."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo


def as_toml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False, default=str)


def is_text(field: FieldInfo) -> bool:
    kinds = [field.annotation] if get_origin(field.annotation) is not Literal else [type(choice) for choice in get_args(field.annotation)]
    return all(kind is str for kind in kinds)


def allowed(kind: type[BaseModel], key: str) -> str:
    """What may stand there, in words: ``a whole number from 0 to 7 or "auto"``."""
    field = kind.model_fields[key]
    return _allowed(field.annotation, field.metadata)


def _allowed(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return _allowed(inner, [part for one in extra for part in (one.metadata if isinstance(one, FieldInfo) else [one])])
    if origin is Literal:
        return " or ".join(as_toml(choice) for choice in get_args(annotation))
    if origin is tuple:
        element = get_args(annotation)[0]
        return f"a list of {_allowed(element, [])}" if get_origin(element) is Literal else "a list of texts"
    if origin is dict:
        return "a table of texts" if get_args(annotation)[1] is str else "a table of texts, numbers and booleans"
    if origin is Union or not isinstance(annotation, type):
        return " or ".join(_allowed(choice, []) for choice in get_args(annotation))
    low = next((limit.ge for limit in metadata if isinstance(limit, Ge)), "")
    high = next((limit.le for limit in metadata if isinstance(limit, Le)), "")
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "a text in quotes"
    return f"a {'whole ' if annotation is int else ''}number from {low} to {high}"

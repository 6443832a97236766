"""Values of settings in the syntax of TOML, and their allowed values in words, from the types and bounds of their pydantic model."""

from __future__ import annotations

import json
import tomllib
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo


def format_toml_value(value: object) -> str:
    """Return a setting's value in the syntax of TOML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False, default=str)


def parse_toml_value(text: str) -> object:
    """Return the TOML value of a text; the text itself if it is not valid TOML, so that validation can name the allowed values."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text


def is_text_setting(field: FieldInfo) -> bool:
    """Return whether a setting holds text, so that its environment variable needs no quotes."""
    kinds = [field.annotation] if get_origin(field.annotation) is not Literal else [type(choice) for choice in get_args(field.annotation)]
    return all(kind is str for kind in kinds)


def describe_allowed_values(section_type: type[BaseModel], key: str) -> str:
    """Return the allowed values of a setting in words, such as ``a whole number from 0 to 7 or "auto"``."""
    field = section_type.model_fields[key]
    example = ' or a text such as "10m"' if key.endswith("_ms") else ' or a text such as "64 MiB"' if "_bytes" in key else ""
    return _describe_allowed_values_of_type(field.annotation, field.metadata) + example


def _describe_allowed_values_of_type(annotation: Any, metadata: list[Any]) -> str:
    """Return the values that a type with these constraints allows, in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return _describe_allowed_values_of_type(
            inner, [part for one in extra for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
        )
    if origin is Literal:
        return " or ".join(format_toml_value(choice) for choice in get_args(annotation))
    if origin is tuple:
        element = get_args(annotation)[0]
        return f"a list of {_describe_allowed_values_of_type(element, [])}" if get_origin(element) is Literal else "a list of texts"
    if origin is dict and isinstance(get_args(annotation)[1], type) and issubclass(get_args(annotation)[1], BaseModel):
        return "a table of tables"
    if origin is dict:
        return "a table of texts" if get_args(annotation)[1] is str else "a table of texts, numbers and booleans"
    if origin is Union or not isinstance(annotation, type):
        return " or ".join(_describe_allowed_values_of_type(choice, []) for choice in get_args(annotation))
    low = next((limit.ge for limit in metadata if isinstance(limit, Ge)), "")
    high = next((limit.le for limit in metadata if isinstance(limit, Le)), "")
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "a text in quotes"
    return f"a {'whole ' if annotation is int else ''}number from {low} to {high}"

"""Python values as JSON and back, with nothing dropped on the way: tuples, numbers of numpy, nested mappings."""

import json
import math
import types
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Annotated, Any, Union, get_args, get_origin

from hf_xai.errors import ConfigError


def to_json(value: Any, where: str) -> Any:
    """The JSON counterpart of ``value``: tuples become lists, numbers of numpy become Python's.

    Args:
        value: None, a bool, number or string, or lists, tuples and string-keyed mappings of these.
        where: Name of the value, for the error.

    Raises:
        ConfigError: If JSON has no counterpart, as for tensors, paths, sets, NaN or keys that are not strings.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise ConfigError(f"{where} has the key {odd[0]!r}; JSON keeps only keys that are strings.")
        return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
    raise ConfigError(f"{where} is {value!r} ({type(value).__name__}), which JSON can't hold.")


def from_json(annotation: Any, value: Any) -> Any:
    """Turns the lists of a JSON value back into the tuples that ``annotation`` names, at any depth."""
    if not isinstance(value, (list, dict)):
        return value
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin is Annotated:
        return from_json(arguments[0], value)
    if origin in (Union, types.UnionType):
        restored = (from_json(choice, value) for choice in arguments)
        return next((choice for choice in restored if choice is not value), value)
    if isinstance(value, dict):
        named = origin in (dict, Mapping) and len(arguments) == 2
        return {key: from_json(arguments[1], item) for key, item in value.items()} if named else value
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1:] == (...,) else arguments
        same_length = len(kinds) == len(value)  # another length is for the config's own validation to judge
        return tuple(map(from_json, kinds, value)) if same_length else tuple(value)
    if origin is list and arguments:
        return [from_json(arguments[0], item) for item in value]
    return value


def write_json(value: Any, indent: int = 0) -> str:
    """JSON text with one line for each entry of a mapping and each list on one line, however long."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    margin = " " * (indent + 2)
    lines = [f"{margin}{json.dumps(key)}: {write_json(item, indent + 2)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"

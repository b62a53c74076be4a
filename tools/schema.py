"""JSON schemas from Python annotations, and the values of such a schema back to what the function expects.

Known: str, int, float, bool, None, Any, Literal, Enum, Optional and unions, list, Sequence, set, tuple[T, ...],
dict[str, T], dataclasses of all these, and Annotated, whose texts are descriptions and whose dicts are further keywords
such as {"minimum": 1}. Anything else is an error that names the parameter.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from tools.errors import ToolSetupError

Schema = dict[str, Any]

_PLAIN: Final[Mapping[Any, str]] = {str: "string", bool: "boolean", int: "integer", float: "number"}
_NONE: Final = type(None)
_LISTS: Final = (list, Sequence, set, frozenset, tuple)
SUPPORTED: Final = (
    "str, int, float, bool, None, Any, Literal, Enum, Optional, unions, list, set, tuple[T, ...], dict[str, T], "
    "dataclasses and Annotated"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a value looks like as JSON, and how such a value becomes a Python object."""

    schema: Schema
    convert: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def shape_of(annotation: Any, where: str) -> Shape:
    """The shape of an annotation. Raises ToolSetupError, which says `where` it stands."""
    return _shape(annotation, where, ())


def _shape(annotation: Any, where: str, inside: tuple[Any, ...]) -> Shape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(arguments, where, inside)
    if annotation is Any:
        return Shape({}, _same)
    if annotation is _NONE or annotation is None:
        return Shape({"type": "null"}, _same)
    if origin is Literal:
        return _choices(list(arguments), list(arguments), where)
    if origin in (Union, types.UnionType):
        return _union([_shape(member, where, inside) for member in arguments])
    if annotation in _PLAIN:
        # JSON has one kind of number: 3.0 is valid where an integer is asked for, 3 where a float is.
        return Shape({"type": _PLAIN[annotation]}, annotation if annotation in (int, float) else _same)
    if (origin or annotation) in _LISTS:
        return _list(origin or annotation, arguments, where, inside)
    if (origin or annotation) in (dict, Mapping):
        return _dict(arguments, where, inside)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _choices([member.value for member in annotation], list(annotation), where)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _object_of(annotation, where, inside)
    shown = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    raise ToolSetupError(f"{where} has the type {shown}, which has no JSON schema here; supported: {SUPPORTED}")


def _annotated(arguments: tuple[Any, ...], where: str, inside: tuple[Any, ...]) -> Shape:
    shape = _shape(arguments[0], where, inside)
    schema = dict(shape.schema)
    for extra in arguments[1:]:
        if isinstance(extra, str):
            schema["description"] = extra
        elif isinstance(extra, Mapping):
            schema |= extra
    return Shape(schema, shape.convert)


def _choices(values: list[Any], meant: list[Any], where: str) -> Shape:
    if not values or any(not isinstance(value, str | int | bool | _NONE) for value in values):
        raise ToolSetupError(f"{where}: the choices must be texts, whole numbers, booleans or None")
    kinds = {type(value) for value in values}
    schema: Schema = {"enum": values}
    if len(kinds) == 1 and (kind := kinds.pop()) in _PLAIN:
        schema = {"type": _PLAIN[kind], "enum": values}
    # 1 == True and 1 == 1.0 in Python; as JSON only the latter two are one value.
    return Shape(schema, lambda given: next(m for v, m in zip(values, meant) if v == given and _alike(v, given)))


def _alike(first: Any, second: Any) -> bool:
    return isinstance(first, bool) == isinstance(second, bool)


def _union(members: list[Shape]) -> Shape:
    schemas = [member.schema for member in members]
    kinds = [schema.get("type") for schema in schemas]
    if all(set(schema) == {"type"} for schema in schemas) and len(set(kinds)) == len(kinds):
        schema: Schema = {"type": kinds}
    else:
        schema = {"anyOf": schemas}

    def convert(value: Any) -> Any:
        from tools.validation import is_valid

        return next(member.convert(value) for member in members if is_valid(member.schema, value))

    return Shape(schema, convert)


def _list(kind: Any, arguments: tuple[Any, ...], where: str, inside: tuple[Any, ...]) -> Shape:
    if kind is tuple:
        if len(arguments) != 2 or arguments[1] is not Ellipsis:
            raise ToolSetupError(
                f"{where}: a tuple of a fixed length has no schema here; use tuple[T, ...] or a dataclass"
            )
        arguments = arguments[:1]
    item = _shape(arguments[0], where, inside) if arguments else Shape({}, _same)
    schema: Schema = {"type": "array"}
    if item.schema:
        schema["items"] = item.schema
    make = list if kind is Sequence else kind
    if make in (set, frozenset):
        schema["uniqueItems"] = True
    return Shape(schema, lambda values: make(item.convert(value) for value in values))


def _dict(arguments: tuple[Any, ...], where: str, inside: tuple[Any, ...]) -> Shape:
    if arguments and arguments[0] is not str:
        raise ToolSetupError(f"{where}: the keys of a dict must be str, because JSON has no others")
    value = _shape(arguments[1], where, inside) if arguments else Shape({}, _same)
    schema: Schema = {"type": "object"}
    if value.schema:
        schema["additionalProperties"] = value.schema
    return Shape(schema, lambda values: {key: value.convert(item) for key, item in values.items()})


def _object_of(kind: Any, where: str, inside: tuple[Any, ...]) -> Shape:
    if kind in inside:
        raise ToolSetupError(f"{where}: {kind.__name__} contains itself, which has no JSON schema here")
    hints = typing.get_type_hints(kind, include_extras=True)
    missing = dataclasses.MISSING
    fields = [
        Field(
            name=field.name,
            shape=_shape(hints[field.name], f"{where}.{field.name}", (*inside, kind)),
            required=field.default is missing and field.default_factory is missing,
            default=None if field.default is missing else field.default,
        )
        for field in dataclasses.fields(kind)
        if field.init
    ]
    shape = object_shape(fields)
    return Shape(shape.schema, lambda values: kind(**shape.convert(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A property of an object, or a parameter of a function."""

    name: str
    shape: Shape
    required: bool
    default: Any = None


def object_shape(fields: Sequence[Field]) -> Shape:
    """An object with these properties and no others; converted to a dict of those that were given."""
    properties = {}
    for field in fields:
        schema = dict(field.shape.schema)
        if isinstance(field.default, str | int | float | bool) and not isinstance(field.default, enum.Enum):
            schema["default"] = field.default
        properties[field.name] = schema
    converts = {field.name: field.shape.convert for field in fields}
    return Shape(
        {
            "type": "object",
            "properties": properties,
            "required": [field.name for field in fields if field.required],
            "additionalProperties": False,
        },
        lambda values: {name: converts[name](value) for name, value in values.items()},
    )


def parameters_of(
    function: Callable[..., Any], descriptions: Mapping[str, str], left_out: Sequence[type] = ()
) -> tuple[Shape, dict[str, type]]:
    """The shape of a function's arguments, and the parameters whose type is one of `left_out`, by name.

    `descriptions` count where the annotation has none. Raises ToolSetupError.
    """
    name = function.__name__
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ToolSetupError(f"{name}: its annotations cannot be read: {error}") from error
    fields, others = [], {}
    for parameter in inspect.signature(function).parameters.values():
        where = f"{name}: parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolSetupError(f"{where} cannot be given by name; a tool has plain parameters only")
        if parameter.name not in hints:
            raise ToolSetupError(f"{where} has no type; give it one, such as {parameter.name}: str")
        if hints[parameter.name] in left_out:
            others[parameter.name] = hints[parameter.name]
            continue
        shape = shape_of(hints[parameter.name], where)
        text = descriptions.get(parameter.name)
        if text and "description" not in shape.schema:
            shape = Shape({**shape.schema, "description": text}, shape.convert)
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        fields.append(Field(name=parameter.name, shape=shape, required=required, default=default))
    return object_shape(fields), others

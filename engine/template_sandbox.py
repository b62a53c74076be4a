"""The Jinja2 environment that chat templates are written for, safe to run on a template from any file.

What templates expect is what Hugging Face's `apply_chat_template` gives them: trimmed blocks, loop controls,
`{% generation %}`, `tojson` that keeps key order and escapes neither HTML nor other scripts, `raise_exception` and
`strftime_now`.

Jinja2's sandbox keeps a template from reaching Python objects; it does not keep it from running for ever or filling the
memory. Here every way in which a template can make a larger value or repeat itself passes a `Meter`: loops report each
round and literals and slices their size (both by nodes added to the syntax tree), operators, calls, filters and output
report what they made, and what could grow by a large factor in one step is measured before it is done. So no single
step is long, and the sum of all has a limit in time and in size.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import string
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
from jinja2 import nodes

MAX_SECONDS = 2.0
MAX_SOURCE_CHARACTERS = 1 << 16
_ITEM_SIZE = 16
_MAX_INT_BITS = 1 << 14
_METER = "(meter)"  # A name that no template can write.

Filter = Callable[..., Any]


class LimitExceeded(Exception):  # noqa: N818 - it is a refusal, not a fault of ours
    """The template takes more time or memory than any prompt needs."""


class Refused(Exception):  # noqa: N818 - the template's own word
    """The template called `raise_exception`; the text is its own."""


class Meter:
    """What one rendering has used. A size counts characters, and 16 for each item of a container."""

    def __init__(self, input_size: int) -> None:
        # A prompt is little more than its messages; a value four times as large is no part of one. The sum allows a
        # template to build its text piece by piece over hundreds of messages, which copies it as often.
        self.limit = (4 << 20) + 4 * input_size
        self._left = (64 << 20) + 256 * input_size
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, size: int = 1) -> None:
        """Count a step that has made so much. Raises LimitExceeded."""
        self._left -= size
        if self._left < 0:
            raise LimitExceeded("it makes too much text")
        if time.monotonic() > self._deadline:
            raise LimitExceeded(f"it runs for more than {MAX_SECONDS:g} s")

    def expect(self, size: int) -> None:
        """Before a step whose result may be that large."""
        if size > self.limit:
            raise LimitExceeded("it makes too much text")

    def keep(self, value: Any) -> Any:
        """The value, after its size was counted."""
        size = size_of(value, self.limit)
        self.expect(size)
        self.spend(size)
        return value


def size_of(value: Any, limit: int) -> int:
    """Size of a value with all it holds, an object that is held twice counted twice; stops soon after `limit`."""
    if isinstance(value, str):
        return len(value)
    total = 0
    todo = [value]
    while todo and total <= limit:
        item = todo.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, int):
            if item.bit_length() > _MAX_INT_BITS:
                raise LimitExceeded("it makes too large a number")
            total += item.bit_length() // 3
        elif isinstance(item, range):
            total += _ITEM_SIZE * len(item)
        elif isinstance(item, (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)):
            total += _ITEM_SIZE * len(item)
            if total <= limit:
                todo.extend(item.values() if isinstance(item, dict) else item)
                if isinstance(item, dict):
                    todo.extend(item)
        total += 1
    return total


def _meter(context: jinja2.runtime.Context) -> Meter:
    meter = context.parent[_METER]
    assert isinstance(meter, Meter)
    return meter


class _Namespace(jinja2.utils.Namespace):
    """Its text does not hold its content, which may hold the namespace itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is what is inside."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Metered(jinja2.visitor.NodeTransformer):
    """Puts the meter into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - named after the nodes
        self.generic_visit(node)
        written = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.body.insert(
            0, nodes.ExprStmt(_call_filter("(round)", nodes.Const(written + _ITEM_SIZE, lineno=node.lineno)))
        )
        return node

    def _value(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _call_filter("(keep)", node)

    visit_List = visit_Dict = _value  # noqa: N815 - named after the nodes

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._value(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call_filter("(keep)", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call_filter("(concat)", nodes.List(node.nodes, lineno=node.lineno))


def _call_filter(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


# -- what may grow by a large factor in one step: measured first ---------------------------------------------------


def _join(meter: Meter, separator: str, values: Iterable[Any]) -> str:
    texts = [str(value) for value in values]
    meter.expect(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _replace(meter: Meter, text: str, old: str, new: str, count: int = -1) -> str:
    found = text.count(old)
    meter.expect(len(text) + len(new) * (found if count < 0 else min(found, count)))
    return text.replace(old, new, count)


def _expect_percent(meter: Meter, text: str, values: Any) -> None:
    if re.search(r"\d{5}|%[^a-zA-Z%]*\*", text):
        raise LimitExceeded("it pads text to more than 9,999 characters")
    meter.expect(len(text) + text.count("%") * size_of(values, meter.limit))


def _expect_format(meter: Meter, text: str, values: Any) -> None:
    fields = 0
    for _, field, spec, _ in string.Formatter().parse(text):
        fields += field is not None
        if spec and ("{" in spec or re.search(r"\d{5}", spec)):
            raise LimitExceeded("it pads text to more than 9,999 characters")
    meter.expect(len(text) + fields * size_of(values, meter.limit))


def _expect_method(meter: Meter, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a call of a method of a built-in type."""
    name, owner = method.__name__, method.__self__
    numbers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)]
    if isinstance(owner, str) and name in ("format", "format_map"):
        _expect_format(meter, owner, [list(args), kwargs])
    elif isinstance(owner, str) and name == "expandtabs":
        meter.expect(len(owner) + owner.count("\t") * abs(max(numbers, default=8)))
    elif isinstance(owner, (str, int)):
        meter.expect(max(numbers, default=0))


# -- filters -------------------------------------------------------------------------------------------------------


@jinja2.pass_context
def _filter_round(context: jinja2.runtime.Context, size: int) -> str:
    _meter(context).spend(size)
    return ""


@jinja2.pass_context
def _filter_keep(context: jinja2.runtime.Context, value: Any) -> Any:
    return _meter(context).keep(value)


@jinja2.pass_context
def _filter_concat(context: jinja2.runtime.Context, values: list[Any]) -> Any:
    meter = _meter(context)
    return meter.keep(_join(meter, "", values))


@jinja2.pass_context
def _filter_join(
    context: jinja2.runtime.Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    meter = _meter(context)
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(context.environment, attribute), value)
    return _kept_text(meter, _join(meter, str(d), value))


@jinja2.pass_context
def _filter_replace(context: jinja2.runtime.Context, s: str, old: str, new: str, count: int | None = None) -> str:
    meter = _meter(context)
    return _kept_text(meter, _replace(meter, str(s), str(old), str(new), -1 if count is None else count))


@jinja2.pass_context
def _filter_indent(
    context: jinja2.runtime.Context, s: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    meter = _meter(context)
    meter.expect(len(s) + (len(s.splitlines()) + 1) * (width if isinstance(width, int) else len(width)))
    return _kept_text(meter, jinja2.filters.do_indent(s, width, first, blank))


@jinja2.pass_context
def _filter_format(context: jinja2.runtime.Context, value: str, *args: Any, **kwargs: Any) -> str:
    meter = _meter(context)
    _expect_percent(meter, str(value), [list(args), kwargs])
    return _kept_text(meter, jinja2.filters.do_format(value, *args, **kwargs))


@jinja2.pass_context
def _filter_sum(
    context: jinja2.runtime.Context, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> Any:
    if not isinstance(start, (int, float)):
        raise LimitExceeded("it sums what are no numbers")
    return _meter(context).keep(jinja2.filters.do_sum(context.environment, iterable, attribute, start))


@jinja2.pass_context
def _filter_tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON with the keys in the given order and every character as it is: what templates were trained with."""
    meter = _meter(context)
    if separators is not None and sum(map(len, separators)) > _ITEM_SIZE:
        raise LimitExceeded("it separates JSON with long texts")
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    chunks = []
    for chunk in [encoder.encode(value)] if indent is None else encoder.iterencode(value):
        meter.spend(len(chunk))
        chunks.append(chunk)
    text = "".join(chunks)
    # Noncharacters stay as they are: they are the marks of whoever renders.
    escaped = "[^\x00-\x7f\ufdd0-\ufdef]"
    return re.sub(escaped, lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _kept_text(meter: Meter, text: str) -> str:
    meter.keep(text)
    return text


_OWN_FILTERS = {
    "(round)": _filter_round,
    "(keep)": _filter_keep,
    "(concat)": _filter_concat,
    "join": _filter_join,
    "replace": _filter_replace,
    "indent": _filter_indent,
    "format": _filter_format,
    "sum": _filter_sum,
    "tojson": _filter_tojson,
}
# No chat template was found to use these, and each can make much of little, or another prompt each time.
_LEFT_OUT = ("center", "wordwrap", "urlize", "xmlattr", "pprint", "random", "filesizeformat")
_COUNTING = ("batch", "slice", "round")
_MAX_COUNT = 10_000


def _metered_filter(name: str, function: Filter) -> Filter:
    """One of Jinja2's filters, whose result is counted."""
    passes = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @jinja2.pass_context
    @functools.wraps(function)
    def metered(context: jinja2.runtime.Context, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        if name in _COUNTING and any(
            isinstance(arg, int) and abs(arg) > _MAX_COUNT for arg in (*args[1:], *kwargs.values())
        ):
            raise LimitExceeded(f"it asks the filter {name} for more than {_MAX_COUNT:,}")
        if passes:
            passed = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
            args = (passed[passes], *args)
        return meter.keep(function(*args, **kwargs))

    return metered


# -- the environment -----------------------------------------------------------------------------------------------


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 200:
        raise LimitExceeded("it formats the time at length")
    return datetime.datetime.now().astimezone().strftime(format)


@jinja2.pass_context
def _finalize(context: jinja2.runtime.Context, value: Any) -> Any:
    return _meter(context).keep(value)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise LimitExceeded(f"it has {len(source):,} characters, and {MAX_SOURCE_CHARACTERS:,} are the limit")
        tree = _Metered().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        assert isinstance(tree, nodes.Template)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (str, int)) and attr in ("translate", "maketrans", "encode", "to_bytes", "from_bytes"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise LimitExceeded("it makes too large a number")
        elif operator == "*":
            text, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(count, int) and isinstance(text, (str, list, tuple)):
                meter.expect(size_of(text, meter.limit) * max(count, 0))
        elif operator == "%" and isinstance(left, str):
            _expect_percent(meter, left, right)
        return meter.keep(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = _meter(__context)
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(method, BuiltinMethodType):
            owner, name = method.__self__, method.__name__
            # Jinja2 tells of variables that are set in a loop, and takes that out again in its own `call`.
            given = {word: value for word, value in kwargs.items() if word not in ("_loop_vars", "_block_vars")}
            if isinstance(owner, str) and name == "join":
                return meter.keep(_join_strict(meter, owner, *args, **given))
            if isinstance(owner, str) and name == "replace":
                return meter.keep(_replace(meter, owner, *args, **given))
            _expect_method(meter, method, args, given)
        return meter.keep(super().call(__context, __obj, *args, **kwargs))


def _join_strict(meter: Meter, separator: str, values: Iterable[str]) -> str:
    """`str.join`, which takes nothing but texts."""
    texts = list(values)
    meter.expect(sum(len(text) + len(separator) for text in texts))
    return separator.join(texts)


def make_environment() -> jinja2.Environment:
    """The environment in which templates of model files are compiled: they reach values, and nothing of Python."""
    # Not optimized: constant expressions would be worked out while compiling, where no meter runs.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_finalize,
        extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _metered_filter(name, function)
    environment.filters.update(_OWN_FILTERS)
    for name in _LEFT_OUT:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The template's text. Raises Refused, LimitExceeded, and whatever the template's own mistakes raise."""
    meter = Meter(size_of(variables, 1 << 40))
    return template.render({**variables, _METER: meter})

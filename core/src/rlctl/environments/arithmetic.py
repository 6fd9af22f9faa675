"""Arithmetic without ``eval``: what a model writes is parsed, and only numbers and operators are computed, within bounds.

Standard library only.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_LETTERS = 200
MAX_BITS = 512
"""Size of a whole number, of the base and of the result of a power."""

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, ``+ - * / // % **`` and brackets; a whole number is written as one.

    Raises:
        ValueError: it is no such expression, too long, or a value is too large or undefined; the words are for the model.
    """
    if len(expression) > MAX_LETTERS:
        raise ValueError(f"the expression is longer than {MAX_LETTERS} letters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    try:
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, RecursionError):
        raise ValueError("a value is too large") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and brackets can be computed")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        # Before it is computed: the digits of a power are what would take the time.
        if abs(exponent) * base.bit_length() > 2 * MAX_BITS:
            raise OverflowError
        return base**exponent
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a root of a negative number")
    return base**exponent


def _bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise OverflowError
    elif not math.isfinite(value):
        raise OverflowError
    return value

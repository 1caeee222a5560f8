"""Expressions of the official checker's configuration, parsed and never run, as checks of `forms.py`.

For `make_rules.py` alone. What is outside of the vocabulary raises Untranslated.
"""

from __future__ import annotations

import ast
from typing import Any

from timetrial.results.expressions import keys_of

Table = dict[str, Any]
FLAGS = {"init_started": "init_start", "init_stopped": "init_stop", "run_started": "run_start"}
"""The checker's flags -> the key whose first event sets them (common.yaml, POST)."""
COMPARISONS = {ast.Eq: "equals", ast.Lt: "below", ast.LtE: "at_most", ast.Gt: "above", ast.GtE: "at_least"}
MIRRORED = {"equals": "equals", "below": "above", "at_most": "at_least", "above": "below", "at_least": "at_most"}
ARITHMETIC = {ast.Add: "plus", ast.Sub: "minus", ast.Mult: "times", ast.Div: "over"}


class Untranslated(Exception):
    """An expression outside of the vocabulary."""


class Translator:
    """Turns the checker's expressions into checks; `state` holds what its `s` stands for, as our expressions."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.set_by: dict[str, str] = {}
        """Name in `s` -> the key whose POST sets it, so that it has to be logged before."""
        self.used: list[str] = []
        """Keys that the expressions translated last need besides those they name."""

    def number(self, node: ast.expr) -> Any:
        """An arithmetic expression as a prefix list, a bare number or a text."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Subscript):
            name = self._subscript(node)
            if name == "value":
                return ["key", "value"]
            if name.startswith("s."):
                if name[2:] not in self.state:
                    raise Untranslated(f"s[{name[2:]!r}] is set nowhere before")
                value, key = self.state[name[2:]], self.set_by.get(name[2:], "")
                if key and key not in keys_of(value):
                    self.used.append(key)
                return value
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            return [ARITHMETIC[type(node.op)], _operand(self.number(node.left)), _operand(self.number(node.right))]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and ast.unparse(node.right) == "0.5":
            return ["root", _operand(self.number(node.left))]
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function == "int":
                return self.number(node.args[0])
            if function in ("math.ceil", "math.floor"):
                return [function[5:], _operand(self.number(node.args[0]))]
            if function == "max":
                return ["most", *(_operand(self.number(arg)) for arg in node.args)]
        raise Untranslated(ast.unparse(node))

    def _subscript(self, node: ast.Subscript) -> str:
        """`value`, `metadata.X`, `value.X` or `s.X`."""
        text = ast.unparse(node)
        parts = [p.strip("'\"") for p in text.replace("]", "").split("[")]
        if parts[0] == "v" and len(parts) in (2, 3):
            return ".".join(parts[1:])
        if parts[0] == "s" and len(parts) == 2:
            return f"s.{parts[1]}"
        raise Untranslated(text)

    def checks(self, node: ast.expr) -> list[Table]:
        """The checks that an expression asks for; all are to hold."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            return [check for part in node.values for check in self.checks(part)]
        if isinstance(node, ast.BoolOp):
            return [self._either(node)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            names, place = zip(*(self._membership(part) for part in (node.left, node.right)), strict=True)
            return [{"form": "has", "of": place[0], "any": list(names)}]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            flag = self._subscript(node.operand).removeprefix("s.")  # type: ignore[arg-type]
            return [{"form": "before", "key": FLAGS[flag]}]
        if isinstance(node, ast.IfExp) and ast.unparse(node.orelse) == "True":
            name, _ = self._membership(node.test)
            return [{**check, "when_has": name} for check in self.checks(node.body)]
        if isinstance(node, ast.Subscript):
            return [{"form": "after", "key": FLAGS[self._subscript(node).removeprefix("s.")]}]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "is_integer":
            return [self._whole(node.args[0])]
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        raise Untranslated(ast.unparse(node))

    def _either(self, node: ast.BoolOp) -> Table:
        values = []
        for part in node.values:
            (check,) = self.checks(part)
            if check["form"] != "equals" or "of" in check:
                raise Untranslated(ast.unparse(node))
            values.append(check["value"])
        return {"form": "one_of", "values": values}

    def _membership(self, node: ast.expr) -> tuple[str, str]:
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and isinstance(node.left, ast.Constant):
            place = node.comparators[0]
            if isinstance(place, ast.Subscript):
                return str(node.left.value), self._subscript(place)
        raise Untranslated(ast.unparse(node))

    def _whole(self, node: ast.expr) -> Table:
        if isinstance(node, ast.Subscript):
            return {"form": "whole"}
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return {"form": "multiple_near", "value": self.number(node.right)}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "math.log2" and isinstance(node.args[0], ast.BinOp):
            return {"form": "power_of_two", "value": self.number(node.args[0].right)}
        raise Untranslated(ast.unparse(node))

    def _comparison(self, node: ast.Compare) -> list[Table]:
        text = ast.unparse(node)
        if len(node.ops) == 2:
            of = self._of(node.comparators[0])
            return [{"form": "range", **of, "least": self.number(node.left), "most": self.number(node.comparators[1])}]
        op, left, right = node.ops[0], node.left, node.comparators[0]
        if text == "s['init_stopped'] == True":
            return [{"form": "after", "key": "init_stop"}]
        if isinstance(op, ast.IsNot):  # `s['x'] is not None`: an operand that is missing fails anyway
            return []
        if isinstance(op, ast.NotEq) and isinstance(right, ast.Constant) and right.value == "":
            return [{"form": "not_empty"}]
        if isinstance(op, ast.In):
            if text == "'value' in v":  # the reader's matter: an event always has a value
                return []
            if isinstance(left, ast.Constant):
                name, place = self._membership(node)
                return [{"form": "has", "of": place, "any": [name]}]
            return [{"form": "one_of", **self._of(left), "values": ast.literal_eval(right)}]
        if text.startswith("ll.timestamp - s['first_init_start']"):
            return [
                {"form": "after", "key": "submission_division"},
                {"form": "within_minutes", "key": "init_start", "closed": 30, "open": 240},
            ]
        if isinstance(left, ast.Call) and ast.unparse(left.func) == "abs" and isinstance(left.args[0], ast.BinOp):
            inside = left.args[0]
            return [{"form": "near", "value": self.number(inside.right), "within": self.number(right)}]
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
            return [{"form": "multiple_of", **self._of(left.left), "value": self.number(left.right)}]
        form = COMPARISONS.get(type(op))
        if form is None:
            raise Untranslated(text)
        if "next_validation_samples" in text:
            first = self.state["validation_start_samples"]
            return [{"form": "stepping", **self._of(left), "first": first, "step": ["key", "global_batch_size"]}]
        try:
            return [{"form": form, **self._of(left), "value": self.number(right)}]
        except Untranslated:
            if form != "equals":
                raise
            return [{"form": "equation", "left": self.number(left), "right": self.number(right)}]

    def _of(self, node: ast.expr) -> Table:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "int":
            node = node.args[0]
        if not isinstance(node, ast.Subscript):
            raise Untranslated(ast.unparse(node))
        name = self._subscript(node)
        if name.startswith("s."):
            raise Untranslated(ast.unparse(node))
        return {} if name == "value" else {"of": name}

    def assign(self, code: str, key: str) -> list[str]:
        """Take over what a POST block keeps in `s`; returns the keys that it needs to have been logged before."""
        needed: list[str] = []
        for statement in ast.parse(code.strip()).body:
            if not isinstance(statement, ast.Assign):
                continue  # enqueue_config, read by the caller; the step of next_validation_samples is `stepping`
            name = self._subscript(statement.targets[0])  # type: ignore[arg-type]
            if name.removeprefix("s.") in (*FLAGS, "run_stopped", "first_init_start", "compile_time_mins"):
                continue
            value = _of_key(self.number(statement.value), key)
            text = ast.unparse(statement.value)
            needed += [k for k in keys_of(value) if k != key and "s[" in text]
            self.state[name[2:]], self.set_by[name[2:]] = value, key
        return list(dict.fromkeys(needed))


def _operand(expression: Any) -> Any:
    """Inside a list a bare key stands for itself."""
    return expression[1] if isinstance(expression, list) and expression[0] == "key" else expression


def _of_key(expression: Any, key: str) -> Any:
    """`value` written as the key that it is the value of."""
    if isinstance(expression, list):
        return [expression[0], *(_of_key(x, key) for x in expression[1:])]
    return key if expression == "value" else expression

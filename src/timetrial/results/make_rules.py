"""Make the rule files of the rounds: `python -m timetrial.results.make_rules [ROUND ...]`.

Reads the official checker's YAML (compliance_checker/training_X.Y.0) as data: every expression is parsed, never run,
and turned into the closed vocabulary of `forms.py` with the line it stands in. What cannot be turned is an error that
names the file and line, so nothing is left out unseen. `rules/text.toml` is written by hand: what the rules' text
asks beyond, and the contradictions; its entries go into the files of the rounds and benchmarks that they name.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from timetrial.results.ruleset import RULES
from timetrial.results.translate import Table, Translator, Untranslated

ROUNDS = {"v4.0": "4.0.0", "v4.1": "4.1.0", "v5.0": "5.0.0", "v5.1": "5.1.0", "v6.0": "6.0.0", "v6.1": "6.1.0"}
"""Round -> the checker's ruleset."""
VERSION = "mlperf-logging 4.1.68"
COUNTS = {"EXACTLY_ONE": "exactly_one", "AT_LEAST_ONE": "at_least_one", "OPTIONAL": "optional"}


def rules_of(path: Path, source: str) -> list[Table]:
    """The rules of one YAML file, as tables of ours. Raises SystemExit for what cannot be turned."""
    translator = Translator()
    made = []
    for entry in yaml.compose(path.read_text(), Loader=yaml.BaseLoader).value if path.read_text().strip() else []:
        kind, body = entry.value[0]
        fields = {name.value: node for name, node in body.value}
        if kind.value == "BEGIN":
            _begin(fields["CODE"].value, translator)
            continue
        key = fields["NAME"].value
        made.append(_rule(key, fields, translator, source))
    return made


def _begin(code: str, translator: Translator) -> None:
    if not code.strip().startswith("s.update("):
        return  # Stable Diffusion's gathering of metrics: `derived`
    call = ast.parse(code.strip()).body[0].value  # type: ignore[attr-defined]
    for name, value in ast.literal_eval(call.args[0]).items():
        if value is not None and not isinstance(value, bool):
            translator.state[name] = value


def _rule(key: str, fields: dict[str, Any], translator: Translator, source: str) -> Table:
    rule: Table = {"key": key, "source": source, "line": fields["NAME"].start_mark.line + 1}
    requirement = fields["REQ"].value.strip() if "REQ" in fields else ""
    if requirement.startswith("AT_LEAST_ONE_OR("):
        rule |= {"count": "at_least_one", "alternative": requirement[16:-1]}
    elif requirement.startswith("AT_LEAST("):
        rule |= {"count": "at_least_one", "at_least": int(requirement[9:-1])}
    elif requirement:
        rule["count"] = COUNTS[requirement]
    if key == "aggregated_eval_accuracy":
        rule["derived"] = "metrics_by_samples"
    for yaml_name, name in (("CHECK", "check"), ("FIRST_CHECK", "first"), ("ATLEAST_ONE_CHECK", "reached")):
        if yaml_name in fields:
            nodes = fields[yaml_name].value if isinstance(fields[yaml_name].value, list) else [fields[yaml_name]]
            rule[name] = [check for node in nodes for check in _translated(node, translator, source)]
    if "POST" in fields:
        line = fields["POST"].start_mark.line + 1
        needed = translator.assign(fields["POST"].value, key)
        rule.setdefault("check", []).extend({"form": "after", "key": k, "line": line} for k in needed)
    return {name: value for name, value in rule.items() if value != []}


def _translated(node: Any, translator: Translator, source: str) -> list[Table]:
    line = node.start_mark.line + 1
    translator.used.clear()
    try:
        checks = translator.checks(ast.parse(node.value.strip(), mode="eval").body)
    except Untranslated as problem:
        raise SystemExit(f"{source}:{line}: no form for {problem} in {node.value.strip()}") from None
    checks += [{"form": "after", "key": key} for key in dict.fromkeys(translator.used)]
    return [{**check, "line": line} for check in checks]


def directory() -> Path:
    """Where the checker's rule files lie."""
    spec = importlib.util.find_spec("mlperf_logging.compliance_checker")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("mlperf-logging is not installed")
    return Path(spec.submodule_search_locations[0])


def make(round_: str, root: Path = RULES) -> list[Path]:
    """Write the files of one round; returns them."""
    ruleset = ROUNDS[round_]
    rules = directory() / f"training_{ruleset}"
    meta = directory().parent / "benchmark_meta.py"
    names, names_line, counts = _meta(meta, ruleset[:3])
    text = tomllib.loads((root / "text.toml").read_text())

    def read(path: Path) -> list[Table]:
        return rules_of(path, f"{VERSION} compliance_checker/{path.parent.name}/{path.name}")

    def chosen(kind: str, benchmark: str) -> list[Table]:
        found = []
        for entry in text.get(kind, []):
            here = benchmark in entry["benchmarks"] and round_ in entry["rounds"]
            if here:
                taken = {k: v for k, v in entry.items() if k not in ("benchmarks", "rounds")}
                found.append({k: v.replace("{common}", common_of(entry.get("key"))) if isinstance(v, str) else v
                              for k, v in taken.items()})  # fmt: skip
        return found

    def common_of(key: str | None) -> str:
        """Where this round's common rules ask for a key."""
        line = next((f":{rule['line']}" for rule in in_common if rule["key"] == key), "")
        return f"{VERSION} compliance_checker/{rules.name}/common.yaml{line}"

    in_common = read(rules / "common.yaml")

    common: Table = {
        "round": {
            "ruleset": ruleset,
            "benchmarks": names,
            "source": f"{VERSION} benchmark_meta.py:{names_line}",
        },
        "seeds": {
            "missing": "warn" if round_ == "v4.0" else "fail",
            "source": f"{text['seeds']['source']}; {VERSION} package_checker/seed_checker.py:81",
        },
        "description": {
            **_description(directory().parent / "system_desc_checker" / "system_desc_checker.py"),
            "status_level": "warn" if round_ == "v4.0" else "fail",  # its condition means v4.1 on, and takes v4.0 too
        },
        "common": in_common,
        "closed": read(rules / "closed_common.yaml"),
        "open": read(rules / "open_common.yaml"),
        "text": chosen("text", "*"),
        "contradiction": chosen("contradiction", "*"),
    }
    out = root / round_
    out.mkdir(parents=True, exist_ok=True)
    written = [_write(out / "common.toml", common)]
    for name in names:
        count, line = counts[name]
        closed = read(rules / f"closed_{name}.yaml")
        if name == "resnet":
            closed += _optimizers(read)
        spare = 4 if name == "unet3d" else 1
        table: Table = {
            "benchmark": {"runs": count, "may_fail": spare, "source": f"{VERSION} benchmark_meta.py:{line}"},
            "closed": closed,
            "open": read(rules / f"open_{name}.yaml"),
            "text": chosen("text", name),
            "contradiction": chosen("contradiction", name),
        }
        written.append(_write(out / f"{name}.toml", table))
    return written


def _optimizers(read: Any) -> list[Table]:
    """ResNet's rules by optimizer; the checker of v4.0 reads those of v3.1 (closed_resnet.yaml:10)."""
    found = []
    for name in ("lars", "sgd"):
        for rule in read(directory() / "training_3.1.0" / f"closed_resnet_{name}.yaml"):
            found.append({**rule, "when": {"key": "opt_name", "value": name}})
    return found


def _meta(path: Path, version: str) -> tuple[list[str], int, dict[str, tuple[int, int]]]:
    """(benchmarks of a version, the line, benchmark -> (runs, line)) from benchmark_meta.py, parsed."""
    counts: dict[str, tuple[int, int]] = {}
    names: list[str] = []
    line = 0
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            training = statement.value.values[0]
            assert isinstance(training, ast.Dict)
            for key, value in zip(training.keys, training.values, strict=True):
                assert isinstance(key, ast.Constant)
                if isinstance(value, ast.Constant):
                    counts[str(key.value)] = (int(str(value.value)), key.lineno)
                elif key.value == version:
                    names, line = list(dict.fromkeys(ast.literal_eval(value))), key.lineno
    return names, line, counts


def _description(path: Path) -> Table:
    """Required fields and allowed statuses from system_desc_checker.py, parsed."""
    found: Table = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List):
            name = {"required_fields": "fields", "availability_options": "statuses"}.get(node.targets[0].id)
            if name:
                found[name] = ast.literal_eval(node.value)
                found.setdefault("lines", []).append(node.lineno)
    lines = ", ".join(str(line) for line in sorted(found.pop("lines")))
    return {**found, "source": f"{VERSION} system_desc_checker.py:{lines}"}


# ---- TOML --------------------------------------------------------------------------------------------------


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _entry(name: str, value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{name} = [\n" + "".join(f"  {_value(v)},\n" for v in value) + "]"
    return f"{name} = {_value(value)}"


def _write(path: Path, table: Table) -> Path:
    parts = ["# Made by `python -m timetrial.results.make_rules`; by hand: rules/text.toml. See docs/score-rules.md."]
    for name, value in table.items():
        for one in value if isinstance(value, list) else [value]:
            head = f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            parts.append("\n".join([head, *(_entry(k, v) for k, v in one.items())]))
    path.write_text("\n\n".join(parts) + "\n")
    return path


def main(arguments: list[str]) -> None:
    for round_ in arguments or ROUNDS:
        print(f"{round_}: {len(make(round_))} files")


if __name__ == "__main__":
    main(sys.argv[1:])

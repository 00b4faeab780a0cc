"""What comes from a user is data, and may be anything: each value that is refused gives a ConfigError that names the
key, the file or the variable, and nothing else ever comes out."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroguard import ConfigError, GuardConfig, load_config
from zeroguard.cli import main
from zeroguard.files import DEPTH, ENTRIES, LIMIT
from zeroguard.findings import Finding, said, shown
from zeroguard.settings import PREFIX, resolve, variables
from zeroguard.show import read_engine_config
from zeroguard.sinks import JsonLinesSink, JsonLinesSinkConfig

SCHEMA = GuardConfig.model_json_schema()

#: What a JSON or YAML file can hold.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "on", "0", "raise"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def message_of(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return str(caught.value)


def refusal(call: Callable[[], Any]) -> str:
    """What the ConfigError of a call says; empty without one. Nothing else may come out of it."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


# -- every field -----------------------------------------------------------------------------------------------------


def fields() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every field of every model: the list that the model is an entry of (empty for the whole), its name in that list,
    and the schemas of its fields."""
    yield "", "", SCHEMA["properties"]
    for key in ("guards", "sinks"):
        for reference in entries(key):
            model = SCHEMA["$defs"][reference.rsplit("/", 1)[1]]
            yield key, model["properties"]["name"]["const"], model["properties"]


def entries(key: str) -> list[str]:
    """The models of a list's entries."""
    text = json.dumps(SCHEMA["properties"][key])
    return sorted({part.split('"')[0] for part in text.split('"$ref": "')[1:]})


FIELDS = [(key, name, field, schema) for key, name, models in fields() for field, schema in models.items()]


def allows(schema: dict[str, Any], value: Any) -> bool:
    """Whether a schema of ours allows a value, as far as it says so in words that are used there."""
    if "$ref" in schema:
        return False  # a guard or a sink: their own fields are looked at
    if "anyOf" in schema:
        return any(allows(part, value) for part in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"] and isinstance(value, str))
    if "enum" in schema:
        return isinstance(value, str) and value in schema["enum"]
    kind = schema.get("type")
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        return type(value) is int and schema.get("minimum", -math.inf) <= value
    if kind == "null":
        return value is None
    if kind == "array":
        items = schema.get("items", {})
        return isinstance(value, list) and "oneOf" not in items and all(allows(items, item) for item in value)
    return False


def near(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema allows, and some next to them."""
    if "anyOf" in schema:
        return st.one_of([near(part) for part in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from([*schema.get("enum", [schema.get("const")]), "raise ", "RAISE"])
    kinds: dict[Any, st.SearchStrategy[Any]] = {
        "boolean": st.booleans(),
        "integer": st.integers(min_value=-2, max_value=10**6),
        "null": st.none(),
    }
    if schema.get("type") == "array" and "oneOf" not in schema.get("items", {}):
        return st.lists(near(schema.get("items", {})), max_size=3)
    return kinds.get(schema.get("type"), SCALARS)


def test_the_fields_here_are_all_fields() -> None:
    models = {name for _, name, _, _ in FIELDS if name}
    assert len(models) == len(SCHEMA["$defs"])
    assert {field for key, _, field, _ in FIELDS if not key} == set(GuardConfig.model_fields)


@pytest.mark.parametrize(("key", "name", "field", "schema"), FIELDS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_refused_value_names_its_key(key: str, name: str, field: str, schema: dict[str, Any]) -> None:
    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(near(schema) | VALUES)
    def check(value: Any) -> None:
        entry = {"name": name, **({"directory": "runs"} if name == "jsonl" else {}), field: value}
        data = {key: [entry]} if key else {field: value}
        said = refusal(lambda: load_config(data))
        if said:
            assert not allows(schema, value), (value, said)
            # The wrong name of an entry takes its options with it.
            place = f"{key}.0" if key else field
            assert any(line.startswith(place) for line in said.splitlines()), said
            assert field == "name" or field in said, (value, said)
            assert len(said) < 3000
        else:
            made = load_config(data)
            assert load_config(json.loads(made.model_dump_json())) == made

    check()


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([*GuardConfig.model_fields, "gards", "", "on"]), VALUES, max_size=4))
def test_any_mapping_is_a_configuration_or_an_error(data: dict[str, Any]) -> None:
    said = refusal(lambda: load_config(data))
    assert not said or any(str(key) in said for key in data), said


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(st.sampled_from([".yaml", ".json", ".toml"]), st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_a_configuration_or_an_error(suffix: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"guard{suffix}")
        path.write_bytes(data)
        said = refusal(lambda: load_config(path))
        assert not said or said.startswith(f"{path}: ")


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.sampled_from([".yaml", ".json"]), VALUES)
def test_any_document_is_a_configuration_or_an_error(suffix: str, value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"guard{suffix}")
        path.write_text(json.dumps(value) if suffix == ".json" else yaml.safe_dump(value), encoding="utf-8")
        said = refusal(lambda: load_config(path))
        assert not said or said.startswith(f"{path}: ")


VARIABLES = sorted(variables())


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.sampled_from(VARIABLES), st.text(max_size=30) | VALUES.map(json.dumps) | st.just("\udcff"))
def test_any_variable_is_a_value_or_an_error(name: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = refusal(lambda: resolve(environ={name: text}, directory=Path(folder)))
        assert not said or name in said


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(st.text(max_size=20))
def test_any_name_of_a_variable(name: str) -> None:
    said = refusal(lambda: resolve(environ={PREFIX + name: "1"}, directory=Path("/nowhere")))
    assert not said or PREFIX + name in said


@pytest.mark.parametrize(
    "text", ["[" * 5000, "[" * 200 + "]" * 200, '{"a": 1, "a": 2}', "1" * 5000, "NaN", "\ud800", "[[{}]]", "{}"]
)
def test_json_in_a_variable_that_is_nonsense(text: str) -> None:
    with pytest.raises(ConfigError, match="ZEROGUARD_GUARDS") as caught:
        resolve(environ={"ZEROGUARD_GUARDS": text}, directory=Path("/nowhere"))
    assert len(str(caught.value)) < 1500


# -- files that expand, nest, repeat themselves ----------------------------------------------------------------------


def bomb(levels: int) -> str:
    """Each level holds nine times the one before: nine to the power of ``levels`` values."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels + 1)]
    return "\n".join(lines)


CIRCLE = "stands inside what it refers to"
DEEP = f"more than {DEPTH} lists and mappings"
TWICE = "stands there twice"


@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        (".yaml", bomb(60), f"more than {ENTRIES} values, with its aliases written out"),
        (".yaml", bomb(5), f"more than {ENTRIES} values, with its aliases written out"),
        (".yaml", "x: [" + "1, " * ENTRIES + "1]", f"more than {ENTRIES} values"),
        (".yaml", "guards: &a [*a]", CIRCLE),
        (".yaml", "guards: [&a {name: host_read, x: *a}]", CIRCLE),
        (".yaml", "[" * 100_000, DEEP),
        (".yaml", "a: " + "[" * (DEPTH + 1) + "]" * (DEPTH + 1), DEEP),
        (".json", "[" * 100_000, DEEP),
        (".json", "[" * 200 + "]" * 200, DEEP),
        (".json", '{"a":' * 500 + "1" + "}" * 500, DEEP),
        (".toml", "a = " + "[" * 5000 + "]" * 5000, DEEP),
        (".yaml", "agree: true\nmax_findings: 3\nagree: false", f"line 3: key 'agree' {TWICE}"),
        (".yaml", "guards:\n- {name: host_read, wait: event, wait: device}", f"line 2: key 'wait' {TWICE}"),
        (".json", '{"agree": true, "agree": false}', f"key 'agree' {TWICE}"),
        (".toml", "agree = true\nagree = false", "not valid TOML"),
        (".yaml", "a: !!python/object/apply:os.system [touch pwned]", "not valid YAML"),
        (".yaml", "a: !!python/name:os.system", "not valid YAML"),
        (".yaml", "a: true\n---\nb: true", "not valid YAML"),
        (".yaml", "- agree\n- true", "holds list (['agree', True]); a mapping of keys to values is needed"),
        (".json", "[" + "1, " * 9999 + "1]", "characters)); a mapping of keys to values is needed"),
        (".json", "[]", "holds list ([])"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, suffix: str, text: str, expected: str) -> None:
    path = tmp_path / f"guard{suffix}"
    path.write_text(text, encoding="utf-8")
    message = message_of(path)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert len(message) < 1500
    assert list(tmp_path.iterdir()) == [path]


def test_aliases_that_save_a_few_words_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "guard.yaml"
    path.write_text("guards:\n- &a {name: host_read, wait: device}\n- <<: *a\n  name: param_status\n", "utf-8")
    assert "unknown key 'wait'" in message_of(path)
    path.write_text("max_findings: &n 7\nguards: [{name: param_status, gathered_boundaries: *n}]\n", "utf-8")
    assert load_config(path).max_findings == 7


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
def test_a_byte_order_mark_is_no_mistake(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"guard{suffix}"
    text = {".yaml": "agree: false", ".json": '{"agree": false}', ".toml": "agree = false"}[suffix]
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_config(path).agree is False


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
def test_a_file_in_another_encoding(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"guard{suffix}"
    path.write_bytes("# Größe\n".encode("latin-1"))
    assert message_of(path) == f"{path}: not UTF-8 text: byte 0xf6 at 4; save it as UTF-8"


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
def test_a_huge_file_is_not_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"guard{suffix}"
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no room on the disk
    assert f"larger than {LIMIT // 1024} KiB" in message_of(path)
    path.write_text("#" + "x" * (LIMIT - 1), encoding="utf-8")
    if suffix != ".json":
        assert load_config(path) == GuardConfig()


def places(folder: Path) -> dict[str, tuple[Path, str]]:
    """Paths that lead to no file, and what is said of each."""
    circle, pipe, dangling = folder / "circle.yaml", folder / "pipe.yaml", folder / "dangling.yaml"
    circle.symlink_to(folder / "second.yaml")
    (folder / "second.yaml").symlink_to(circle)
    dangling.symlink_to(folder / "gone.yaml")
    os.mkfifo(pipe)
    (folder / "folder.yaml").mkdir()
    return {
        "circle": (circle, "symbolic links lead in a circle"),
        "dangling": (dangling, "no such file"),
        "folder": (folder / "folder.yaml", "is a folder"),
        "pipe": (pipe, "is no regular file"),
        "missing": (folder / "missing.yaml", "no such file"),
        "below a file": (folder / "pipe.yaml" / "x.yaml", "cannot be read: Not a directory"),
        "too long": (folder / ("x" * 300 + ".yaml"), "cannot be read: File name too long"),
        "null": (Path("a\0b.yaml"), "cannot be read: embedded null byte"),
        "device": (Path(os.devnull), "is no regular file"),
    }


KINDS = ("circle", "dangling", "folder", "pipe", "missing", "below a file", "too long", "null", "device")


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_is_no_file(tmp_path: Path, kind: str) -> None:
    path, expected = places(tmp_path)[kind]
    message = message_of(path)
    assert expected in message
    assert "give a .yaml, .yml, .json or .toml file" in message
    with pytest.raises(ConfigError, match="environment variable ZEROGUARD_CONFIG: "):
        resolve(environ={"ZEROGUARD_CONFIG": str(path)}, directory=tmp_path)


@pytest.mark.parametrize("kind", ["circle", "dangling", "folder", "pipe"])
def test_a_file_in_the_working_directory_that_cannot_be_read_is_not_passed_over(tmp_path: Path, kind: str) -> None:
    path, expected = places(tmp_path)[kind]
    (tmp_path / "job").mkdir()
    path.rename(tmp_path / "job" / "zeroguard.yaml")
    with pytest.raises(ConfigError, match=r"zeroguard\.yaml: ") as caught:
        resolve(environ={}, directory=tmp_path / "job")
    assert expected.split(":")[0] in str(caught.value) or kind == "circle"


# -- the DeepSpeed configuration -------------------------------------------------------------------------------------


def engine_message(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve(environ={}, directory=path.parent, engine_config=read_engine_config(path))
    return str(caught.value)


def test_a_deepspeed_file_with_comments_auto_and_keys_twice(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    # "auto" is Accelerate's word everywhere but under our key.
    path.write_text(
        '{\n  // ours\n  "train_batch_size": "auto", /* theirs */\n  # and this\n  "zeroguard": {"agree": false}\n}',
        "utf-8",
    )
    assert resolve(environ={}, directory=tmp_path, engine_config=read_engine_config(path)).config.agree is False
    auto = '{"zeroguard": {"guards": [{"name": "host_read", "wait": "auto"}]}}'
    assert "key \"zeroguard\" of the DeepSpeed configuration: guards.0.wait: 'auto'" in engine_message(path, auto)
    assert f"key 'zeroguard' {TWICE}" in engine_message(path, '{"zeroguard": {}, "zeroguard": {}}')
    assert f"key 'agree' {TWICE}" in engine_message(path, '{"zeroguard": {"agree": true, "agree": true}}')
    assert "holds list" in engine_message(path, '{"zeroguard": []}')
    assert DEEP in engine_message(path, '{"a":' * 500 + "1" + "}" * 500)
    assert "larger than" in engine_message(path, " " * (LIMIT + 1))


def test_the_command_line_says_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, (path, expected) in places(tmp_path).items():
        if kind == "null":
            continue  # no argument of a process can hold one
        for option in ("--config", "--deepspeed"):
            assert main(["config", "show", option, str(path)]) == 1
            assert expected in capsys.readouterr().err
        assert main(["run", "--config", str(path), sys.executable]) == 2
        assert expected in capsys.readouterr().err


# -- what is written stays where it belongs --------------------------------------------------------------------------


def finding() -> Finding:
    return Finding("g", "../../kind", "warning", 0, 0, ("../../x",), "e", "s", "c", "r")


def test_a_report_stays_in_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine\n", encoding="utf-8")
    folder = tmp_path / "runs" / ".." / "runs" / "guard"
    sink = JsonLinesSink(JsonLinesSinkConfig(directory=folder), 0)
    sink.write(finding())
    sink.close()
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == [
        "outside",
        "runs/guard/rank-0.jsonl",
    ]
    (folder / "rank-1.jsonl").symlink_to(outside)
    with pytest.raises(ConfigError, match=r"sinks: jsonl: .*rank-1.jsonl: is a symbolic link; give a directory"):
        JsonLinesSink(JsonLinesSinkConfig(directory=folder), 1)
    assert outside.read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize(
    ("directory", "why"),
    [("file", "File exists"), ("file/below", "Not a directory"), ("x" * 300, "File name too long"), ("a\0b", "null")],
)
def test_a_folder_that_cannot_be_written(tmp_path: Path, directory: str, why: str) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"sinks: jsonl: .*{why}"):
        JsonLinesSink(JsonLinesSinkConfig(directory=tmp_path / directory), 0)


# -- texts of what may be anything -----------------------------------------------------------------------------------


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class RudeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_values_and_errors_that_cannot_be_shown() -> None:
    assert "unknown key 'x' (value <Rude whose repr raises RuntimeError>)" in message_of({"x": Rude()})
    assert shown("x" * 1000).endswith("... (1002 characters)")
    assert said(RudeError()) == "RudeError, whose message cannot be had: RuntimeError"
    assert said(ValueError("x" * 1000)).endswith("... (1012 characters)")

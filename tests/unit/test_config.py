"""GuardConfig: sources, refusals and their messages, the schema, and that the documentation is true."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pydantic
import pytest
import yaml
from pydantic import ValidationError

from zeroguard import ConfigError, GuardConfig, __version__, load_config
from zeroguard.cli import main, schema_text
from zeroguard.config import GUARDS, AutomaticConfig
from zeroguard.guards.accumulation import AccumulationConfig
from zeroguard.guards.accumulator_reset import AccumulatorResetConfig
from zeroguard.guards.base import GuardModel
from zeroguard.guards.gradient_audit import GradientAuditConfig
from zeroguard.guards.host_read import HostReadConfig
from zeroguard.guards.param_status import ParamStatusConfig
from zeroguard.guards.retained_graph import RetainedGraphConfig
from zeroguard.settings import resolve, variables
from zeroguard.sinks import JsonLinesSinkConfig, LoggingSinkConfig

DOCS = Path(__file__).parents[2] / "docs"
MODELS: tuple[type[GuardModel], ...] = (
    GuardConfig,
    AutomaticConfig,
    HostReadConfig,
    AccumulationConfig,
    GradientAuditConfig,
    RetainedGraphConfig,
    AccumulatorResetConfig,
    ParamStatusConfig,
    LoggingSinkConfig,
    JsonLinesSinkConfig,
)
GUARD_NAMES = ("host_read", "retained_graph", "accumulator_reset", "param_status", "accumulation", "gradient_audit")

DATA: dict[str, Any] = {
    "on_violation": "warn",
    "guards": [{"name": "retained_graph", "action": "detect"}, {"name": "host_read", "wait": "device"}],
    "sinks": [{"name": "jsonl", "directory": "runs"}],
}
YAML = """
on_violation: warn
guards:
  - {name: retained_graph, action: detect}
  - {name: host_read, wait: device}
sinks:
  - {name: jsonl, directory: runs}
"""
TOML = """
on_violation = "warn"
[[guards]]
name = "retained_graph"
action = "detect"
[[guards]]
name = "host_read"
wait = "device"
[[sinks]]
name = "jsonl"
directory = "runs"
"""
EXPECTED = GuardConfig(
    on_violation="warn",
    guards=(RetainedGraphConfig(action="detect"), HostReadConfig(wait="device")),
    sinks=(JsonLinesSinkConfig(directory=Path("runs")),),
)


def message_of(source: Any) -> str:
    """The text of the ConfigError that ``source`` gives."""
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return str(caught.value)


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# -- sources ---------------------------------------------------------------------------------------------------------


def test_none_gives_the_defaults() -> None:
    config = load_config(None)
    assert config == GuardConfig()
    assert config.guards is None
    assert config.on_violation == "raise"
    assert config.on_unavailable == "raise"
    assert config.agree is True
    assert config.max_findings == 1000
    assert config.sinks == (LoggingSinkConfig(),)


def test_a_model_is_used_as_it_is() -> None:
    assert load_config(EXPECTED) is EXPECTED


def test_a_dict() -> None:
    assert load_config(DATA) == EXPECTED


def test_a_dict_with_models_inside() -> None:
    assert load_config({"guards": [HostReadConfig(wait="stream")]}).guards == (HostReadConfig(wait="stream"),)


@pytest.mark.parametrize("as_text", [False, True], ids=["Path", "str"])
@pytest.mark.parametrize(
    ("name", "text"),
    [("g.yaml", YAML), ("g.yml", YAML), ("g.YAML", YAML), ("g.json", json.dumps(DATA)), ("g.toml", TOML)],
)
def test_a_file(tmp_path: Path, name: str, text: str, as_text: bool) -> None:
    path = written(tmp_path, name, text)
    assert load_config(str(path) if as_text else path) == EXPECTED


def test_an_empty_yaml_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "g.yaml", "# nothing yet\n")) == GuardConfig()


def test_an_empty_list_of_guards_is_not_the_automatic_choice() -> None:
    assert load_config({"guards": []}).guards == ()
    assert load_config({"guards": None}).guards is None


def test_dump_and_load_again() -> None:
    assert load_config(json.loads(EXPECTED.model_dump_json())) == EXPECTED


def test_the_source_dict_is_not_changed() -> None:
    before = json.dumps(DATA)
    load_config(DATA)
    assert json.dumps(DATA) == before


# -- frozen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_frozen(model: type[GuardModel]) -> None:
    config = model(directory="runs") if model is JsonLinesSinkConfig else model()
    for name in model.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(config, name, None)


def test_sequences_cannot_be_changed_either() -> None:
    assert isinstance(GuardConfig(guards=[], sinks=[]).guards, tuple)
    assert isinstance(GuardConfig(guards=[], sinks=[]).sinks, tuple)
    assert isinstance(GuardConfig().sinks, tuple)
    assert isinstance(load_config(DATA).guards, tuple)
    assert isinstance(load_config(DATA).sinks, tuple)
    assert isinstance(ParamStatusConfig(check_at=["close"]).check_at, tuple)


# -- unknown keys ----------------------------------------------------------------------------------------------------


def nested(model: type[GuardModel], extra: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which ``model`` has the extra keys."""
    if model is GuardConfig:
        return extra
    name = model.model_fields["name"].default
    inner = {"name": name, **({"directory": "runs"} if name == "jsonl" else {}), **extra}
    return {"guards" if name in (*GUARD_NAMES, "automatic") else "sinks": [inner]}


@pytest.mark.parametrize(
    ("model", "key", "near"),
    [
        (GuardConfig, "gards", "guards"),
        (GuardConfig, "on_violaton", "on_violation"),
        (HostReadConfig, "mod", "mode"),
        (AccumulationConfig, "acton", "action"),
        (RetainedGraphConfig, "actoin", "action"),
        (AccumulatorResetConfig, "idel", "idle"),
        (ParamStatusConfig, "checkat", "check_at"),
        (LoggingSinkConfig, "repair", "repairs"),
        (JsonLinesSinkConfig, "directry", "directory"),
    ],
)
def test_unknown_key_is_named_with_value_allowed_keys_and_a_near_match(
    model: type[GuardModel], key: str, near: str
) -> None:
    message = message_of(nested(model, {key: "strange-value"}))
    assert repr(key) in message
    assert "'strange-value'" in message
    assert f"did you mean {near!r}?" in message
    allowed = message.split("allowed: ")[1].split(";")[0].split(", ")
    assert allowed == sorted(model.model_fields)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_unknown_key_like_no_other_gives_no_hint(model: type[GuardModel]) -> None:
    message = message_of(nested(model, {"zzzzzz": 1}))
    assert "'zzzzzz' (value 1)" in message
    assert "did you mean" not in message


def test_unknown_key_says_where_it_is() -> None:
    message = message_of({"guards": [{"name": "retained_graph"}, {"name": "host_read", "mod": 1}]})
    assert message.startswith("guards.1")
    assert "host_read" in message


def test_key_that_is_no_text() -> None:
    assert "unknown key 1 (value 2)" in message_of({1: 2})


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_direct_construction_names_the_allowed_keys(model: type[GuardModel]) -> None:
    with pytest.raises(ValueError, match="unknown key 'gards'") as caught:
        model(gards=[])
    assert f"allowed: {', '.join(sorted(model.model_fields))}" in str(caught.value)


def test_direct_construction_of_the_whole() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'gards' \(value \[\]\).*did you mean 'guards'\?"):
        GuardConfig(gards=[])  # type: ignore[call-arg]


# -- wrong values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "key", "value", "allowed"),
    [
        ({"on_violation": "explode"}, "on_violation", "'explode'", ("raise", "warn", "record")),
        ({"on_unavailable": "ignore"}, "on_unavailable", "'ignore'", ("raise", "warn")),
        ({"guards": [{"name": "host_read", "mode": "magic"}]}, "mode", "'magic'", ("transparent", "explicit")),
        ({"guards": [{"name": "host_read", "wait": "forever"}]}, "wait", "'forever'", ("event", "stream", "device")),
        ({"guards": [{"name": "accumulation", "action": "raise"}]}, "action", "'raise'", ("repair", "detect")),
        ({"guards": [{"name": "retained_graph", "action": "raise"}]}, "action", "'raise'", ("repair", "detect")),
        ({"guards": [{"name": "accumulator_reset", "idle": "keep"}]}, "idle", "'keep'", ("zero_gradient", "untouched")),
        ({"guards": [{"name": "param_status", "action": "detect"}]}, "action", "'detect'", ("repair", "raise", "warn")),
        (
            {"guards": [{"name": "param_status", "check_at": ["close", "sometime"]}]},
            "check_at.1",
            "'sometime'",
            ("after_step", "before_forward", "mode_change", "exception", "close", "host_read", "before_checkpoint"),
        ),
        ({"guards": [{"name": "host_reed"}]}, "guards.0", "'host_reed'", GUARD_NAMES),
        ({"sinks": [{"name": "stdout"}]}, "sinks.0", "'stdout'", ("logging", "jsonl")),
    ],
)
def test_wrong_value_names_key_value_and_allowed_set(
    source: dict[str, Any], key: str, value: str, allowed: tuple[str, ...]
) -> None:
    message = message_of(source)
    assert key in message.split(": ")[0]
    assert value in message
    for name in allowed:
        assert f"'{name}'" in message.split("allowed: ")[1]


def test_the_names_here_are_all_guards() -> None:
    assert tuple(GUARDS) == GUARD_NAMES
    assert [guard.Config.model_fields["name"].default for guard in GUARDS.values()] == list(GUARD_NAMES)


@pytest.mark.parametrize("guards", [[{"mode": "explicit"}], ["host_read"]], ids=["no-name", "bare-name"])
def test_a_guard_without_name_key_is_told_the_valid_names(guards: list[Any]) -> None:
    message = message_of({"guards": guards})
    assert message.startswith("guards.0: ")
    assert "name" in message
    for name in GUARD_NAMES:
        assert f"'{name}'" in message.split("allowed: ")[1]


@pytest.mark.parametrize(
    ("source", "key", "value"),
    [
        ({"max_findings": "many"}, "max_findings", "'many'"),
        ({"max_findings": 0}, "max_findings", "0"),
        ({"max_findings": 1.5}, "max_findings", "1.5"),
        ({"agree": "maybe"}, "agree", "'maybe'"),
        ({"sinks": None}, "sinks", "None"),
        ({"guards": "host_read"}, "guards", "'host_read'"),
        ({"guards": {"name": "host_read"}}, "guards", "{'name': 'host_read'}"),
        ({"guards": [{"name": "param_status", "gathered_boundaries": 0}]}, "gathered_boundaries", "0"),
        ({"sinks": [{"name": "jsonl", "directory": 3}]}, "directory", "3"),
        ({"sinks": [{"name": "jsonl"}]}, "directory", "required"),
    ],
)
def test_wrong_type_or_bound_names_key_and_value(source: dict[str, Any], key: str, value: str) -> None:
    message = message_of(source)
    assert key in message.split(": ")[0]
    assert value in message


@pytest.mark.parametrize("value", ["host_read", {"name": "host_read"}, 3], ids=["name", "mapping", "number"])
@pytest.mark.parametrize(("key", "names"), [("guards", GUARD_NAMES), ("sinks", ("logging", "jsonl"))])
def test_no_list_is_told_what_a_list_holds(key: str, names: tuple[str, ...], value: Any) -> None:
    message = message_of({key: value})
    assert message.startswith(f"{key}: {value!r} is not a list; allowed: a list of mappings with a name out of ")
    for name in names:
        assert f"'{name}'" in message


def test_every_mistake_has_its_line() -> None:
    lines = message_of({"on_violation": "explode", "max_findings": 0}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["on_violation", "max_findings"]


@pytest.mark.parametrize("source", [3, [1], ("a",), HostReadConfig()], ids=["int", "list", "tuple", "other-model"])
def test_a_source_of_the_wrong_kind(source: Any) -> None:
    message = message_of(source)
    assert type(source).__name__ in message
    assert "GuardConfig, a dict, a path or None" in message


@pytest.mark.parametrize("second", [{"name": "host_read"}, {"name": "host_read", "mode": "explicit"}])
def test_the_same_guard_twice_is_refused(second: dict[str, Any]) -> None:
    """Which of the two would count? Nobody can tell from the file, so it is no configuration."""
    message = message_of({"guards": [{"name": "host_read"}, {"name": "retained_graph"}, second]})
    assert message.startswith("guards")
    assert "'host_read'" in message
    assert "twice" in message
    assert "'retained_graph'" not in message


def test_the_same_guard_twice_is_refused_in_direct_construction() -> None:
    with pytest.raises(ValueError, match="twice"):
        GuardConfig(guards=(HostReadConfig(), HostReadConfig(mode="explicit")))


# -- files that cannot be used ---------------------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "nothing.yaml"
    message = message_of(path)
    assert str(path) in message
    assert "no such file" in message
    for suffix in (".yaml", ".yml", ".json", ".toml"):
        assert suffix in message


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert str(tmp_path) in message_of(tmp_path)


@pytest.mark.parametrize(("name", "suffix"), [("g.ini", ".ini"), ("guard", ""), ("g.yaml.bak", ".bak")])
def test_unknown_suffix(tmp_path: Path, name: str, suffix: str) -> None:
    message = message_of(written(tmp_path, name, "x"))
    assert f"unknown kind of file {suffix!r}" in message
    assert "allowed: .yaml, .yml, .json, .toml" in message


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("g.yaml", "guards: [\n", "YAML"),
        ("g.yml", "a: b: c\n", "YAML"),
        ("g.json", '{"a":', "JSON"),
        ("g.toml", "a = ", "TOML"),
        ("g.yaml", "a: !!python/object:os.system {}\n", "YAML"),
    ],
)
def test_broken_file(tmp_path: Path, name: str, text: str, kind: str) -> None:
    path = written(tmp_path, name, text)
    message = message_of(path)
    assert message.startswith(f"{path}: ")
    assert re.search(f"not valid {kind}: ", message)


@pytest.mark.parametrize("name", ["g.yaml", "g.json", "g.toml"])
def test_a_file_that_is_not_utf8(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, b"\xff\xfe\x00")
    assert message_of(path).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("g.yaml", "- host_read\n", "list"),
        ("g.yaml", "[]\n", "list"),
        ("g.yaml", "host_read\n", "str"),
        ("g.yaml", "false\n", "bool"),
        ("g.yaml", "0\n", "int"),
        ("g.json", "[]", "list"),
        ("g.json", "null", "NoneType"),
    ],
)
def test_a_file_that_holds_no_mapping(tmp_path: Path, name: str, text: str, kind: str) -> None:
    path = written(tmp_path, name, text)
    message = message_of(path)
    assert message.startswith(f"{path}: ")
    assert kind in message


def test_mistakes_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "g.yaml", "on_violation: explode\nmax_findings: 0\n")
    lines = message_of(path).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{path}: ") for line in lines)


# -- jsonargparse, and with it LightningCLI -------------------------------------------------------------------------


def parsed(*arguments: str) -> GuardConfig:
    """What a parser with an argument ``cfg`` makes of a command line, and again of what it saves."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--cfg", type=GuardConfig)
    # Releases before 4.49 know the second name only.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    found = parser.parse_args(list(arguments))
    config: GuardConfig = instantiate(found).cfg
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a value that cannot be written
        saved = parser.dump(found)
    assert instantiate(parser.parse_string(saved)).cfg == config
    return config


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], GuardConfig()),
        (["--cfg.on_violation=warn", "--cfg.agree=false"], GuardConfig(on_violation="warn", agree=False)),
        (["--cfg.guards+={name: param_status}"], GuardConfig(guards=(ParamStatusConfig(),))),
        (
            ["--cfg.guards+={name: param_status}", "--cfg.guards+={name: host_read, wait: device}"],
            GuardConfig(guards=(ParamStatusConfig(), HostReadConfig(wait="device"))),
        ),
        (
            ["--cfg.guards=[{name: accumulator_reset, idle: untouched}]"],
            GuardConfig(guards=(AccumulatorResetConfig(idle="untouched"),)),
        ),
        (["--cfg.guards=[]"], GuardConfig(guards=())),
        (["--cfg.guards=null"], GuardConfig()),
        (
            ["--cfg.sinks+={name: jsonl, directory: runs}"],
            GuardConfig(sinks=(LoggingSinkConfig(), JsonLinesSinkConfig(directory=Path("runs")))),
        ),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_jsonargparse(arguments: list[str], expected: GuardConfig) -> None:
    assert parsed(*arguments) == expected


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--cfg.guards=[{name: host_reed}]", "'param_status', 'accumulation'"),
        ("--cfg.guards=[{name: host_read, mod: explicit}]", "did you mean 'mode'?"),
        ("--cfg.guards=host_read", "host_read"),
        ("--cfg.on_violation=explode", "explode"),
        ("--cfg.max_findings=0", "0"),
    ],
)
def test_jsonargparse_refuses(argument: str, text: str) -> None:
    with pytest.raises((jsonargparse.ArgumentError, ValidationError)) as caught:
        parsed(argument)
    assert text in str(caught.value)


# -- schema and documentation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_every_field_has_a_description(model: type[GuardModel]) -> None:
    assert model.__doc__
    for name, field in model.model_fields.items():
        assert field.description, f"{model.__name__}.{name} has no docstring"


def test_the_models_here_are_all_models() -> None:
    assert {model.__name__ for model in MODELS} == {"GuardConfig", *GuardConfig.model_json_schema()["$defs"]}


PYDANTIC = tuple(int(part) for part in pydantic.VERSION.split(".")[:2])


@pytest.mark.skipif(PYDANTIC < (2, 10), reason="earlier pydantic releases write Literal with one value differently")
def test_the_schema_in_docs_is_current() -> None:
    text = (DOCS / "guard-config.schema.json").read_text(encoding="utf-8")
    assert json.loads(text) == GuardConfig.model_json_schema(), (
        "run: zeroguard schema --out docs/guard-config.schema.json"
    )
    assert text == schema_text()


#: Bare words that some reader takes for something else: YAML 1.1 for true and false, Accelerate for its own value.
UNSAFE = {"on", "off", "yes", "no", "y", "n", "true", "false", "null", "auto"}


def words(schema: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every key that a file may have, and every value that is one out of a list, with its place in the schema."""
    if isinstance(schema, dict):
        for name in schema.get("properties", {}):
            yield f"{path}.properties", name
        for value in [*schema.get("enum", ()), schema.get("const"), schema.get("default")]:
            if isinstance(value, str):
                yield path, value
        for key, inner in schema.items():
            yield from words(inner, f"{path}.{key}")
    elif isinstance(schema, list):
        for item in schema:
            yield from words(item, path)


def test_no_word_of_the_schema_means_something_else_in_yaml() -> None:
    found = list(words(GuardConfig.model_json_schema()))
    assert {"on_violation", "host_read", "raise", "zero_gradient", "after_step"} <= {word for _, word in found}
    for place, word in found:
        assert word.lower() not in UNSAFE, place
        assert yaml.safe_load(word) == word, place
        assert yaml.safe_load(f"{word}: {word}") == {word: word}, place


def test_the_search_for_words_finds_them() -> None:
    schema = {"$defs": {"A": {"properties": {"on": {"anyOf": [{"enum": ["off", "x"]}, {"const": "auto"}]}}}}}
    assert {word for _, word in words(schema)} == {"on", "off", "x", "auto"}


def test_schema_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    printed = capsys.readouterr().out
    assert printed == schema_text()
    assert printed.endswith("}\n")
    path = tmp_path / "schema.json"
    assert main(["schema", "--out", str(path)]) == 0
    assert capsys.readouterr().out == ""
    assert path.read_text(encoding="utf-8") == printed


def test_schema_command_that_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--out", str(tmp_path / "no" / "schema.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"zeroguard {__version__}\n"


@pytest.mark.parametrize("arguments", [["no-such-command"], []], ids=["unknown", "none"])
def test_wrong_arguments_are_argparse_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_module_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "zeroguard", "--version"], capture_output=True, text=True, cwd=DOCS.parent, check=False
    )
    assert (run.returncode, run.stdout) == (0, f"zeroguard {__version__}\n")


def documentation() -> str:
    return (DOCS / "configuration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_documentation_has_every_field_with_its_default(model: type[GuardModel]) -> None:
    title = "`GuardConfig`" if model is GuardConfig else f"`{model.model_fields['name'].default}`"
    section = re.search(rf"^#+ [^\n]*{title}\n(.*?)(?=^#|\Z)", documentation(), re.DOTALL | re.MULTILINE)
    assert section, f"no section for {title}"
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section.group(1), re.MULTILINE))
    assert list(rows) == list(model.model_fields)
    for name, field in model.model_fields.items():
        default = field.default
        if isinstance(default, str | int) and not field.is_required():
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            assert rows[name].split(" | ")[1] == f"`{shown}`", name


def blocks(title: str, kinds: str) -> list[str]:
    """The code blocks of one section and its subsections."""
    section = documentation().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [text for _, text in re.findall(rf"```({kinds})\n(.*?)```", section, re.DOTALL)]


def test_documented_sources_are_merged_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (yaml_file,), (deepspeed,), (toml,) = (
        blocks("Sources", "yaml"),
        blocks("Sources", "json"),
        blocks("Sources", "toml"),
    )
    (command,), (expected,) = blocks("Sources", "sh"), blocks("Sources", "text")
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "zeroguard.yaml", yaml_file)
    written(tmp_path, "ds_config.json", deepspeed)
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words.pop(0) == "zeroguard"
    assert main(words) == 0
    assert capsys.readouterr().out == expected
    written(tmp_path, "pyproject.toml", toml)
    assert resolve("pyproject.toml", environ={}).config == load_config("zeroguard.yaml")


def test_documented_variables_are_all_variables() -> None:
    rows = re.findall(r"^\| `(ZEROGUARD_\w+)` \| (.*) \|$", documentation(), re.MULTILINE)
    assert [name for name, _ in rows] == list(variables())
    shown = {name: re.search(r"JSON text: `(.*?)`", text) for name, text in rows}
    environ = {name: found.group(1) for name, found in shown.items() if found}
    assert len(environ) == 2
    assert len(resolve(environ=environ, directory=DOCS).config.guards or ()) == 1


def test_the_documented_plugin_is_the_one_that_the_tests_install() -> None:
    folder = DOCS.parent / "tests" / "plugin_distribution"
    module, use = blocks("Guards of your own", "python")
    assert module == (folder / "backward_budget" / "__init__.py").read_text(encoding="utf-8")
    (entry,) = blocks("Guards of your own", "toml")
    assert entry in (folder / "pyproject.toml").read_text(encoding="utf-8")
    compile(use, "configuration.md", "exec")  # tests/unit/test_plugins.py runs it, where the plugin is installed


def test_documented_examples_are_one_configuration(tmp_path: Path) -> None:
    section = documentation().split("## Examples")[1].split("\n## ")[0]
    blocks = re.findall(r"```(yaml|json|toml)\n(.*?)```", section, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["yaml", "json", "toml"]
    configs = [load_config(written(tmp_path, f"guard.{kind}", text)) for kind, text in blocks]
    assert configs[0] == configs[1] == configs[2]


def test_documented_errors_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = documentation().split("## Errors")[1]
    pairs = re.findall(r"```yaml\n(.*?)```\n+```text\n(.*?)```", section, re.DOTALL)
    assert len(pairs) == 6
    monkeypatch.chdir(tmp_path)
    for source, expected in pairs:
        Path("guard.yaml").write_text(source, encoding="utf-8")
        assert message_of("guard.yaml") == expected.rstrip("\n")
    Path("guard.ini").write_text("", encoding="utf-8")
    Path("guard.json").write_text('{"a":', encoding="utf-8")
    for name in ("nothing.yaml", "guard.ini", "guard.json"):
        assert f"\n{message_of(name)}\n" in section
    with pytest.raises(ValidationError) as caught:
        GuardConfig(gards=[])  # type: ignore[call-arg]
    for arguments in (
        {"environ": {"ZEROGUARD_ON_VIOLATON": "warn"}},
        {"environ": {"ZEROGUARD_GUARDS": "host_read"}},
        {"environ": {}, "engine_config": {"zeroguard": {"on_violation": "auto"}}},
    ):
        with pytest.raises(ConfigError) as told:
            resolve(**arguments)
        assert f"\n{told.value}\n" in section
    # Without pydantic's last line, a link whose address has its version in it.
    assert "\n".join(str(caught.value).splitlines()[:2]) in section

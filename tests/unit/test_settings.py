"""resolve: every source, their order, where each value came from; and ``zeroguard config show``, which prints that."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from zeroguard import ConfigError, GuardConfig, __version__, load_config
from zeroguard.backends.deepspeed import config_of
from zeroguard.cli import main
from zeroguard.config import GUARDS
from zeroguard.guards.host_read import HostReadConfig
from zeroguard.guards.param_status import ParamStatusConfig
from zeroguard.settings import FILES, OTHER_VARIABLES, Resolved, known, resolve, variables
from zeroguard.show import write_table
from zeroguard.sinks import JsonLinesSinkConfig

FIELDS = tuple(GuardConfig.model_fields)
ENGINE = 'key "zeroguard" of the DeepSpeed configuration'
NOTHING = dict.fromkeys(FIELDS, "default")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no variable of ours."""
    monkeypatch.chdir(tmp_path)
    for name in variables():
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def message_of(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*args, **{"environ": {}, **kwargs})
    return str(caught.value)


def changed(resolved: Resolved) -> dict[str, str]:
    """The fields that do not come from the defaults."""
    return {name: origin for name, origin in resolved.origins.items() if origin != "default"}


# -- one source at a time --------------------------------------------------------------------------------------------


def test_nothing_gives_the_defaults() -> None:
    assert resolve() == Resolved(GuardConfig(), NOTHING)
    assert tuple(resolve().origins) == FIELDS


def test_keyword_arguments() -> None:
    resolved = resolve(on_violation="warn", guards=[{"name": "host_read"}])
    assert resolved.config == GuardConfig(on_violation="warn", guards=(HostReadConfig(),))
    assert changed(resolved) == {"guards": "keyword arguments", "on_violation": "keyword arguments"}


def test_a_dict_counts_as_keyword_arguments() -> None:
    assert changed(resolve({"agree": True})) == {"agree": "keyword arguments"}


def test_of_a_model_the_fields_that_were_set_count() -> None:
    resolved = resolve(GuardConfig(agree=True), environ={"ZEROGUARD_AGREE": "false", "ZEROGUARD_MAX_FINDINGS": "7"})
    assert resolved.config == GuardConfig(agree=True, max_findings=7)
    assert changed(resolved)["agree"] == "keyword arguments"


def test_of_a_model_with_every_field_set_what_differs_from_the_defaults_counts() -> None:
    """As jsonargparse makes them: taken literally, the environment would never count under LightningCLI."""
    complete = GuardConfig.model_validate(GuardConfig(on_violation="warn").model_dump())
    assert complete.model_fields_set == set(FIELDS)
    resolved = resolve(complete, environ={"ZEROGUARD_MAX_FINDINGS": "7"})
    assert resolved.config == GuardConfig(on_violation="warn", max_findings=7)
    assert changed(resolved)["on_violation"] == "keyword arguments"


def test_the_environment() -> None:
    environ = {
        "ZEROGUARD_GUARDS": '[{"name": "param_status", "action": "warn"}]',
        "ZEROGUARD_ON_VIOLATION": "warn",
        "ZEROGUARD_ON_UNAVAILABLE": "warn",
        "ZEROGUARD_ON_GUARD_ERROR": "raise",
        "ZEROGUARD_AGREE": "false",
        "ZEROGUARD_AGREE_EVERY_N_STEPS": "3",
        "ZEROGUARD_HEARTBEAT": "false",
        "ZEROGUARD_MAX_FINDINGS": "7",
        "ZEROGUARD_SINKS": '[{"name": "jsonl", "directory": "runs"}]',
        "HOME": "/nowhere",
    }
    resolved = resolve(environ=environ)
    assert resolved.config == GuardConfig(
        guards=(ParamStatusConfig(action="warn"),),
        on_violation="warn",
        on_unavailable="warn",
        on_guard_error="raise",
        agree=False,
        agree_every_n_steps=3,
        heartbeat=False,
        max_findings=7,
        sinks=(JsonLinesSinkConfig(directory=Path("runs")),),
    )
    assert resolved.origins == {name: f"environment variable ZEROGUARD_{name.upper()}" for name in FIELDS}


def test_the_process_environment_is_read_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGUARD_AGREE", "0")
    assert resolve().config.agree is False
    assert resolve(environ={}).config.agree is True


def test_null_in_the_environment_is_the_automatic_choice() -> None:
    resolved = resolve(environ={"ZEROGUARD_GUARDS": "null"}, engine_config={"zeroguard": {"guards": []}})
    assert resolved.config.guards is None
    assert changed(resolved) == {"guards": "environment variable ZEROGUARD_GUARDS"}


TEXTS = {
    "zeroguard.yaml": "on_violation: warn\n",
    "zeroguard.yml": "on_violation: warn\n",
    "zeroguard.json": '{"on_violation": "warn"}',
    "zeroguard.toml": 'on_violation = "warn"\n',
}


def test_the_texts_here_are_of_all_files() -> None:
    assert tuple(TEXTS) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_the_working_directory(name: str) -> None:
    Path(name).write_text(TEXTS[name], encoding="utf-8")
    assert resolve().config == GuardConfig(on_violation="warn")
    assert changed(resolve()) == {"on_violation": f"file {name}"}


def test_a_file_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "zeroguard.yaml").write_text("agree: false\n", encoding="utf-8")
    assert changed(resolve()) == {}
    assert changed(resolve(directory=tmp_path / "job")) == {"agree": f"file {tmp_path / 'job' / 'zeroguard.yaml'}"}


def test_a_path_is_the_file_and_none_is_looked_for() -> None:
    Path("zeroguard.yaml").write_text("agree: false\n", encoding="utf-8")
    Path("other.json").write_text('{"max_findings": 7}', encoding="utf-8")
    environ = {"ZEROGUARD_CONFIG": "nothing.yaml"}
    for path in ("other.json", Path("other.json")):
        assert changed(resolve(path, environ=environ)) == {"max_findings": "file other.json"}


def test_a_variable_names_the_file() -> None:
    Path("zeroguard.yaml").write_text("agree: false\n", encoding="utf-8")
    Path("other.json").write_text('{"max_findings": 7}', encoding="utf-8")
    assert changed(resolve(environ={"ZEROGUARD_CONFIG": "other.json"})) == {"max_findings": "file other.json"}


PYPROJECT = '[project]\nname = "job"\n[tool.zeroguard]\nagree = false\n[[tool.zeroguard.guards]]\nname = "host_read"\n'


def test_pyproject() -> None:
    Path("pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    resolved = resolve()
    assert resolved.config == GuardConfig(agree=False, guards=(HostReadConfig(),))
    assert changed(resolved) == dict.fromkeys(("guards", "agree"), "[tool.zeroguard] in pyproject.toml")
    assert resolve("pyproject.toml") == resolved


@pytest.mark.parametrize("text", ['[project]\nname = "job"\n', "tool = 3\n", "[tool.ruff]\nx = 1\n", ""])
def test_a_pyproject_of_someone_else(text: str) -> None:
    Path("pyproject.toml").write_text(text, encoding="utf-8")
    assert changed(resolve()) == {}
    assert message_of("pyproject.toml") == "[tool.zeroguard] in pyproject.toml: there is no such table"


def test_a_file_of_its_own_beats_pyproject() -> None:
    """One file is the source; the two are not merged."""
    Path("pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    Path("zeroguard.toml").write_text("max_findings = 7\n", encoding="utf-8")
    assert changed(resolve()) == {"max_findings": "file zeroguard.toml"}


def test_the_deepspeed_configuration() -> None:
    config = {"train_batch_size": 8, "zeroguard": {"on_violation": "warn", "guards": [{"name": "host_read"}]}}
    resolved = resolve(engine_config=config)
    assert resolved.config == GuardConfig(on_violation="warn", guards=(HostReadConfig(),))
    assert changed(resolved) == {"guards": ENGINE, "on_violation": ENGINE}
    assert changed(resolve(engine_config={"train_batch_size": 8})) == {}


# -- their order -----------------------------------------------------------------------------------------------------


def test_the_order_of_all_sources() -> None:
    """Each source gives the same field another value; the strongest one left wins."""
    sources: list[tuple[str, dict[str, Any]]] = [
        ("keyword arguments", {"max_findings": 1}),
        ("keyword arguments", {"source": {"max_findings": 2}}),
        ("environment variable ZEROGUARD_MAX_FINDINGS", {"environ": {"ZEROGUARD_MAX_FINDINGS": "3"}}),
        ("file zeroguard.yaml", {}),
        (ENGINE, {"engine_config": {"zeroguard": {"max_findings": 5}}}),
        ("default", {}),
    ]
    Path("zeroguard.yaml").write_text("max_findings: 4\n", encoding="utf-8")
    for strongest, (origin, _) in enumerate(sources):
        if strongest == 4:
            Path("zeroguard.yaml").unlink()
        arguments = {name: value for _, source in sources[strongest:] for name, value in source.items()}
        resolved = resolve(**{"environ": {}, **arguments})
        assert resolved.origins["max_findings"] == origin
        assert resolved.config.max_findings == (1000 if origin == "default" else strongest + 1)


def test_fields_are_merged_one_by_one() -> None:
    Path("zeroguard.yaml").write_text("max_findings: 7\nguards: [{name: param_status, action: warn}]\n", "utf-8")
    resolved = resolve(
        {"agree": False},
        environ={"ZEROGUARD_GUARDS": '[{"name": "param_status"}]'},
        engine_config={"zeroguard": {"on_unavailable": "warn", "max_findings": 9}},
    )
    # A field comes whole from its source: nothing of the file's param_status is left.
    assert resolved.config == GuardConfig(
        guards=(ParamStatusConfig(),), agree=False, max_findings=7, on_unavailable="warn"
    )
    assert resolved.origins == {
        "guards": "environment variable ZEROGUARD_GUARDS",
        "on_violation": "default",
        "on_unavailable": ENGINE,
        "on_guard_error": "default",
        "agree": "keyword arguments",
        "agree_every_n_steps": "default",
        "heartbeat": "default",
        "max_findings": "file zeroguard.yaml",
        "sinks": "default",
    }


def test_load_config_knows_one_source_only(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("zeroguard.yaml").write_text("max_findings: 7\n", encoding="utf-8")
    monkeypatch.setenv("ZEROGUARD_AGREE", "false")
    assert load_config(None) == GuardConfig()
    assert load_config({"on_violation": "warn"}) == GuardConfig(on_violation="warn")


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_every_field_has_its_variable() -> None:
    assert set(variables()) == {f"ZEROGUARD_{name.upper()}" for name in FIELDS} | set(OTHER_VARIABLES)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ZEROGUARD_ON_VIOLATON", "ZEROGUARD_ON_VIOLATION"),
        ("ZEROGUARD_GUARD", "ZEROGUARD_GUARDS"),
        ("ZEROGUARD_CONFIG_FILE", "ZEROGUARD_CONFIG"),
        ("ZEROGUARD_REPORTS", "ZEROGUARD_REPORT"),
        ("ZEROGUARD_agree", "ZEROGUARD_AGREE"),
    ],
)
def test_an_unknown_variable_is_told_the_nearest(name: str, near: str) -> None:
    message = message_of(environ={name: "x"})
    assert message.startswith(f"unknown environment variable {name}; allowed: ")
    assert message.endswith(f"; did you mean {near}?")
    for legal in variables():
        assert legal in message


def test_an_unknown_variable_like_no_other_gives_no_hint() -> None:
    assert "did you mean" not in message_of(environ={"ZEROGUARD_QQQQQQ": "x"})


def test_variables_that_others_read() -> None:
    environ = {"ZEROGUARD": "1", "ZEROGUARD_REPORT": "runs", "MY_ZEROGUARD_X": "1", "zeroguard_x": "1"}
    assert changed(resolve(environ=environ)) == {}


@pytest.mark.parametrize("name", ["ZEROGUARD_AGREE", "ZEROGUARD_CONFIG"])
def test_an_empty_variable_is_a_mistake(name: str) -> None:
    assert message_of(environ={name: ""}) == f"environment variable {name} is empty; give it a value or unset it"


@pytest.mark.parametrize("name", ["ZEROGUARD_GUARDS", "ZEROGUARD_SINKS"])
def test_a_list_that_is_no_json(name: str) -> None:
    message = message_of(environ={name: "host_read"})
    assert message.startswith(f"environment variable {name}: 'host_read' is not valid JSON")
    # What it shows to imitate has to work.
    example = message.split(f"{name}='")[1].removesuffix("'")
    resolve(environ={name: example})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"on_violation": "explode"}, "keyword arguments: on_violation: 'explode' is not allowed"),
        ({"source": {"on_violation": "explode"}}, "keyword arguments: on_violation: 'explode' is not allowed"),
        (
            {"environ": {"ZEROGUARD_ON_VIOLATION": "explode"}},
            "environment variable ZEROGUARD_ON_VIOLATION: on_violation: 'explode' is not allowed",
        ),
        (
            {"environ": {"ZEROGUARD_GUARDS": '[{"name": "host_reed"}]'}},
            "environment variable ZEROGUARD_GUARDS: guards.0: {'name': 'host_reed'} is not allowed",
        ),
        (
            {"engine_config": {"zeroguard": {"on_violation": "explode"}}},
            f"{ENGINE}: on_violation: 'explode' is not allowed",
        ),
    ],
)
def test_a_mistake_names_its_source(arguments: dict[str, Any], expected: str) -> None:
    message = message_of(**arguments)
    assert message.startswith(expected)
    assert "allowed: '" in message


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("zeroguard.yaml", "on_violation: explode\n", "zeroguard.yaml"),
        ("pyproject.toml", '[tool.zeroguard]\non_violation = "explode"\n', "[tool.zeroguard] in pyproject.toml"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(name: str, text: str, where: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    assert message_of().startswith(f"{where}: on_violation: 'explode' is not allowed; allowed: ")


def test_an_unknown_keyword_is_told_the_nearest() -> None:
    message = message_of(on_violaton="warn")
    assert "keyword arguments: " in message
    assert "unknown key 'on_violaton' (value 'warn')" in message
    assert message.endswith("did you mean 'on_violation'?")


@pytest.mark.parametrize("name", ["environ", "directory", "engine_config", "on_violaton"])
def test_keywords_that_are_handed_on_are_fields(name: str) -> None:
    """zeroguard.guard(engine, directory="runs") is a mistake, not a place to look for files."""
    with pytest.raises(ConfigError, match=f"keyword arguments: unknown key '{name}'"):
        known({name: "runs"})
    assert known({"agree": False}) == {"agree": False}


def test_mistakes_of_all_sources_come_together_also_where_a_stronger_one_covers_them() -> None:
    Path("zeroguard.yaml").write_text("agree: maybe\n", encoding="utf-8")
    lines = message_of(
        {"agree": True}, environ={"ZEROGUARD_MAX_FINDINGS": "0"}, engine_config={"zeroguard": {"sinks": 3}}
    ).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "environment variable ZEROGUARD_MAX_FINDINGS",
        "zeroguard.yaml",
        ENGINE,
    ]


@pytest.mark.parametrize("source", [3, [1], HostReadConfig()], ids=["int", "list", "other-model"])
def test_a_source_of_the_wrong_kind(source: Any) -> None:
    assert "GuardConfig, a dict, a path or None" in message_of(source)


def test_two_files_name_each_other() -> None:
    for name in ("zeroguard.yaml", "zeroguard.toml"):
        Path(name).write_text("", encoding="utf-8")
    message = message_of()
    assert "zeroguard.yaml" in message
    assert "zeroguard.toml" in message
    assert changed(resolve("zeroguard.toml", environ={})) == {}


def test_a_file_that_a_variable_names_wrongly() -> None:
    message = message_of(environ={"ZEROGUARD_CONFIG": "nothing.yaml"})
    assert message.startswith("environment variable ZEROGUARD_CONFIG: nothing.yaml: no such file")


def test_pyproject_that_cannot_be_used() -> None:
    Path("pyproject.toml").write_text("[tool\n", encoding="utf-8")
    assert message_of().startswith("pyproject.toml: not valid TOML: ")
    Path("pyproject.toml").write_text("[tool]\nzeroguard = 3\n", encoding="utf-8")
    assert message_of() == "[tool.zeroguard] in pyproject.toml: is 3, not a table"


@pytest.mark.parametrize(
    ("values", "key"),
    [({"agree": "auto"}, "agree"), ({"guards": [{"name": "param_status", "action": "auto"}]}, "guards.0.action")],
)
def test_auto_in_the_deepspeed_configuration(values: dict[str, Any], key: str) -> None:
    """Accelerate would raise a message that names neither zeroguard nor the way out, or set a value of its own."""
    message = message_of(engine_config={"zeroguard": values})
    assert message.startswith(f"{ENGINE}: {key}: 'auto' is not allowed")
    assert "Accelerate" in message
    assert "Leave the key out" in message


@pytest.mark.parametrize("value", ["auto", None, [], True])
def test_a_deepspeed_key_that_holds_no_mapping(value: Any) -> None:
    assert message_of(engine_config={"zeroguard": value}).startswith(f"{ENGINE}: holds {type(value).__name__}")


# -- where the door reads the DeepSpeed configuration ----------------------------------------------------------------


def test_the_configuration_of_an_engine() -> None:
    given = {"zeroguard": {}}
    assert config_of(SimpleNamespace(config=given)) is given
    # A file was given, and the release keeps its path.
    assert config_of(SimpleNamespace(config="ds.json", _config=SimpleNamespace(_param_dict=given))) is given
    assert config_of(SimpleNamespace(config=None)) == {}


# -- zeroguard config show -------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", "show", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_show_prints_field_value_and_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROGUARD_MAX_FINDINGS", "7")
    Path("zeroguard.yaml").write_text("guards: [{name: host_read, wait: device}, {name: param_status}]\n", "utf-8")
    Path("ds.json").write_text('{"zeroguard": {"agree": false}}', encoding="utf-8")
    fields, guards = shown(capsys, "--deepspeed", "ds.json").split("\n\n")
    assert fields.splitlines() == [
        "key                  value                   from",
        "guards               host_read, wait=device  file zeroguard.yaml",
        "                     param_status",
        "on_violation         raise                   default",
        "on_unavailable       raise                   default",
        "on_guard_error       disable                 default",
        f"agree                false                   {ENGINE}",
        "agree_every_n_steps  1                       default",
        "heartbeat            true                    default",
        "max_findings         7                       environment variable ZEROGUARD_MAX_FINDINGS",
        "sinks                logging                 default",
    ]
    assert [line.split(maxsplit=1) for line in guards.splitlines()] == [
        ["guard", "brought by"],
        *([name, f"zeroguard {__version__}, built in"] for name in GUARDS),
    ]


def test_show_with_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("zeroguard.yaml").write_text("max_findings: 7\n", encoding="utf-8")
    Path("other.toml").write_text("agree = false\n", encoding="utf-8")
    out = shown(capsys, "--config", "other.toml")
    assert "file other.toml" in out
    assert "zeroguard.yaml" not in out


def test_show_says_that_the_choice_is_automatic(capsys: pytest.CaptureFixture[str]) -> None:
    assert "those that the engine needs" in shown(capsys)
    Path("zeroguard.yaml").write_text("guards: []\n", encoding="utf-8")
    assert "guards               none " in shown(capsys)


def test_show_yaml_can_be_saved_and_read_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for guards in ("null", "[]", '[{"name": "param_status", "check_at": ["close"]}, {"name": "host_read"}]'):
        monkeypatch.setenv("ZEROGUARD_GUARDS", guards)
        monkeypatch.setenv("ZEROGUARD_SINKS", '[{"name": "jsonl", "directory": "runs"}]')
        before = resolve().config
        text = shown(capsys, "--format", "yaml")
        assert "# environment variable ZEROGUARD_GUARDS\nguards:" in text
        assert list(yaml.safe_load(text)) == list(FIELDS)
        Path("zeroguard.yaml").write_text(text, encoding="utf-8")
        monkeypatch.delenv("ZEROGUARD_GUARDS")
        monkeypatch.delenv("ZEROGUARD_SINKS")
        assert resolve().config == before
        assert set(resolve().origins.values()) == {"file zeroguard.yaml"}
        Path("zeroguard.yaml").unlink()


def test_show_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGUARD_AGREE", "false")
    data = json.loads(shown(capsys, "--format", "json"))
    assert load_config(data["config"]) == GuardConfig(agree=False)
    assert data["origins"] == {**NOTHING, "agree": "environment variable ZEROGUARD_AGREE"}
    assert [guard["name"] for guard in data["guards"]] == list(GUARDS)


@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_show_of_a_wrong_configuration(
    form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROGUARD_AGREED", "false")
    assert main(["config", "show", "--format", form]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == message_of(environ={"ZEROGUARD_AGREED": "false"}) + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "no such file; give a DeepSpeed configuration"), ('{"a"', "not valid JSON: "), ("[1]", "holds list")],
)
def test_show_with_a_deepspeed_file_that_cannot_be_used(
    text: str | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path("ds.json").write_text(text, encoding="utf-8")
    assert main(["config", "show", "--deepspeed", "ds.json"]) == 1
    assert capsys.readouterr().err.startswith(f"ds.json: {expected}")


def test_show_reads_comments_as_deepspeed_does(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hjson")
    Path("ds.json").write_text('{\n  # ours\n  "zeroguard": {"agree": false}\n}', encoding="utf-8")
    assert ENGINE in shown(capsys, "--deepspeed", "ds.json")


def test_show_yaml_without_pyyaml(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["config", "show", "--format", "yaml"]) == 1
    assert "zeroguard[yaml]" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_rich_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    resolved = resolve(environ={"ZEROGUARD_SINKS": '[{"name": "jsonl", "directory": "[bold]x"}]'})
    terminal, plain = Terminal(), io.StringIO()
    write_table(resolved, plain)
    write_table(resolved, terminal)
    assert "│" in terminal.getvalue()
    assert "│" not in plain.getvalue()
    for text in ("directory=[bold]x", "environment variable ZEROGUARD_SINKS", "host_read"):
        assert text in terminal.getvalue()
        assert text in plain.getvalue()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    without = Terminal()
    write_table(resolved, without)
    assert without.getvalue() == plain.getvalue()

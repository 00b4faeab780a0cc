"""``zeroguard run``: scripts that know nothing of zeroguard train right, and else behave as under ``python``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integration.scripts import two_losses
from zeroguard import cli
from zeroguard.backends.deepspeed.initialize import watch
from zeroguard.errors import EngineNotFoundError, GuardUnavailableError
from zeroguard.integrations import launcher
from zeroguard.integrations.script import Script

# The real runs take half a minute on two idle cores; more room for a busy machine.
pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
LAUNCHER = ("-m", "zeroguard", "run")
NOTHING = "zeroguard run: no DeepSpeed engine was made; nothing was guarded\n"
ROUNDING = 1e-6
#: PyTorch's sys.excepthook puts it in front of every line, from the first process group on.
RANK0 = "[rank0]: "


def environment(**more: str) -> dict[str, str]:
    """As a user's shell has it: no rank, no setting of zeroguard."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("ZEROGUARD_") and "RANK" not in k}
    mine.pop("DS_ACCELERATOR", None)
    return mine | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"} | more


def python(*words: object, cwd: Path = HERE, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=240, check=False
    )


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "own", "script"),
    [
        ("run t.py", "run", Script("t.py")),
        ("run t.py --config x --report y --help", "run", Script("t.py", ("--config", "x", "--report", "y", "--help"))),
        ("run --config c --report=r t.py -m x", "run --config c --report=r", Script("t.py", ("-m", "x"))),
        ("run --report r -m a run --config", "run --report r", Script("a", ("run", "--config"), True)),
        ("run -- t.py --", "run", Script("t.py", ("--",))),
        ("run -", "run", Script("-")),
        ("run --confg c t.py", "run --confg", Script("c", ("t.py",))),
        ("run --help", "run --help", None),
        ("run -m", "run", None),
        ("run --config", "run --config", None),
        ("--local_rank=1 run t.py a", "run", Script("t.py", ("--local_rank=1", "a"))),
        ("--local-rank 1 run -m t a", "run", Script("t", ("--local-rank", "1", "a"), True)),
        ("--local_rank=1 schema", "--local_rank=1 schema", None),
        ("--local_rank", "--local_rank", None),
        ("schema --out run", "schema --out run", None),
        ("", "", None),
    ],
)  # fmt: skip
def test_the_command_line_is_cut_where_the_script_begins(line: str, own: str, script: Script | None) -> None:
    assert launcher.split(line.split()) == (own.split(), script)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "there is no script to run"),
        (["run", "-m"], "there is no script to run"),
        (["run", "missing.py"], "cannot open 'missing.py': No such file"),
        (["run", "-"], "standard input cannot be run; give a Python script"),
        (["run", str(SCRIPTS)], "is a directory or a zip file; give the __main__.py in it"),
        (["run", "--config", "missing.yaml", str(SCRIPTS / "ordinary.py")], "missing.yaml: no such file"),
        (["run", "--report", __file__, str(SCRIPTS / "ordinary.py")], "give a folder that can be written"),
    ],
)
def test_what_cannot_be_started_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("zeroguard run: ")
    assert message in told.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--confg", "x", "t.py"], "unrecognized arguments: --confg"),
        (["run", "--conf", "x", "t.py"], "unrecognized arguments: --conf"),
        (["run", "--on-violation", "stop", "t.py"], "invalid choice: 'stop'"),
        (["run", "--config"], "expected one argument"),
    ],
)
def test_wrong_options_are_argparses_business(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_is_about_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "--help", "t.py"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(f"usage: {launcher.USAGE}")


@pytest.mark.parametrize("name", ["missing", "scripts.missing", "scripts", "tomllib", ".x"])
def test_a_module_that_cannot_be_run_is_refused(name: str) -> None:
    done = python(*LAUNCHER, "-m", name)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"zeroguard run: no module {name!r} that can be run; give -m a module, or a package that has a __main__"
    ]


# -- as under python -------------------------------------------------------------------------------------------------


ENDS = ("0", "1", "77", "none", "text", "raise_", "chain", "hook", "interrupt", "spawn", "thread", "fork", "os._exit")


@pytest.mark.parametrize("words", ["facts --config x --help", *ENDS])
def test_a_script_ends_and_sees_itself_as_under_python(words: str) -> None:
    script = ["scripts/ordinary.py", *words.split()]
    expected, seen = python(*script), python(*LAUNCHER, *script)
    assert seen.returncode == expected.returncode
    assert seen.stdout == expected.stdout
    tail = "" if words == "os._exit" else NOTHING
    assert seen.stderr == expected.stderr + tail


def test_those_comparisons_are_not_of_nothing() -> None:
    for words, code, text in (
        ("text", 1, "a text instead"),
        ("raise_", 1, "raise KeyError"),
        ("interrupt", -2, "in main"),
    ):
        done = python("scripts/ordinary.py", words)
        assert done.returncode == code
        assert text in done.stderr
    assert "Point(x=3)" in python("scripts/ordinary.py", "facts").stdout


@pytest.mark.parametrize("flag", ["-P", "-O"])
def test_flags_of_python_hold(flag: str) -> None:
    script = ["scripts/ordinary.py", "facts"]
    assert python(flag, *LAUNCHER, *script).stdout == python(flag, *script).stdout


def test_a_linked_script(tmp_path: Path) -> None:
    (tmp_path / "link.py").symlink_to(SCRIPTS / "ordinary.py")
    script = [tmp_path / "link.py", "facts"]
    assert python(*LAUNCHER, *script).stdout == python(*script).stdout


def test_a_syntax_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = (\n", encoding="utf-8")
    expected, seen = python(tmp_path / "broken.py"), python(*LAUNCHER, tmp_path / "broken.py")
    assert (seen.returncode, seen.stderr) == (1, expected.stderr + NOTHING)


@pytest.mark.parametrize("words", ["facts a -m b", "3", "spawn"])
def test_a_module_ends_and_sees_itself_as_under_python(words: str) -> None:
    script = ["-m", "scripts.ordinary", *words.split()]
    expected, seen = python(*script), python(*LAUNCHER, *script)
    assert (seen.returncode, seen.stdout) == (expected.returncode, expected.stdout)


def test_a_package_and_an_error_in_it(tmp_path: Path) -> None:
    for name, text in (
        ("good", ""),
        ("bad", "import missing_of_its_own\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text, encoding="utf-8")
        (tmp_path / name / "__main__.py").write_text("import sys; print(sys.argv, __spec__.name)", encoding="utf-8")
    expected, seen = python("-m", "good", "x", cwd=tmp_path), python(*LAUNCHER, "-m", "good", "x", cwd=tmp_path)
    assert (seen.returncode, seen.stdout) == (0, expected.stdout)
    seen = python(*LAUNCHER, "-m", "bad", cwd=tmp_path)
    assert seen.returncode == 1
    lines = seen.stderr.splitlines()
    assert lines[:2] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/bad/__init__.py", line 1, in <module>',
    ]
    assert "ModuleNotFoundError: No module named 'missing_of_its_own'" in lines


# -- what is no engine -----------------------------------------------------------------------------------------------


def test_what_cannot_be_guarded_is_told_and_the_script_goes_on() -> None:
    """The hook in front of the import, too: here it meets a module with this name that is not DeepSpeed."""
    script = ["scripts/other/train.py", "x"]
    expected, seen = python(*script), python(*LAUNCHER, *script)
    assert expected.returncode == seen.returncode == 0
    assert seen.stdout == expected.stdout
    missing = "EngineNotFoundError: no DeepSpeed engine in this list."
    assert f"zeroguard run: engine 2 is not guarded: {missing}" in seen.stderr
    assert "zeroguard run: 0 of 2 DeepSpeed engines guarded" in seen.stderr
    assert f"engine 1: not guarded: {missing}" in seen.stderr


def test_deepspeed_may_be_there_already() -> None:
    code = "import deepspeed; from zeroguard.cli import main; main(['run', 'train.py'])"
    seen = python("-c", code, cwd=SCRIPTS / "other")
    assert seen.returncode == 0
    assert "engine 1: not guarded" in seen.stderr


def test_what_initialize_makes_is_seen_and_handed_on_as_it_is() -> None:
    class Pair(tuple):
        """So that a copy would show."""

    def initialize(what: Any, *, more: int = 0) -> Any:
        """The docstring."""
        return what

    module = ModuleType("deepspeed")
    module.initialize = initialize
    seen: list[Any] = []
    undo = watch(module, lambda *made: seen.append(made))
    wrapper = module.initialize
    assert (wrapper.__doc__, wrapper.__wrapped__) == ("The docstring.", initialize)
    pair = Pair(("an engine", "an optimizer"))
    assert wrapper(pair, more=1) is pair
    assert wrapper("no tuple") == "no tuple"
    assert seen == [("an engine", 0, 1), ("no tuple", 0, 1)]
    undo()
    assert module.initialize is initialize
    undo = watch(module, lambda *_: None)
    other = module.initialize = lambda: None
    undo()
    assert module.initialize is other


@dataclass
class _Fake:
    """Stands for a session."""

    outcomes: list[Any]

    def guard(self, engine: Any, config: Any, **options: Any) -> Any:
        outcome = self.outcomes.pop(0)(options)
        raise outcome


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., launcher.Launch]:
    for name in launcher._RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def make(*outcomes: Callable[[dict[str, Any]], Exception], **variables: str) -> launcher.Launch:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(launcher, "guard", _Fake(list(outcomes)).guard)
        return launcher.Launch(None, None, {"on_violation": "warn"})

    return make


def test_a_release_that_lacks_something_loses_that_guard_only(launch: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[dict[str, Any]] = []

    def lacking(options: dict[str, Any]) -> Exception:
        asked.append(options)
        return GuardUnavailableError("lacks something", guard="host_read", missing=["engine.x"])

    made = launch(lacking, lambda options: asked.append(options) or EngineNotFoundError("the end of this test"))
    made._guard(object(), 0, 1)
    assert [options.get("on_unavailable") for options in asked] == [None, "warn"]
    assert {options["on_violation"] for options in asked} == {"warn"}
    assert made.engines[0].text() == "engine 1: not guarded: EngineNotFoundError: the end of this test"


def test_an_error_of_zeroguard_itself_is_no_error_of_the_script(launch: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = launch(lambda _: AttributeError("'NoneType' has no attribute 'x'"))
    made._guard(object(), 0, 1)
    assert "engine 1 is not guarded: AttributeError" in caplog.text
    assert "Traceback" in caplog.text


def test_a_rank_among_others_that_are_not_guarded_is_not_guarded(launch: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Lightning starts ranks 1 to N-1 by itself, without the launcher. A guarded rank 0 would wait for them."""
    made = launch()
    made._guard(object(), 0, 2)
    assert "the others were not started through zeroguard" in made.engines[0].text()
    asked = []
    launch(lambda _: asked.append(1) or EngineNotFoundError("asked"), LOCAL_RANK="0")._guard(object(), 0, 2)
    assert asked == [1]


# -- real engines ----------------------------------------------------------------------------------------------------


def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@dataclass
class Runs:
    """All that takes seconds, two at a time: name -> what came of it."""

    done: dict[str, subprocess.CompletedProcess[str]]
    folder: Path

    def answer(self, name: str, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.{rank}").read_text(encoding="utf-8"))

    def error(self, name: str, rank: int = 0, ranks: int = 2) -> float:
        """The largest difference to plain PyTorch."""
        values = self.answer(name, rank)["values"]
        return max(abs(a - b) for a, b in zip(values, two_losses.plain(ranks), strict=True))

    def records(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        text = (self.folder / f"{name}.report" / f"rank-{rank}.jsonl").read_text(encoding="utf-8")
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("launcher")
    script = str(SCRIPTS / "two_losses.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    detect = folder / "detect.json"
    guards = [{"name": "retained_graph", "action": "detect"}, {"name": "accumulator_reset", "action": "detect"}]
    detect.write_text(json.dumps({"guards": guards, "on_violation": "record"}), encoding="utf-8")
    (folder / "found").mkdir()
    (folder / "found" / "zeroguard.json").write_bytes(detect.read_bytes())

    def start(name: str) -> tuple[list[str], dict[str, str]]:
        report = ["--report", f"{name}.report"]  # relative to the folder in which they run
        out = ["--out", f"{folder}/{name}"]
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}
        detecting = [*LAUNCHER, "--config", "detect.json", *report]
        match name:
            case "bare":
                return [*torchrun, script, *out], {}
            case "guarded":
                return [*torchrun, *LAUNCHER, *report, script, *out, "--config", "x", "--on-violation", "y"], {}
            case "deepspeed":
                words = ["-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={port()}", "--module"]
                by_variable = {"DS_ACCELERATOR": "cpu", "ZEROGUARD_REPORT": f"{name}.report"}
                return [*words, "zeroguard", "run", script, *out, "--end", "destroy"], by_variable
            case "violation":
                return [*detecting, "--on-violation", "raise", script, *out], alone
            case "four":
                return [*LAUNCHER, str(SCRIPTS / "four_engines.py")], alone
            case "kill":  # the configuration is found in the folder in which it starts, whatever the script does then
                found = [*LAUNCHER, "--report", f"../{name}.report"]
                return [*found, script, *out, "--end", name, "--cd", ".."], alone
            case _:
                return [*detecting, script, *out, "--end", name], alone

    def run(name: str) -> tuple[str, subprocess.CompletedProcess[str]]:
        words, variables = start(name)
        return name, python(*words, cwd=folder / "found" if name == "kill" else folder, **variables)

    names = ("bare", "guarded", "deepspeed", "violation", "os._exit", "kill", "four")
    with ThreadPoolExecutor(2) as pool:
        return Runs(dict(pool.map(run, names)), folder)


def test_training_is_wrong_alone_and_exact_with_the_launcher(runs: Runs) -> None:
    for name in ("bare", "guarded"):
        assert runs.done[name].returncode == 0, runs.done[name].stderr
    assert all(runs.error("bare", rank) > 1e-3 for rank in (0, 1))
    assert all(runs.error("guarded", rank) < ROUNDING for rank in (0, 1))


def test_the_script_notices_nothing(runs: Runs) -> None:
    bare, guarded = runs.answer("bare"), runs.answer("guarded")
    assert guarded["early"] == []  # neither torch nor deepspeed before the script's own first line
    script = [str(SCRIPTS / "two_losses.py"), "--out", str(runs.folder / "guarded")]
    assert guarded["argv"] == [*script, "--config", "x", "--on-violation", "y"]
    for key in ("made", "tuple", "signature"):
        assert guarded[key] == bare[key]
    assert guarded["tuple"]


def test_both_ranks_report_and_one_sums_up(runs: Runs) -> None:
    for rank in (0, 1):
        records = runs.records("guarded", rank)
        assert {record["rank"] for record in records} == {rank}
        assert {record["record"] for record in records} == {"repair"}
        assert [r["step"] for r in records if r["guard"] == "retained_graph"] == [0, 1, 2]
    told = runs.done["guarded"].stderr
    assert told.count("zeroguard run: 1 of 1 DeepSpeed engine guarded") == 1
    assert told.count("engine 1: rank 0: ZeRO-2, float32, 2 ranks") == 1
    assert "findings on rank 0: none" in told
    assert f"report: {runs.folder}/guarded.report/rank-N.jsonl" in told


def test_the_session_is_closed_at_the_engines_place_among_the_atexit_functions(runs: Runs) -> None:
    lines = runs.done["violation"].stderr.splitlines()
    starts = ("at exit", "zeroguard run", f"{RANK0}zeroguard.errors.GuardViolation: ")
    order = [next(start for start in starts if line.startswith(start)) for line in lines if line.startswith(starts)]
    assert order == [starts[2], starts[0], starts[0], starts[1]]
    assert [line for line in lines if line.startswith("at exit")] == [
        "at exit, last in: wrapped",
        "at exit, first in: bare",
    ]


def test_a_violation_reaches_the_script(runs: Runs) -> None:
    done = runs.done["violation"]
    assert done.returncode == 1
    assert not (runs.folder / "violation.0").exists()
    lines = done.stderr.splitlines()
    first = lines.index(f"{RANK0}Traceback (most recent call last):")
    assert f'File "{SCRIPTS}/two_losses.py"' in lines[first + 1]
    assert "engine.step()" in done.stderr
    found = [record for record in runs.records("violation") if record["record"] == "finding"]
    assert {record["severity"] for record in found} == {"error"}
    assert f"findings on rank 0: {found[0]['guard']} " in done.stderr


@pytest.mark.parametrize(("end", "code"), [("os._exit", 3), ("kill", -9)])
def test_findings_survive_a_sudden_end(runs: Runs, end: str, code: int) -> None:
    assert runs.done[end].returncode == code, runs.done[end].stderr
    assert runs.answer(end)["values"]  # on_violation: record of the file, so that it went on to the end
    found = [record for record in runs.records(end) if record["record"] == "finding"]
    assert {record["severity"] for record in found} == {"error"}
    assert "zeroguard run: 1 of 1" not in runs.done[end].stderr


def test_deepspeeds_own_launcher(runs: Runs) -> None:
    """The real one, with two processes. ``--local_rank`` is the script's first argument, as without zeroguard."""
    done = runs.done["deepspeed"]
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        answer = runs.answer("deepspeed", rank)
        assert answer["local_rank"] == rank
        assert answer["argv"][1] == f"--local_rank={rank}"
        assert runs.error("deepspeed", rank) < ROUNDING
        assert runs.records("deepspeed", rank)
    assert (done.stdout + done.stderr).count("zeroguard run: 1 of 1 DeepSpeed engine guarded") == 1


def test_several_engines(runs: Runs) -> None:
    done = runs.done["four"]
    assert done.returncode == 0, done.stderr
    assert "own: record passed False" in done.stdout  # the script's own session, given back when it ended
    assert "dropped: None" in done.stdout  # the launcher does not keep an engine from being freed
    assert "wrong: False" in done.stdout
    told = done.stderr
    assert "zeroguard run: 3 of 4 DeepSpeed engines guarded" in told
    assert "engine 1: ZeRO-2, float32, 1 rank: taken over by the script's own zeroguard.guard" in told
    assert "engine 2: rank 0: ZeRO-3, float32, 1 rank" in told
    assert "engine 3: rank 0: ZeRO-1, float32, 1 rank" in told
    assert "engine 4: not guarded: ConfigError: " in told
    assert "did you mean 'on_violation'?" in told
    assert "closing its session failed" not in told

"""Guards of other distributions: chosen, validated, described like the built-in ones; a broken one hurts itself only.

The first half writes distributions onto the path of this process, the second half installs two real ones with pip.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.site import install as install_sources
from zeroguard import ConfigError, GuardConfig, GuardUnavailableError, config, load_config, plugins
from zeroguard.guards.base import Guard
from zeroguard.guards.host_read import HostReadConfig
from zeroguard.testing import Script, assert_finding, replay

TESTS = Path(__file__).parents[1]
BUILT_IN = tuple(config.GUARDS)

#: A guard's module, with places to break it.
MODULE = '''
from typing import Literal
from zeroguard.guards.base import Choice, Guard, GuardModel
from zeroguard import events as ev

class Options(GuardModel):
    """Options."""
    name: Literal["{name}"] = "{name}"
    """Name."""
    limit: int = 2
    """Limit."""

class Made(Guard):
    """A guard."""
    name = "{name}"
    Config = Options

    @classmethod
    def choose(cls, facts, config):
        return Choice("selected", f"limit {{config.limit}}")

    def handlers(self):
        return {{ev.StepBegin: self._step}}

    def _step(self, event):
        self.checks += 1
        if event.backwards > self.config.limit:
            yield self.finding("over", "error", expected="fewer", seen="more", cause="loop", remedy="less")
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution on the path: its metadata, and one module."""
    made: list[str] = []

    def forget() -> None:
        for cached in (plugins.plugins, config._healthy, config._guard_models):
            cached.cache_clear()
        for module in made:
            sys.modules.pop(module, None)

    def make(distribution: str, source: str = "", *, name: str = "", module: str = "", points: str = "") -> None:
        module = module or f"made_{distribution.replace('-', '_')}"
        folder = tmp_path / distribution
        info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", "utf-8")
        points = points or f"{name} = {module}:Made\n"
        (info / "entry_points.txt").write_text(f"[zeroguard.guards]\n{points}", encoding="utf-8")
        (folder / f"{module}.py").write_text(source or MODULE.format(name=name), encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder))
        made.append(module)
        forget()

    forget()
    yield make
    monkeypatch.undo()
    forget()


def message_of(*guards: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError) as caught:
            load_config({"guards": list(guards)})
    return str(caught.value)


# -- a healthy one ---------------------------------------------------------------------------------------------------


def test_it_is_in_the_registry_after_the_built_in_ones(install: Install) -> None:
    install("b-dist", name="zz_second")
    install("a-dist", name="aa_first")
    assert tuple(config.registry()) == (*BUILT_IN, "aa_first", "zz_second")
    assert tuple(config.GUARDS) == BUILT_IN
    assert [(p.name, p.distribution, p.problem) for p in config.found_plugins()] == [
        ("aa_first", "a-dist 1.0", ""),
        ("zz_second", "b-dist 1.0", ""),
    ]


@pytest.mark.parametrize("suffix", ["json", "yaml", "toml"])
def test_it_is_validated_and_round_trips(install: Install, tmp_path: Path, suffix: str) -> None:
    install("a-dist", name="extra")
    texts = {
        "json": '{"guards": [{"name": "extra", "limit": 5}, {"name": "host_read"}]}',
        "yaml": "guards:\n  - {name: extra, limit: 5}\n  - {name: host_read}\n",
        "toml": '[[guards]]\nname = "extra"\nlimit = 5\n[[guards]]\nname = "host_read"\n',
    }
    path = tmp_path / f"g.{suffix}"
    path.write_text(texts[suffix], encoding="utf-8")
    made = load_config(path)
    assert made.guards is not None
    assert made.guards[0].limit == 5
    assert made.guards[1] == HostReadConfig()
    assert made.model_dump()["guards"][0] == {"name": "extra", "limit": 5}
    assert GuardConfig.model_validate(made.model_dump()) == made
    assert GuardConfig.model_validate_json(made.model_dump_json()) == made
    assert GuardConfig(guards=made.guards) == made


def test_its_mistakes_are_told_like_those_of_a_built_in_one(install: Install) -> None:
    install("a-dist", name="extra")
    message = message_of({"name": "extra", "limt": 3})
    assert message.startswith("guards.0.extra: unknown key 'limt' (value 3)")
    assert message.endswith("did you mean 'limit'?")
    assert "'gradient_audit', 'extra'" in message_of({"name": "nothing"})
    assert "'gradient_audit', 'extra'" in message_of("extra")
    assert "'extra' stands there twice" in message_of({"name": "extra"}, {"name": "extra", "limit": 1})


def test_it_is_in_the_schema(install: Install) -> None:
    install("a-dist", name="extra")
    schema = GuardConfig.model_json_schema()
    items = schema["properties"]["guards"]["anyOf"][0]["items"]
    assert items["discriminator"]["mapping"]["extra"] == "#/$defs/Options"
    assert {"$ref": "#/$defs/Options"} in items["oneOf"]
    assert schema["$defs"]["Options"]["properties"]["limit"]["default"] == 2


def test_two_models_of_one_name_are_both_in_the_schema(install: Install) -> None:
    install("a-dist", name="extra")
    install("b-dist", name="other")
    mapping = GuardConfig.model_json_schema()["properties"]["guards"]["anyOf"][0]["items"]["discriminator"]["mapping"]
    assert len(set(mapping.values())) == len(BUILT_IN) + 2 + 1, "and the entry that is no guard"


def test_it_is_chosen_by_itself_and_by_name(install: Install) -> None:
    install("a-dist", name="extra")
    loop = Script().forward().backward().backward().backward().step()
    automatic = replay(loop)
    assert automatic.selection["extra"] == "limit 2"
    assert "extra" in automatic.selection.selected
    assert_finding(automatic, guard="extra", kind="over")
    named = replay(loop, guards=[{"name": "extra", "limit": 3}])
    assert named.selection.selected == ["extra"]
    assert named.findings == []
    assert {row.guard for row in named.rows} >= {"extra"}
    assert replay(loop, guards=["host_read"]).selection["extra"] == "not in the configured list"


# -- broken ones -----------------------------------------------------------------------------------------------------

HEALTHY = MODULE.format(name="extra")
PROBLEMS: dict[str, tuple[str, str]] = {
    "missing-dependency": ("import expensive_library_that_is_not_there", "ModuleNotFoundError: No module named"),
    "exits": ("import sys\nsys.exit('no licence')", "SystemExit: no licence"),
    "rude": (
        "class E(Exception):\n    def __str__(self):\n        raise KeyError\nraise E",
        "E, whose message cannot be had: KeyError",
    ),
    "endless": ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    "syntax": ("def (", "SyntaxError"),
    "no-such-class": ("x = 1", "AttributeError"),
    "no-guard": ("class Made: pass", "which is not a subclass of zeroguard.guards.base.Guard"),
    "no-class": ("Made = 3", "it leads to 3"),
    "other-name": (
        HEALTHY.replace('    name = "extra"', '    name = "xtra"'),
        "Made.name is 'xtra'; it must be 'extra'",
    ),
    "no-name": (HEALTHY.replace('    name = "extra"\n', ""), "Made.name is None; it must be 'extra'"),
    "no-config": (HEALTHY.replace("    Config = Options\n", ""), "Made.Config is None, not a subclass"),
    "config-of-pydantic": (
        HEALTHY.replace("class Options(GuardModel)", "from pydantic import BaseModel\nclass Options(BaseModel)"),
        "not a subclass of zeroguard.guards.base.GuardModel",
    ),
    "free-name": (HEALTHY.replace('Literal["extra"]', "str"), 'Options needs the field: name: Literal["extra"]'),
    "name-of-another": (HEALTHY.replace('Literal["extra"] = "extra"', 'Literal["x"] = "x"'), "Options needs the field"),
    "needs-an-option": (HEALTHY.replace("limit: int = 2", "limit: int"), "ValidationError"),
    "no-choose": (HEALTHY.replace("def choose", "def chose"), "Made does not define choose"),
    "no-handlers": (HEALTHY.replace("def handlers", "def handler"), "Made does not define handlers"),
    "no-schema": (
        HEALTHY.replace(
            "class Options(GuardModel):",
            "class Odd: pass\nclass Options(GuardModel, arbitrary_types_allowed=True):\n    odd: Odd | None = None",
        ),
        "PydanticInvalidForJsonSchema",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_broken_one_names_its_distribution_and_leaves_the_others_alone(install: Install, case: str) -> None:
    source, problem = PROBLEMS[case]
    install("bad-dist", source, name="extra")
    install("good-dist", name="healthy")
    with pytest.warns(UserWarning, match="guard 'extra' comes from bad-dist") as caught:
        assert tuple(config.registry()) == (*BUILT_IN, "healthy")
    text = str(caught[0].message)
    assert len(caught) == 1
    assert "bad-dist 1.0 (entry point extra = made_bad_dist:Made)" in text
    assert problem in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert load_config({"guards": [{"name": "healthy"}, {"name": "host_read"}]}).guards
        assert (
            "extra"
            not in GuardConfig.model_json_schema()["properties"]["guards"]["anyOf"][0]["items"]["discriminator"][
                "mapping"
            ]
        )
        assert "healthy" in replay(Script().forward().backward().step()).selection.selected
    message = message_of({"name": "host_read"}, {"name": "extra"})
    assert message.startswith(
        "guards.1: guard 'extra' comes from bad-dist 1.0 (entry point extra = made_bad_dist:Made)"
    )
    assert problem in message


def test_a_name_that_zeroguard_has(install: Install) -> None:
    install("bad-dist", name="host_read")
    with pytest.warns(UserWarning, match="bad-dist 1.0 .* zeroguard itself has a guard of that name"):
        assert config.registry() == config.GUARDS
    assert load_config({"guards": [{"name": "host_read", "wait": "device"}]}).guards == (HostReadConfig(wait="device"),)


def test_a_name_that_two_distributions_bring(install: Install) -> None:
    """Which of them would run? Neither does."""
    install("a-dist", name="extra")
    install("b-dist", name="extra")
    install("c-dist", name="healthy")
    with pytest.warns(UserWarning, match="guard 'extra' comes from") as caught:
        assert tuple(config.registry()) == (*BUILT_IN, "healthy")
    assert len(caught) == 2
    message = message_of({"name": "extra"})
    assert "a-dist 1.0 and b-dist 1.0 bring a guard of that name" in message


def test_nothing_is_imported_before_a_guard_is_looked_for(install: Install) -> None:
    install("bad-dist", "raise RuntimeError('imported')", name="extra")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GuardConfig() == load_config({"on_violation": "raise"})
        assert "made_bad_dist" not in sys.modules
        with pytest.raises(UserWarning, match="RuntimeError: imported"):
            GuardConfig(guards=[{"name": "host_read"}])


@pytest.mark.parametrize(
    ("find", "put", "expected"),
    [
        ('return Choice("selected", f"limit {config.limit}")', "return facts.gone", "AttributeError"),
        ('return Choice("selected", f"limit {config.limit}")', "return True", "TypeError: it returned True"),
        ("return {ev.StepBegin: self._step}", "return self.gone", "AttributeError"),
        ("    def handlers", "    def __init__(self, config):\n        pass\n    def handlers", "TypeError"),
    ],
    ids=["choose", "no-choice", "handlers", "init"],
)
def test_one_that_fails_on_an_engine_is_left_out(install: Install, find: str, put: str, expected: str) -> None:
    assert find in HEALTHY
    install("bad-dist", HEALTHY.replace(find, put), name="extra")
    loop = Script().forward().backward().backward().step()
    with pytest.warns(UserWarning, match="guard 'extra' is left out: .* bad-dist 1.0, raised"):
        session = replay(loop)
    assert "bad-dist 1.0" in session.selection["extra"]
    assert expected in session.selection["extra"]
    assert "extra" not in session.selection.selected
    assert "accumulator_reset" in session.selection.selected
    with pytest.warns(UserWarning, match="left out"), pytest.raises(GuardUnavailableError, match=r"bad-dist 1\.0"):
        replay(loop, guards=["extra"])


def test_a_built_in_guard_that_fails_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cls: type[Guard], facts: Any, options: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(config.GUARDS["host_read"], "choose", classmethod(broken))
    with pytest.raises(ZeroDivisionError):
        replay(Script())


# -- two that are really installed -----------------------------------------------------------------------------------

#: Runs where both are installed; prints one JSON object.
PROGRAM = """
import json, sys, warnings
caught = warnings.catch_warnings(record=True)
log = caught.__enter__()
warnings.simplefilter("always")
from zeroguard import ConfigError, GuardConfig, GuardUnavailableError
from zeroguard.settings import resolve
from zeroguard.testing import Script, ScriptedEngine, facts, replay

out = {"imported_early": "backward_budget" in sys.modules}

def error(call):
    try:
        call()
    except (ConfigError, GuardUnavailableError) as error:
        return f"{type(error).__name__}: {error}"

loop = Script().forward().backward().backward().step()
automatic = replay(loop)
out["automatic"] = dict(automatic.selection)
out["selected"] = automatic.selection.selected
configured = resolve(environ={"ZEROGUARD_GUARDS": '[{"name": "backward_budget", "limit": 1}]'})
out["origin"] = configured.origins["guards"]
session = replay(loop, config=configured.config)
out["findings"] = [finding.text() for finding in session.findings]
out["schema"] = GuardConfig.model_json_schema()
out["unknown"] = error(lambda: resolve(guards=[{"name": "backward_budgt"}]))
out["bad_option"] = error(lambda: resolve(guards=[{"name": "backward_budget", "limit": 0}]))
out["broken"] = error(lambda: resolve(guards=[{"name": "needs_more"}]))
out["broken_later"] = error(lambda: replay(loop, guards=["param_order"]))
stage_0 = ScriptedEngine(facts(stage=0, offload_optimizer="none"))
out["not_applicable"] = error(lambda: replay(Script(), guards=["backward_budget"], engine=stage_0))
exec(sys.argv[1])
out["warnings"] = [str(item.message) for item in log]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions in it."""
    return install_sources(tmp_path_factory.mktemp("site"), "plugin_distribution", "broken_distribution")


def with_site(site: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(TESTS.parent)])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=site,
        env={**os.environ, "PYTHONPATH": path, **environ},
        timeout=120,
        check=False,
    )


def documented() -> tuple[str, str]:
    """The page, and its program that uses the plugin."""
    page = (TESTS.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (program,) = (text for text in programs if text.startswith("from zeroguard.testing import"))
    return page, program


@pytest.fixture(scope="module")
def answer(site: Path) -> dict[str, Any]:
    run = with_site(site, "-c", PROGRAM, documented()[1])
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_an_installed_one_is_selected_and_finds(answer: dict[str, Any]) -> None:
    assert not answer["imported_early"]
    assert answer["automatic"]["backward_budget"] == "at most 8 backwards a step"
    assert "backward_budget" in answer["selected"]
    assert answer["origin"] == "environment variable ZEROGUARD_GUARDS"
    assert len(answer["findings"]) == 1
    assert "2 backwards" in answer["findings"][0]
    assert answer["not_applicable"].startswith("GuardUnavailableError: guard 'backward_budget' was asked for by name")


def test_an_installed_one_is_in_the_schema(answer: dict[str, Any]) -> None:
    items = answer["schema"]["properties"]["guards"]["anyOf"][0]["items"]
    assert items["discriminator"]["mapping"]["backward_budget"] == "#/$defs/BackwardBudgetConfig"
    limit = answer["schema"]["$defs"]["BackwardBudgetConfig"]["properties"]["limit"]
    assert limit["description"] == "Backwards that one optimizer step may consume."


def test_an_installed_one_is_in_the_errors(answer: dict[str, Any]) -> None:
    assert "'backward_budget'" in answer["unknown"].split("allowed: ")[1]
    assert "'host_read'" in answer["unknown"].split("allowed: ")[1]
    assert answer["bad_option"].startswith("ConfigError: keyword arguments: guards.0.backward_budget.limit: 0: ")


def test_the_documented_error_is_real(answer: dict[str, Any]) -> None:
    error = answer["broken"].removeprefix("ConfigError: keyword arguments: ")
    assert f"```text\n{error}\n```" in documented()[0]


def test_installed_broken_ones(answer: dict[str, Any]) -> None:
    where = "broken-guards 0.3 (entry point needs_more = broken_at_import:Guard)"
    assert answer["broken"].startswith(
        f"ConfigError: keyword arguments: guards.0: guard 'needs_more' comes from {where}"
    )
    assert "expensive_library" in answer["broken"]
    assert "param_order" not in answer["selected"]
    assert {"accumulator_reset", "backward_budget"} <= set(answer["selected"])
    assert answer["broken_later"].startswith("GuardUnavailableError: guard 'param_order' was asked for by name")
    assert "broken-guards 0.3" in answer["broken_later"]
    # Once each, although guards were looked for many times.
    assert sum("guard 'needs_more' comes from broken-guards 0.3" in text for text in answer["warnings"]) == 1
    assert sum("guard 'host_read' comes from broken-guards 0.3" in text for text in answer["warnings"]) == 1


def test_the_command_lists_who_brings_what(site: Path) -> None:
    run = with_site(site, "-m", "zeroguard", "config", "show", ZEROGUARD_GUARDS='[{"name": "backward_budget"}]')
    assert run.returncode == 0, run.stderr
    rows = [line.split(maxsplit=1) for line in run.stdout.split("\n\n")[1].splitlines()]
    assert ["backward_budget", "backward-budget 1.2"] in rows
    assert [row[0] for row in rows] == ["guard", *BUILT_IN, "backward_budget", "host_read", "needs_more", "param_order"]
    assert "broken-guards 0.3          ImportError: No module named 'expensive_library'" in run.stdout
    broken = with_site(site, "-m", "zeroguard", "config", "show", ZEROGUARD_GUARDS='[{"name": "needs_more"}]')
    assert broken.returncode == 1
    assert (
        "environment variable ZEROGUARD_GUARDS: guards.0: guard 'needs_more' comes from broken-guards" in broken.stderr
    )

"""Run a Python script, or a module, inside this process as ``python`` itself would have run it."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from zeroguard.errors import ConfigError

__all__ = ["Script", "hide_launcher"]

_GIVE = "give a Python script, or -m and a module"


@dataclass(frozen=True, slots=True)
class Script:
    """What to run: ``name`` is the path of a script or, with ``module``, the dotted name that ``python -m`` takes."""

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False

    def check(self) -> None:
        """Look at the script without running anything of it. A module is not looked at: to find it, its package is run.

        Raises:
            ConfigError: there is no such script, or it is something that cannot be run.
        """
        if self.module:
            return
        if self.name == "-":
            raise ConfigError(f"a script from standard input cannot be run; {_GIVE}")
        if os.path.isdir(self.name) or zipfile.is_zipfile(self.name):
            raise ConfigError(
                f"{self.name!r} is a directory or a zip file; give the __main__.py in it, or -m and a module"
            )
        try:
            Path(self.name).open("rb").close()
        except OSError as error:
            raise ConfigError(f"cannot open {self.name!r}: {error.strerror or error}; {_GIVE}") from error

    def run(self) -> str | None:
        """Run it as ``__main__``. What it raises comes out, ``SystemExit`` too.

        ``sys.argv``, ``sys.path[0]`` and ``sys.modules["__main__"]`` stay as the script had them: its threads, its
        atexit functions and what pickles its classes need them until the process ends.

        Returns:
            None when it ran; else why it could not be started: there is no such module.
        """
        return _execute(self)


def _execute(script: Script) -> str | None:
    # hide_launcher knows this function: the frames after it are the script's.
    main = ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    main.__annotations__ = {}
    sys.argv = ["-m" if script.module else script.name, *script.arguments]
    if not sys.flags.safe_path:  # with "python -P" nothing stands there
        sys.path[0] = os.getcwd() if script.module else os.path.dirname(os.path.realpath(script.name))
    code = _load_module(script.name, main) if script.module else _load_script(script.name, main)
    if code is None:
        return f"no module {script.name!r} that can be run; give -m a module, or a package that has a __main__"
    sys.modules["__main__"] = main
    exec(code, vars(main))
    return None


def _load_script(name: str, main: ModuleType) -> CodeType:
    path = os.path.abspath(name)
    # No __spec__: multiprocessing takes the file then, as for "python script.py".
    vars(main).update(__file__=path, __cached__=None, __package__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        source = file.read()
    return compile(source, path, "exec", dont_inherit=True)  # bytes: the script's own encoding line counts


def _load_module(name: str, main: ModuleType) -> CodeType | None:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _find(name)
    if spec is None or not hasattr(spec.loader, "get_code"):
        return None
    vars(main).update(
        __file__=spec.origin, __cached__=spec.cached, __package__=spec.parent, __loader__=spec.loader, __spec__=spec
    )
    sys.argv[0] = spec.origin or name
    return spec.loader.get_code(name)  # type: ignore[no-any-return, union-attr]


def _find(name: str) -> ModuleSpec | None:
    if not name.strip(".") or name.startswith("."):
        return None  # relative to nothing
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # The package of the module, or something that the package imports: that one is the script's own error.
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def hide_launcher() -> None:
    """From now on ``sys.excepthook``, the script's own or Python's, gets the script's part of a traceback only.

    For an exception that is on its way out of :meth:`Script.run` and ends the process.
    """
    sys.excepthook = partial(_show, sys.excepthook)


def _show(
    hook: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    shown = _script_part(traceback)
    hook(kind, error.with_traceback(shown), shown)  # Python's own hook prints what the exception holds


def _script_part(traceback: TracebackType | None) -> TracebackType | None:
    """What comes after ``_execute``; None for a syntax error in the script, which python shows without a traceback."""
    left = traceback
    while left is not None and left.tb_frame.f_code is not _execute.__code__:
        left = left.tb_next
    if left is None:
        return traceback  # of another thread, or from nowhere near
    left = left.tb_next
    while left is not None and _looks_for_the_module(left.tb_frame.f_code):
        left = left.tb_next
    return left


def _looks_for_the_module(code: CodeType) -> bool:
    return code.co_filename == __file__ or code.co_filename.startswith("<frozen importlib")

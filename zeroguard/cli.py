"""The command line: ``zeroguard`` or ``python -m zeroguard``.

Commands::

    zeroguard run SCRIPT [ARG ...]    run a training script with its DeepSpeed engines guarded
    zeroguard stress SCENARIO         a fault, or a command of yours, many times without and with guards, and a report
    zeroguard schema [--out FILE]     the JSON schema of the configuration
    zeroguard config show             the configuration, and where each of its values came from

Errors in the arguments are argparse's: text on stderr, exit status 2. A command that fails returns 1. ``run`` ends as
its script ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroguard import ConfigError, GuardConfig, __version__, show
from zeroguard.integrations import launcher
from zeroguard.settings import resolve
from zeroguard.stress import command as stress

__all__ = ["main", "schema_text"]


def schema_text() -> str:
    """The JSON schema of :class:`zeroguard.GuardConfig` as text.

    Keys are sorted and the text ends with a newline, so that the file in docs/ changes only when the model does.
    """
    return json.dumps(GuardConfig.model_json_schema(), indent=2, sort_keys=True) + "\n"


def _schema(arguments: argparse.Namespace) -> int:
    if arguments.out is None:
        sys.stdout.write(schema_text())
        return 0
    try:
        arguments.out.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        print(f"zeroguard schema: cannot write {arguments.out}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _show(arguments: argparse.Namespace) -> int:
    try:
        engine_config = None if arguments.deepspeed is None else show.read_engine_config(arguments.deepspeed)
        resolved = resolve(arguments.config, engine_config=engine_config)
        if arguments.format == "table":
            show.write_table(resolved, sys.stdout)
        else:
            sys.stdout.write(show.as_yaml(resolved) if arguments.format == "yaml" else show.as_json(resolved))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    # A fixed name: under "python -m zeroguard" argparse would call the program "__main__.py".
    parser = argparse.ArgumentParser(prog="zeroguard", description="Guards for DeepSpeed ZeRO training loops.")
    parser.add_argument("--version", action="version", version=f"zeroguard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # No abbreviations: whatever is not spelled out belongs to nobody, and is refused.
    run = commands.add_parser("run", help="run a training script with its engines guarded", allow_abbrev=False)
    launcher.add_options(run)
    stress.add_options(
        commands.add_parser("stress", help="run a fault, or a command of yours, many times", allow_abbrev=False)
    )
    schema = commands.add_parser("schema", help="print the JSON schema of the configuration")
    schema.add_argument("--out", type=Path, metavar="FILE", help="write it to FILE instead of standard output")
    schema.set_defaults(run=_schema)
    config = commands.add_parser("config", help="print the configuration").add_subparsers(metavar="show", required=True)
    shown = config.add_parser("show", help="each field, its value and where it came from; the guards that there are")
    shown.add_argument("--config", type=Path, metavar="FILE", help="the file, instead of the one that is found")
    shown.add_argument(
        "--deepspeed", type=Path, metavar="FILE", help="a DeepSpeed configuration, for its key zeroguard"
    )
    shown.add_argument(
        "--format",
        choices=("table", "json", "yaml"),
        default="table",
        help="yaml can be saved as zeroguard.yaml (default: %(default)s)",
    )
    shown.set_defaults(run=_show)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments without the program's name; ``sys.argv[1:]`` if None.

    Raises:
        SystemExit: by argparse, for ``--help``, ``--version`` and wrong arguments; and whatever the script of ``run``
            raises.
    """
    typed = list(sys.argv[1:] if argv is None else argv)
    own, command = stress.split(typed)
    own, script = launcher.split(own)
    arguments = _parser().parse_args(own, argparse.Namespace(script=script, user_command=command, typed=typed))
    return int(arguments.run(arguments))

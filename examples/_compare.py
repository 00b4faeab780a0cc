"""What plain_loop.py needs besides its loop: the model, two worker processes, the plain PyTorch reference, the table.

The parent process starts two workers, one a rank, and sends them one case after another; they are used again, because
starting them takes much longer than a case. A case that crashes is an answer like any other. A case that hangs costs
its workers, which are killed and started afresh.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gc
import importlib.util
import itertools
import json
import logging
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

# The checkout comes first, so that the examples run without an installation and show the code beside them.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANKS = 2
STEPS = 3
LR = 0.1
VOCABULARY, LENGTH, WIDTH, HEADS = 32, 12, 16, 2
BATCH = 4  # sequences a rank
START_SECONDS = 180.0  # importing torch and DeepSpeed on a busy machine
CASE_SECONDS = 60.0  # a case takes about one
CELL = 26  # characters of a verdict in the table, which is to fit into 100 columns


# -- the model and its two losses --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer layer without dropout.

    Its attention is its own: nn.MultiheadAttention reads the weights of a submodule that it never calls, and ZeRO-3
    gathers weights when a module is called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class TwoHeads(nn.Module):
    """A small transformer with a language-model head and a value head: each loss reaches its own head only."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.language, self.value = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.language(x), self.value(x.mean(1)).squeeze(-1)


def language_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Predict the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def value_loss(guesses: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Predict one number a sequence."""
    return F.mse_loss(guesses, values)


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One rank's data: the same in every case. Values around 2, so that updates are much larger than rounding."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [
        (torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator), 2 + torch.randn(BATCH, generator=generator))
        for _ in range(STEPS)
    ]


def fresh_model() -> TwoHeads:
    """The same weights in every case and on every rank."""
    torch.manual_seed(0)
    return TwoHeads()


# -- one case, in a worker ---------------------------------------------------------------------------------------------


class Plain:
    """What the loop needs of an engine, in plain PyTorch: SGD on the gradients averaged over all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def __call__(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        for param in self.model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()


def engine_config(stage: int, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # else ZeRO-3 keeps parameters as small as these whole
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # the default differs between releases
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # plain SGD, so that rounding is PyTorch's own
        "steps_per_print": 10**9,
    }


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters, whole. COLLECTIVE with ZeRO-3."""
    import deepspeed

    params = list(model.parameters())
    parts = [p for p in params if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(parts) if parts else contextlib.nullcontext():
        return [p.detach().clone() for p in params]


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]).max().item()


class Worker:
    """One rank: runs cases, and the reference of each pattern once."""

    def __init__(self, rank: int, train: Callable, train_guarded: Callable, patterns: dict[str, Callable]) -> None:
        self.batches = batches(rank)
        self.train, self.train_guarded, self.patterns = train, train_guarded, patterns
        self.references: dict[str, tuple[list[torch.Tensor], float]] = {}

    def reference(self, pattern: str) -> tuple[list[torch.Tensor], float]:
        """The parameters after plain PyTorch's training, and the largest distance that one of them went."""
        if pattern not in self.references:
            model = fresh_model()
            start = copy.deepcopy(values_of(model))
            self.train(Plain(model), self.batches, self.patterns[pattern])
            end = values_of(model)
            self.references[pattern] = end, furthest(end, start)
        return self.references[pattern]

    def run(self, stage: int, offload: bool, pattern: str, guarded: bool) -> dict[str, Any]:
        import deepspeed

        expected, update = self.reference(pattern)
        answer: dict[str, Any] = {"status": "exact", "max_abs_diff": None, "error": None, "findings": 0, "repairs": 0}
        engine: Any = None
        try:
            model = fresh_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engine_config(stage, offload))
            session = (self.train_guarded if guarded else self.train)(engine, self.batches, self.patterns[pattern])
            if guarded:
                answer.update(findings=len(session.findings), repairs=len(session.repairs))
            answer["max_abs_diff"] = furthest(values_of(model), expected)
            # A millionth of the update, or the rounding of a weight. Written so that NaN is wrong.
            if not answer["max_abs_diff"] <= max(1e-6 * update, 3e-8):
                answer["status"] = "wrong"
        except Exception as error:
            traceback.print_exc()
            answer.update(status="crash", error=f"{type(error).__name__}: {error}")
        finally:
            # A crashed engine may fail to take itself down; the next case has one of its own.
            with contextlib.suppress(Exception):
                engine.destroy()
            engine = None
            gc.collect()
        return answer


def work(rank: int, pipe: Any, store: str, log: str, train: Callable, guarded: Callable, patterns: dict) -> None:
    """A worker process: cases come in through the pipe, answers go out; all that is printed goes to the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # What torchrun would set; DeepSpeed asks for it. The address is not used: the group meets in a file.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.set_num_threads(1)
    # A rank that hangs says where, just before the parent's patience ends.
    faulthandler.dump_traceback_later(0.9 * START_SECONDS)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed compiles this operator when it first meets a process group on a CPU: 45 seconds for something that only
    # inference uses. ("import deepspeed.comm.torch as x" would give PyTorch: deepspeed.comm has a name like that, too.)
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    deepspeed.init_distributed("gloo")
    gc.freeze()  # what is loaded by now stays; each case's collection has less to look at
    worker = Worker(rank, train, guarded, patterns)
    pipe.send("ready")
    while True:
        faulthandler.cancel_dump_traceback_later()
        case = pipe.recv()
        faulthandler.dump_traceback_later(0.9 * CASE_SECONDS)
        pipe.send(worker.run(*case))


# -- the two workers, seen from the parent -----------------------------------------------------------------------------


class NotStartedError(Exception):
    """The workers could not be started."""


class Workers:
    """Two ranks, started when first needed and again after a hang."""

    def __init__(self, *loops: Any) -> None:
        self.loops = loops
        self.context = multiprocessing.get_context("spawn")
        self.folder = Path(tempfile.mkdtemp(prefix="zeroguard-demo-"))
        self.log = self.folder / "workers.log"
        self.ranks: list[tuple[Any, Any]] = []
        self.starts = 0
        self.unexpected = False

    def start(self) -> None:
        self.starts += 1
        store = self.folder / f"store-{self.starts}"
        for rank in range(RANKS):
            ours, theirs = self.context.Pipe()
            arguments = (rank, theirs, str(store), str(self.log), *self.loops)
            process = self.context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the end of the worker is the end of the pipe
            self.ranks.append((process, ours))
        answers = self._collect(START_SECONDS)
        if answers != ["ready"] * RANKS:
            self.unexpected = True
            raise NotStartedError(f"the {RANKS} workers did not start within {START_SECONDS:.0f} s, or ended")

    def _collect(self, seconds: float) -> list[Any]:
        """Each rank's answer, or ``hung`` or ``ended`` for a rank that has none."""
        deadline = time.monotonic() + seconds
        answers: list[Any] = []
        for _, pipe in self.ranks:
            try:
                answers.append(pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else "hung")
            except (EOFError, OSError):
                answers.append("ended")
        return answers

    def run(self, *case: Any) -> dict[str, Any]:
        """Both ranks' answers made one: the worst status, the largest difference, all findings and repairs."""
        if not self.ranks:
            self.start()
        for _, pipe in self.ranks:
            with contextlib.suppress(OSError):  # a worker that has ended; its missing answer says so
                pipe.send(case)
        answers = self._collect(CASE_SECONDS)
        heard = [answer for answer in answers if isinstance(answer, dict)]
        if len(heard) < RANKS:
            self.unexpected = True
            self.stop()
        return merge(heard, [answer for answer in answers if isinstance(answer, str)])

    def stop(self) -> None:
        for process, pipe in self.ranks:
            process.kill()
            process.join()
            pipe.close()
        self.ranks = []

    def close(self) -> None:
        """The log is kept, and mentioned, only when something unexpected happened."""
        self.stop()
        if self.unexpected and self.log.exists():
            print(f"Not expected; what the workers printed is in {self.log}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def merge(heard: list[dict[str, Any]], silent: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"status": "exact", "max_abs_diff": None, "error": None}
    out.update(findings=sum(a["findings"] for a in heard), repairs=sum(a["repairs"] for a in heard))
    crashes = [answer["error"] for answer in heard if answer["status"] == "crash"]
    if crashes:
        out.update(status="crash", error=crashes[0] + (" (on one rank; the other hung)" if silent else ""))
    elif "ended" in silent:
        out.update(status="crash", error="a worker process ended")
    elif silent:
        out.update(status="hung", error=f"no answer within {CASE_SECONDS:.0f} s")
    else:
        out["max_abs_diff"] = max(answer["max_abs_diff"] for answer in heard)
        if any(answer["status"] == "wrong" for answer in heard):
            out["status"] = "wrong"
    return out


# -- what is printed ---------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One configuration and pattern, run without and with zeroguard."""

    stage: int
    offload: bool
    pattern: str
    without: dict[str, Any]
    guarded: dict[str, Any]

    @property
    def name(self) -> str:
        return name_of(self.stage, self.offload)

    def to_json(self) -> str:
        def side(answer: dict[str, Any]) -> dict[str, Any]:
            diff = answer["max_abs_diff"]
            finite = diff is not None and math.isfinite(diff)  # JSON has no NaN
            return {"status": answer["status"], "max_abs_diff": diff if finite else None, "error": answer["error"]}

        return json.dumps(
            {
                "stage": self.stage,
                "offload": self.offload,
                "pattern": self.pattern,
                "without": side(self.without),
                "with": side(self.guarded),
                "findings": self.guarded["findings"],
                "repairs": self.guarded["repairs"],
            }
        )


def name_of(stage: int, offload: bool) -> str:
    return f"ZeRO-{stage} offload" if offload else f"ZeRO-{stage}"


def verdict(answer: dict[str, Any]) -> str:
    if answer["status"] == "wrong":
        return f"wrong by {answer['max_abs_diff']:.1e}"
    if answer["status"] == "crash":
        return f"crashed: {answer['error'].splitlines()[0]}"
    return answer["status"]


class Progress:
    """On standard error: a bar on a terminal, one plain line a run elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("rich"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("starting two ranks", total=total)
            self.bar.start()
        else:
            print(f"starting {RANKS} ranks", file=sys.stderr, flush=True)

    def begin(self, text: str) -> None:
        if self.bar:
            self.bar.update(self.task, description=text)

    def end(self, text: str, answer: dict[str, Any]) -> None:
        self.done += 1
        if self.bar:
            self.bar.advance(self.task)
        else:
            print(f"[{self.done:2}/{self.total}] {text}: {verdict(answer)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def print_table(rows: list[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # Elsewhere than on a terminal: plain text of a fixed width, whatever FORCE_COLOR or COLUMNS say.
    console = Console() if sys.stdout.isatty() else Console(force_terminal=False, no_color=True, width=100)
    table = Table(
        title=f"Two losses from one forward: {STEPS} steps on {RANKS} CPU ranks, DeepSpeed {version('deepspeed')}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="\n".join(escape(text) for text in long_crashes(rows)),
        caption_justify="left",
    )
    for header in ("configuration", "pattern", "without zeroguard", "with zeroguard"):
        table.add_column(header, min_width=max(map(len, header.split())), overflow="fold")
    for header in ("findings", "repairs"):
        table.add_column(header, justify="right")
    colours = {"exact": "green", "wrong": "red", "crash": "magenta", "hung": "magenta"}
    for row, following in itertools.zip_longest(rows, rows[1:]):
        cells = [f"[{colours[answer['status']]}]{escape(short(answer))}[/]" for answer in (row.without, row.guarded)]
        counts = str(row.guarded["findings"]), str(row.guarded["repairs"])
        last = following is None or following.name != row.name
        table.add_row(row.name, row.pattern, *cells, *counts, end_section=last)
    console.print(table)


def short(answer: dict[str, Any]) -> str:
    """A verdict that fits the table: without the message of a crash where that is long."""
    text = verdict(answer)
    return text if len(text) <= CELL else ":".join(text.split(":")[:2])


def long_crashes(rows: list[Row]) -> Iterator[str]:
    """The messages that the table leaves out, each once; in ASCII, which is all that some outputs can show."""
    answers = [answer for row in rows for answer in (row.without, row.guarded) if short(answer) != verdict(answer)]
    for text in dict.fromkeys(answer["error"].splitlines()[0] for answer in answers):
        yield text.encode("ascii", "replace").decode()


def summary(rows: list[Row]) -> str:
    without = sum(row.without["status"] == "exact" for row in rows)
    guarded = sum(row.guarded["status"] == "exact" for row in rows)
    total = len(rows)
    return f"Exactly what plain PyTorch computes: {without} of {total} without zeroguard, {guarded} of {total} with it."


# -- the program -------------------------------------------------------------------------------------------------------


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of the table")
    parser.add_argument(
        "--stages", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], help="the ZeRO stages to run"
    )
    parser.add_argument(
        "--offload",
        action=argparse.BooleanOptionalAction,
        help="run only with, or only without, optimizer offload to the CPU",
    )
    return parser.parse_args()


def missing(table: bool) -> str:
    """What to install, or nothing."""
    needed = {"deepspeed": "DeepSpeed", "rich": "rich"} if table else {"deepspeed": "DeepSpeed"}
    gone = [name for name in needed if importlib.util.find_spec(name) is None]
    if not gone:
        return ""
    return f'This demo needs {" and ".join(needed[name] for name in gone)}: pip install "zeroguard[{",".join(gone)}]"'


def compare(workers: Workers, cases: list[tuple[int, bool, str]]) -> Iterator[Row]:
    progress = Progress(2 * len(cases))
    try:
        for case in cases:
            answers = []
            for guarded in (False, True):
                text = f"{name_of(*case[:2])}, {case[2]}, {'with' if guarded else 'without'} zeroguard"
                progress.begin(text)
                answers.append(workers.run(*case, guarded))
                progress.end(text, answers[-1])
            yield Row(*case, *answers)
    finally:
        progress.close()


def main(description: str | None, train: Callable, train_guarded: Callable, patterns: dict[str, Callable]) -> int:
    """Run every case and print; 1 if a guarded run was not exact, 2 if nothing could be run."""
    options = parse(description)
    if text := missing(not options.json):
        print(text, file=sys.stderr)
        return 2
    # Read when torch and DeepSpeed are loaded, so set before the workers start.
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    sides = (False, True) if options.offload is None else (options.offload,)
    cases = [(stage, offload, name) for stage in sorted(set(options.stages)) for offload in sides for name in patterns]
    workers = Workers(train, train_guarded, patterns)
    rows: list[Row] = []
    try:
        for row in compare(workers, cases):
            rows.append(row)
            workers.unexpected |= row.guarded["status"] != "exact"
            if options.json:
                print(row.to_json(), flush=True)
    except NotStartedError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        workers.close()
    if not options.json:
        print_table(rows)
        print(summary(rows))
    return 1 if any(row.guarded["status"] != "exact" for row in rows) else 0

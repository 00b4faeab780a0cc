"""Guard gradient_audit: when it samples, what it makes of a comparison, and the arithmetic of the samples."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from zeroguard import events as ev
from zeroguard.backends.base import GradientAudit, Mismatch, UpdateAudit
from zeroguard.backends.deepspeed.audit import GradientSamples
from zeroguard.backends.deepspeed.samples import Places
from zeroguard.backends.deepspeed.sections import Members, Section, SharedMemory
from zeroguard.session import Session
from zeroguard.testing import Script, ScriptedEngine, assert_finding, assert_silent, facts, replay


def run(script: Any, engine: ScriptedEngine | None = None, **options: Any) -> tuple[Session, ScriptedEngine]:
    engine = engine or ScriptedEngine(facts(accumulation_steps=4, world_size=2))
    return replay(script, guards=[{"name": "gradient_audit", **options}], engine=engine), engine


def steps(number: int) -> Script:
    script = Script()
    for _ in range(number):
        script.forward().backward().step()
    return script


def test_it_samples_the_first_steps_and_one_out_of_so_many() -> None:
    _, engine = run(steps(12), warmup_steps=2, every_n_steps=5)
    compared = [args[1] for name, args in engine.requests if name == "audit_gradients"]
    assert compared == [0, 1, 5, 10]
    armed = [args[1] for name, args in engine.requests if name == "sample_gradients"]
    assert armed == compared
    assert engine.asked.count("end_samples") == len(compared), "no hook outlives its step"


def test_every_backward_of_an_audited_window_is_a_row() -> None:
    script = Script().forward().backward(boundary=False).forward().backward().step().close()
    _, engine = run(script)
    assert engine.asked.count("sample_gradients") == 2


def test_zero_grad_exceptions_and_declared_edits() -> None:
    script = Script().forward().backward().zero_grad().forward().backward().abort()
    _, engine = run([*script.events, ev.GradientEdit(), ev.Close(True)])
    assert [name for name in engine.asked if name != "sample_gradients"] == [
        "forget_samples",
        "spoil_samples",
        "spoil_samples",
        "end_samples",
    ]


def test_all_elements_are_zero_for_the_engine() -> None:
    _, engine = run(steps(1), elements_per_parameter="all")
    assert ("audit_gradients", (0, 0)) in engine.requests


def test_an_exact_step_passes_and_a_skipped_comparison_is_no_check() -> None:
    engine = ScriptedEngine(facts())
    engine.audit = GradientAudit(audited=3)
    session, _ = run(steps(1), engine)
    assert_silent(session)
    assert [row.verdict for row in session.rows if row.guard == "gradient_audit"] == ["passed"]
    engine.audit = GradientAudit(skipped="overflow")
    session, _ = run(steps(1), engine)
    assert [row.verdict for row in session.rows if row.guard == "gradient_audit"] == ["never exercised"]


KINDS = ["lost", "stale", "overwritten", "duplicated", "not_reduced", "missing_on_rank", "not_finite", "differs"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("action", "severity"), [("raise", "error"), ("warn", "warning"), ("record", "info")])
def test_each_kind_has_words(kind: str, action: str, severity: str) -> None:
    engine = ScriptedEngine(facts())
    mismatches = (Mismatch("a.weight", kind, 0.5), Mismatch("b.weight", kind, 1.0))
    engine.audit = GradientAudit(audited=4, mismatches=mismatches, tolerance=1e-6)
    session, _ = run(steps(3), engine, action=action, **({"on_violation": "record"} if False else {}))
    [finding] = assert_finding(session, guard="gradient_audit", kind=f"gradient_{kind}", severity=severity)
    assert finding.subject == ("a.weight", "b.weight")
    assert "2 of 4" in finding.seen
    assert "relative error 1," in finding.seen
    assert len(session.findings) == 1, "the same at every step is said once"


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1 / 16, "0.0625 (1/N^2, N = 4 micro-batches)"),
        (0.25, "0.25 (1/N, N = 4 micro-batches)"),
        (4.0, "4 (N, N = 4 micro-batches)"),
        (0.5, "0.5 (1/N, N = 2 ranks)"),
        (0.3, "0.3 "),
    ],
)
def test_a_constant_is_named(factor: float, words: str) -> None:
    engine = ScriptedEngine(facts(accumulation_steps=4, world_size=2))
    engine.audit = GradientAudit(audited=1, mismatches=(Mismatch("a", "scaled", 0.5, factor),))
    session, _ = run(steps(1), engine)
    [finding] = assert_finding(session, guard="gradient_audit", kind="gradient_scaled")
    assert words.strip() in finding.seen


def test_what_a_step_did_to_the_weights() -> None:
    engine = ScriptedEngine(facts())
    engine.update = UpdateAudit(unmoved=("a",), not_cast=("b", "c"))
    session, _ = run(steps(2), engine)
    assert_finding(session, guard="gradient_audit", kind="parameter_unmoved", subject=("a",))
    assert_finding(session, guard="gradient_audit", kind="copy_differs", subject=("b", "c"))
    engine = ScriptedEngine(facts())
    engine.update = UpdateAudit(unmoved=("a",))
    session, _ = run(Script().forward().backward().step(applied=False), engine)
    assert_silent(session)


# -- the samples -----------------------------------------------------------------------------------------------------


def samples(params: dict[str, torch.nn.Parameter], *dtypes: torch.dtype) -> GradientSamples:
    return GradientSamples(
        lambda: [(p, name) for name, p in params.items()], torch.device("cpu"), 1, [], dtypes or (torch.float32,)
    )


def piece(param: Any, start: int, values: torch.Tensor) -> Section:
    """A part of a parameter, in memory of its own."""
    return values, Members([(id(param), start, values.numel(), 0)])


def gradients(params: dict[str, torch.nn.Parameter]) -> list[Section]:
    return [piece(p, 0, p.grad.flatten()) for p in params.values() if p.grad is not None]


@pytest.fixture
def params() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {"w": torch.nn.Parameter(torch.randn(40, 50)), "b": torch.nn.Parameter(torch.randn(7))}


def loss_of(params: dict[str, torch.nn.Parameter], seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return (params["w"] * torch.randn(40, 50)).sum() + (params["b"] * torch.randn(7)).sum()


@pytest.mark.parametrize("elements", [0, 1, 5, 64])
def test_exact_gradients_pass(params: dict[str, torch.nn.Parameter], elements: int) -> None:
    for seed in range(6):
        audit = samples(params)
        audit.arm(elements, seed)
        for number in range(3):
            audit.began()
            loss_of(params, number).backward()
        result = audit.compare(gradients(params))
        assert (result.audited, result.mismatches, result.skipped) == (2, (), "")
        audit.disarm()
        for p in params.values():
            p.grad = None


def test_places_stay_inside_and_change_with_the_seed(params: dict[str, torch.nn.Parameter]) -> None:
    audit = samples(params)
    seen = set()
    for seed in range(50):
        audit.arm(64, seed)
        for place in audit.places.all:
            end = place.offset + (place.count - 1) * place.stride
            assert 0 <= place.offset <= end < place.param.numel()
            seen.add((place.name, place.offset, place.stride))
    assert len(seen) > 25


@pytest.mark.parametrize("elements", [0, 1, 7, 64])
def test_one_gather_reads_what_slices_would(elements: int) -> None:
    """Pieces of many parameters in a few flat tensors, cut anywhere, with gaps, some alone in theirs."""
    choose = random.Random(elements)
    sizes = [choose.choice([1, 2, 63, 64, 65, 500, 4097]) for _ in range(40)]
    params = [(torch.nn.Parameter(torch.randn(size)), f"p{n}") for n, size in enumerate(sizes)]
    places = Places(params, elements, choose.randrange(99), torch.device("cpu"))
    wanted, there = places.zeros(), places.zeros(torch.bool)
    sections: list[Section] = []
    left = list(places.all)
    while left:
        taken, left = left[: (width := choose.choice([1, 1, 5, 9]))], left[width:]
        parts, members, base = [], [], 0
        for place in taken:
            numel = place.param.numel()
            begin, end = sorted((choose.randrange(numel + 1), choose.randrange(numel + 1)))
            parts += [torch.full((3,), float("nan")), place.param.detach()[begin:end]]
            members.append((id(place.param), begin, end - begin, base + 3))
            base += 3 + end - begin
            at = place.offset + place.stride * torch.arange(place.count)
            inside = (at >= begin) & (at < end)
            row = slice(place.start, place.start + place.count)
            wanted[row] = torch.where(inside, place.param.detach()[at], 0.0)
            there[row] = inside
        sections.append((torch.cat(parts), Members(members)))
    for _ in range(2):  # the second time by what the first one worked out
        found = places.gather(sections)
        assert torch.equal(found.values, wanted)
        assert torch.equal(found.mask, there)
        assert int(found.owned[2].sum()) == int(there.sum())
    assert torch.equal(places.by_parameter(there.unsqueeze(0))[0].sum(), there.sum().float())
    spread = places.spread([float(n) for n in range(40)])
    assert all(bool((spread[p.start : p.start + p.count] == n).all()) for n, p in enumerate(places.all))


def test_a_model_without_parameters_has_no_samples() -> None:
    alone = torch.arange(3.0)
    found = Places((), 64, 1, torch.device("cpu")).gather([(alone, Members([(1, 0, 3, 0)])), (alone, Members([]))])
    assert (found.values.numel(), found.owned.shape) == (0, (3, 0))


def test_pieces_that_share_memory_are_one_section() -> None:
    memory = SharedMemory()
    before = None
    for _ in range(2):  # the second time in new memory, in the same order
        whole, alone = torch.arange(20.0), torch.arange(3.0)
        pieces = [(1, 0, 5), (2, 4, 3), (3, 0, 3)]
        (flat, first), (own, second) = memory.sections(pieces, [whole[2:7], whole[10:13], alone])
        assert flat.data_ptr() == whole.data_ptr()
        assert (list(first.keys), first.table.T.tolist()) == ([1, 2], [[0, 5, 2], [4, 3, 10]])
        assert (list(second.keys), second.table.T.tolist()) == ([3], [[0, 3, 0]])
        assert own.data_ptr() == alone.data_ptr()
        assert before is None or before is first
        before = first
    (_, moved), *_ = memory.sections(pieces, [whole[3:8], whole[10:13], alone])
    assert moved.table.T.tolist() == [[0, 5, 3], [4, 3, 10]]
    [(_, skipped)] = memory.sections([(1, 2, 5), (2, 4, 3)], [whole[0:9], whole[9:16]], skip=True)
    assert skipped.table.T.tolist() == [[2, 5, 2], [4, 3, 13]]


def test_pieces_of_a_parameter(params: dict[str, torch.nn.Parameter]) -> None:
    """A rank owns a part of a parameter, at any place."""
    audit = samples(params)
    audit.arm(64, 3)
    audit.began()
    loss_of(params, 0).backward()
    flat = params["w"].grad.flatten()
    for cut in (0, 1, 700, 1999):
        pieces = [piece(params["w"], 0, flat[:cut]), piece(params["w"], cut, flat[cut:])]
        assert audit.compare(pieces).mismatches == ()
        spoilt = flat.clone()
        spoilt[cut:] += 1
        [mismatch] = audit.compare([piece(params["w"], cut, spoilt[cut:])]).mismatches or [None]
        if cut < 1900:
            assert mismatch is not None
            assert mismatch.name == "w"


CHANGES = {
    "lost": lambda grad, last: grad * 0,
    "overwritten": lambda grad, last: last,
    "duplicated": lambda grad, last: grad * 2,
    "scaled": lambda grad, last: grad / 16,
    "not_finite": lambda grad, last: grad * float("nan"),
    "differs": lambda grad, last: grad + torch.arange(grad.numel()),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_wrong_is_told_apart(params: dict[str, torch.nn.Parameter], kind: str) -> None:
    audit = samples(params)
    audit.arm(0, 0)
    for number in range(2):
        audit.began()
        before = {name: None if p.grad is None else p.grad.clone() for name, p in params.items()}
        loss_of(params, number).backward()
    last = {n: p.grad - before[n] for n, p in params.items()}  # type: ignore[operator]
    pieces = [piece(p, 0, CHANGES[kind](p.grad.flatten(), last[n].flatten())) for n, p in params.items()]
    result = audit.compare(pieces)
    assert {m.kind for m in result.mismatches} == {kind}
    assert all(m.error > 0.1 for m in result.mismatches)
    if kind == "scaled":
        assert all(m.factor == pytest.approx(1 / 16) for m in result.mismatches)


def test_a_gradient_that_nobody_delivered_is_stale(params: dict[str, torch.nn.Parameter]) -> None:
    audit = samples(params)
    audit.arm(0, 0)
    audit.began()
    (params["b"] * 2).sum().backward()
    pieces = [*gradients(params), piece(params["w"], 0, torch.ones(2000))]
    [mismatch] = audit.compare(pieces).mismatches
    assert (mismatch.name, mismatch.kind) == ("w", "stale")
    assert audit.compare([*gradients(params), piece(params["w"], 0, torch.zeros(2000))]).mismatches == ()


def test_rounding_is_no_fault_and_more_than_rounding_is(params: dict[str, torch.nn.Parameter]) -> None:
    """Accumulated in bf16, against float32 sums: within the stated tolerance, and not far within it for nothing."""
    audit = samples(params, torch.bfloat16)
    audit.arm(0, 0)
    total = torch.zeros(2000, dtype=torch.bfloat16)
    for number in range(8):
        audit.began()
        params["w"].grad = None
        loss_of(params, number).backward()
        total += params["w"].grad.flatten().bfloat16()
    assert audit.compare([piece(params["w"], 0, total)]).mismatches == ()
    assert audit.compare([piece(params["w"], 0, total * 1.3)]).mismatches != ()


def test_gradients_taken_with_autograd_grad_are_not_samples(params: dict[str, torch.nn.Parameter]) -> None:
    audit = samples(params)
    audit.arm(0, 0)
    audit.began()
    torch.autograd.grad(loss_of(params, 5), list(params.values()))
    loss_of(params, 0).backward()
    assert audit.compare(gradients(params)).mismatches == ()


def test_a_spoilt_window_is_not_judged(params: dict[str, torch.nn.Parameter]) -> None:
    audit = samples(params)
    audit.arm(0, 0)
    audit.began()
    loss_of(params, 0).backward()
    audit.spoil("because")
    assert audit.compare([piece(params["w"], 0, torch.ones(2000))]).skipped == "because"
    audit.clear()
    audit.arm(0, 0)
    audit.began()
    assert audit.compare([piece(params["w"], 0, torch.zeros(2000))]).mismatches == ()


def test_no_hook_stays(params: dict[str, torch.nn.Parameter]) -> None:
    audit = samples(params)
    audit.arm(4, 0)
    audit.began()
    audit.disarm()
    loss_of(params, 0).backward()
    assert audit.rows == []

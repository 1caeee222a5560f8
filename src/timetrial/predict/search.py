"""Every valid plan of a workload on a number of accelerators, ranked by its predicted step time.

1. Plans are grouped by what a trace depends on (`space.Task`). A task traces and compiles a layer once for each micro
   batch, prices it once for each way in which its groups lie on the machine, and gives every plan its memory and the
   least time of its step (`bound.py`), both sums. A micro batch above one that does not fit is not looked at.
2. Plans that fit are priced in the order of their least times, the pipeline by formula, and laid out exactly in the
   order of what that says, until as many as are wanted are faster than anything that is known of the others.

Tasks run in processes of their own where there are several of both; what is found does not depend on that.
"""

from __future__ import annotations

import concurrent.futures
import gc
import heapq
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from timetrial.config import Plan, RunConfig
from timetrial.errors import UserError
from timetrial.parallel.plan import validate
from timetrial.predict import cache, predict
from timetrial.predict import space as spaces
from timetrial.predict.constants import Constants
from timetrial.predict.constants import load as load_constants
from timetrial.predict.events import LayerTrace
from timetrial.predict.found import Found, Ranked, Refusal, as_json, explain
from timetrial.predict.quick import formula_s
from timetrial.predict.request import Request
from timetrial.predict.shelf import Key, PipelineSeconds, Question, Shelf, trace_key
from timetrial.predict.space import Space, Task
from timetrial.systems.stack import Stack

__all__ = ["Found", "Space", "as_json", "explain", "search"]

KEEP = 20
NEAR = 10
HELD = 1000
"""Plans of one task that are held for pricing, by their least times."""
SLACK = 0.99
"""What is known beforehand may be too long by as much: least times are sums, and so is the formula."""


@dataclass(order=True, frozen=True)
class Candidate:
    """A plan that may be priced, in the order of pricing."""

    least_s: float
    key: Key
    """Tells plans apart, so that ties are broken in one way."""
    plan: Plan = field(compare=False)
    precision: str = field(compare=False)


@dataclass
class Scan:
    """What a task found."""

    tried: int = 0
    misfits: int = 0
    fitting: int = 0
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Reason without its numbers -> plans, first reason."""
    fits: list[Candidate] = field(default_factory=list)
    """Those with the least times, at most HELD."""
    near: list[Candidate] = field(default_factory=list)
    """Fastest of those that would fit into twice the memory, at most NEAR."""
    tightest: tuple[float, Key, Plan, str] | None = None
    """Bytes that it lacks, and the plan that lacks least."""

    def refuse(self, reason: str, plans: int) -> None:
        """Count plans that cannot be."""
        kind = re.sub(r"[\d,]+", "#", reason)
        count, example = self.refused.get(kind, (0, reason))
        self.refused[kind] = (count + plans, example)

    def misfit(self, over: float, candidates: list[Candidate], near: bool) -> None:
        """Note plans that lack `over` bytes."""
        closest = (over, min(c.key for c in candidates), candidates[0].plan, candidates[0].precision)
        self.tightest = min(self.tightest or closest, closest, key=lambda t: t[:2])
        if near:
            self.near = heapq.nsmallest(NEAR, [*self.near, *candidates])


def search(
    base: Request,
    space: Space | None = None,
    *,
    keep: int = KEEP,
    workers: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    stack: Stack | None = None,
    constants: Constants | None = None,
    traces: Callable[[RunConfig], dict[str, LayerTrace]] = cache.layers,
) -> Found:
    """The `keep` fastest plans of `space` for the workload, global batch and accelerators of `base`; its own mapping
    does not count (`space.question` makes such a request).

    `progress(done, total, what)` is called with counts of tasks, and after them of ranked plans. `workers`:
    processes; None: one for each core that this process may use, up to two. Raises UserError where the system, the
    stack or the space cannot be.
    """
    start = time.perf_counter()
    space = space or Space()
    spaces.check(space, base)
    if keep < 1:
        raise UserError(f"search: keep={keep} must be at least 1")
    system = predict.system_of(base)
    stack, constants = stack or predict.stack_of(base, system), constants or load_constants()
    question = Question(base, space, system, stack, constants, traces)
    tasks = spaces.tasks(base, space, system)
    workers = min(2, len(os.sched_getaffinity(0))) if workers is None else max(1, workers)
    scans = list(_scans(question, tasks, workers, progress))
    book = _Book(question)
    ranked = _best(book, sorted(c for scan in scans for c in scan.fits), keep, progress)
    near = [
        book.price(c.plan, c.precision, formula_s) for c in heapq.nsmallest(NEAR, (c for s in scans for c in s.near))
    ]
    tightest = min((s.tightest for s in scans if s.tightest), default=None, key=lambda t: t[:2])
    return Found(
        base=base,
        system=system.name,
        stack=stack.name,
        memory_bytes=system.accelerator.memory_bytes,
        tried=sum(scan.tried for scan in scans),
        refused=_refusals(scans),
        misfits=sum(scan.misfits for scan in scans),
        fitting=sum(scan.fitting for scan in scans),
        ranked=tuple(ranked),
        near=tuple(sorted(near, key=_rank)),
        tightest=book.price(tightest[2], tightest[3], formula_s) if tightest else None,
        priced=book.asked,
        workers=workers,
        seconds=time.perf_counter() - start,
    )


def _scans(
    question: Question, tasks: list[Task], workers: int, progress: Callable[[int, int, str], None] | None
) -> Iterator[Scan]:
    """A scan for each task, in the tasks' order."""
    what = "looking at groups of plans"

    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total, what)

    tell(0, len(tasks))
    if workers < 2 or len(tasks) < 2:
        for done, task in enumerate(tasks, 1):
            yield scan(question, task)
            tell(done, len(tasks))
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(_scan_apart, question, task) for task in tasks]
        try:
            for done, _ in enumerate(concurrent.futures.as_completed(futures), 1):
                tell(done, len(tasks))
            yield from (future.result() for future in futures)
        finally:
            pool.shutdown(cancel_futures=True)


def _scan_apart(question: Question, task: Task) -> Scan:
    """`scan` in a process that does nothing else."""
    made = scan(question, task)
    gc.collect()
    gc.freeze()  # what is left are torch and caches, not to be walked again
    return made


def scan(question: Question, task: Task) -> Scan:
    """All plans of a task. Garbage waits for its end: tracing makes many objects, and takes a third less time so."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _scan(question, task)
    finally:
        if collecting:
            gc.enable()


def _scan(question: Question, task: Task) -> Scan:
    """All plans of a task: which can be, which fit, and how long they take at least."""
    base, space, made = question.base, question.space, Scan()
    capacity = question.system.accelerator.memory_bytes
    shelf: Shelf | None = None
    full: set[tuple[int, int, int | None]] = set()
    for plan in spaces.plans(base, space, task):
        names = spaces.orders(plan, space)
        made.tried += len(names)
        request = question.request(plan, task.precision)
        try:
            validate(plan, request.config, base.accelerators)
            predict.refused(request)
            mapping = (plan.pp, plan.vp, plan.zero)
            if mapping in full:  # a smaller micro batch does not fit
                made.misfits += len(names)
                continue
            if shelf is None or shelf.key != trace_key(plan):
                shelf = Shelf(question, plan, task.precision)
            verdict = shelf.memory(plan).verdict(capacity)
        except UserError as error:
            made.refuse(str(error), len(names))
            continue
        fits = verdict.possible and verdict.over <= space.offload * capacity
        near = fits or verdict.over <= capacity
        laid = [replace(plan, order=order) for order in names]
        candidates = [
            Candidate(shelf.least_s(one) if near else 0.0, _key(one, task.precision), one, task.precision)
            for one in laid
        ]
        if fits:
            made.fitting += len(names)
            made.fits += candidates
            if len(made.fits) > 2 * HELD:
                made.fits = heapq.nsmallest(HELD, made.fits)
        else:
            made.misfits += len(names)
            made.misfit(verdict.over, candidates, near)
            full.add(mapping)
    made.fits = heapq.nsmallest(HELD, made.fits)
    return made


class _Book:
    """Prices of single plans, for those that a search looks at again."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.asked = 0
        self._shelves: dict[Key, Shelf] = {}

    def price(self, plan: Plan, precision: str, pipeline_s: PipelineSeconds | None) -> Ranked:
        """The step of one plan, its pipeline by a formula; laid out where that is None."""
        self.asked += 1
        key = (precision, *trace_key(plan))
        if key not in self._shelves:
            if len(self._shelves) >= cache.IN_MEMORY:
                self._shelves.pop(next(iter(self._shelves)))
            self._shelves[key] = Shelf(self.question, plan, precision)
        shelf = self._shelves[key]
        state = shelf.memory(plan)
        verdict = state.verdict(self.question.system.accelerator.memory_bytes)
        return Ranked(plan, precision, shelf.step(plan, pipeline_s), pipeline_s is None or plan.pp == 1, state, verdict)


LEAST, FORMULA, LAID = range(3)
"""What is known of a plan's step."""


def _best(
    book: _Book, fits: Sequence[Candidate], keep: int, progress: Callable[[int, int, str], None] | None = None
) -> list[Ranked]:
    """The `keep` fastest of `fits`, laid out, fastest first.

    A queue in the order of what is known of each: the first is looked at more closely, until it is the fastest. On
    unequal stages the formula is too short, so that it does for an order of looking and not for an answer.
    """
    queue = [(SLACK * fit.least_s, LEAST, at) for at, fit in enumerate(fits)]
    heapq.heapify(queue)
    laid: dict[int, Ranked] = {}
    rows: list[Ranked] = []
    while queue and len(rows) < keep:
        _, known, at = heapq.heappop(queue)
        if progress is not None:  # in the end, all of the fastest are laid out and taken one after another
            progress(min(keep, len(rows) + len(laid)), min(keep, len(fits)), "laying out the fastest plans")
        if known == LAID:
            rows.append(laid.pop(at))
            continue
        row = book.price(fits[at].plan, fits[at].precision, formula_s if known == LEAST else None)
        if row.exact:
            laid[at] = row
            heapq.heappush(queue, (row.seconds, LAID, at))
        else:
            heapq.heappush(queue, (SLACK * row.seconds, FORMULA, at))
    return sorted(rows, key=_rank)


def _refusals(scans: Iterable[Scan]) -> tuple[Refusal, ...]:
    kinds: dict[str, tuple[int, str]] = {}
    for made in scans:
        for kind, (plans, example) in made.refused.items():
            count, first = kinds.get(kind, (0, example))
            kinds[kind] = (count + plans, first)
    return tuple(Refusal(n, example) for n, example in sorted(kinds.values(), key=lambda v: (-v[0], v[1])))


def _key(plan: Plan, precision: str) -> Key:
    degrees = (plan.tp, plan.cp, plan.ep, plan.pp, plan.vp, plan.mbs, plan.zero or 0)
    return (*degrees, plan.recompute, plan.order, precision)


def _rank(row: Ranked) -> tuple[float, Key]:
    return (row.seconds, _key(row.plan, row.precision))

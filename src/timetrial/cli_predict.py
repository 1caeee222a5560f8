"""The commands that predict: predict, search, validate, systems. No torch unless a trace is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from timetrial.errors import RunFailed, UserError

SystemName = Annotated[str, typer.Option("--system", help="Name from `timetrial systems`, or a .toml file.")]
Gpus = Annotated[int, typer.Option("--gpus", help="Accelerators of the run.", min=1)]
Precision = Annotated[
    str, typer.Option(help="bf16, fp8 (the default), fp8(tensorwise), mxfp8, nvfp4; +fp8attn for attention in fp8.")
]
StackName = Annotated[str | None, typer.Option("--stack", help="Software generation, as ngc25.04, or a .toml file.")]
Round = Annotated[str | None, typer.Option("--round", help="Round whose recipe holds; the newest by default.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any field of the configuration: model.n_layers=62.")]
Graphs = Annotated[str | None, typer.Option(help="CUDA graphs: none, layer or full; the stack's by default.")]


def add_to(app: typer.Typer) -> None:
    """Make these commands part of `app`."""
    app.command()(predict)
    app.command()(search)
    app.command()(validate)
    app.command()(calibrate)
    app.command("systems")(list_systems)


def predict(
    workload: Annotated[str | None, typer.Argument(help="Name from `timetrial list`; none with --rows.")] = None,
    system: SystemName = "",
    gpus: Annotated[int, typer.Option("--gpus", help="Accelerators of the run.", min=0)] = 0,
    plan: Annotated[
        str | None,
        typer.Option("--plan", help="Mapping, such as tp=4,pp=8,vp=8,cp=2,mbs=1,gbs=1248,order=tp-cp-pp-dp."),
    ] = None,
    precision: Precision = "",
    stack: StackName = None,
    preset: Annotated[str, typer.Option(help="official, or mini: for machines like this one.")] = "official",
    round_: Round = None,
    graphs: Graphs = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page there.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev (.json, .json.gz).")] = None,
    rows: Annotated[Path | None, typer.Option(help="Predict every row of a table of runs.")] = None,
    out: Annotated[
        str, typer.Option(help="With --rows: where the table with predictions goes; - is standard output.")
    ] = "-",
) -> None:
    """Step time, memory, time to train on any machine. Without --plan the best plan is searched."""
    if rows is not None:
        if workload:
            raise UserError("a workload and --rows: give one of them; rows name their own")
        raise SystemExit(_rows(rows, out))
    if not workload or not system or not gpus:
        missing = ", ".join(n for n, v in (("WORKLOAD", workload), ("--system", system), ("--gpus", gpus)) if not v)
        raise UserError(f"missing {missing}; as in: timetrial predict llama31_405b --system gb200-nvl72 --gpus 2496")
    from timetrial.predict import answer
    from timetrial.progress import Watch
    from timetrial.report import pages, perfetto
    from timetrial.report import prediction as report
    from timetrial.report.answered import answered

    pages.check("--html", html)
    pages.check("--trace", trace, perfetto.SUFFIXES)
    request = answer.request_of(
        workload,
        system,
        gpus,
        preset=preset,
        plan=plan or "",
        precision=precision,
        round_=round_,
        sets=sets,
        graphs=graphs,
        any_plan=plan is None,
    )
    chosen = answer.named_stack(stack, request)
    with Watch(sys.stderr, "predicting") as watch:
        if plan is None:
            request = answer.best_request(request, chosen, progress=watch)
            watch(0, 0, "predicting")
        made = answered(request, chosen)
    written = [
        write(made, path) for path, write in ((html, report.write_page), (trace, perfetto.write)) if path is not None
    ]
    print(json.dumps(report.as_json(made), indent=1) if as_json else report.text(made))
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def _rows(path: Path, out: str) -> int:
    from timetrial.predict import answer, rows
    from timetrial.report import pages

    if out != "-":
        pages.check("--out", Path(out))
    table = rows.read(path)
    results = rows.predict_rows(table, answer.answer)
    rows.write(table, results, out)
    print(results.summary, file=sys.stderr)
    return 1 if results.broken else 0


def search(
    workload: Annotated[str, typer.Argument(help="Name from `timetrial list`.")],
    system: SystemName,
    gpus: Gpus,
    gbs: Annotated[int | None, typer.Option(help="Global batch; the recipe's by default.", min=1)] = None,
    precision: Precision = "",
    stack: StackName = None,
    round_: Round = None,
    graphs: Graphs = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Every plan that can run, ranked: the best explained, the near misses with their reasons."""
    from timetrial.predict import answer
    from timetrial.predict import search as searching
    from timetrial.progress import Watch

    batch = f"gbs={gbs}" if gbs else ""
    request = answer.request_of(
        workload, system, gpus, plan=batch, precision=precision, round_=round_, sets=sets, graphs=graphs, any_plan=True
    )
    chosen = answer.named_stack(stack, request)
    with Watch(sys.stderr, "searching") as watch:
        found = answer.found(request, chosen, progress=watch)
    print(searching.as_json(found) if as_json else searching.explain(found))
    if not found.ranked:
        raise RunFailed(f"no plan of {workload} fits {gpus} of {system}; see the near misses above")


def validate(
    rows: Annotated[
        list[Path] | None, typer.Option(help="Tables of published runs; the package's own by default.")
    ] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Fit the constants anew and write them, with all errors, into this directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the residual plots there.")] = None,
) -> None:
    """How far to trust predictions: errors on published runs, each under constants fitted without its system."""
    from timetrial.predict import refit, sure
    from timetrial.report import pages

    pages.check("--html", html)
    left_out: list[str] = []
    if fit is None and rows is None:
        runs = list(sure.validated())
    else:
        published, left_out = refit.read(rows or [refit.bundled()])
        if not published:
            raise UserError(
                f"--rows: no row can be predicted; the first reason: {(left_out or ['the table is empty'])[0]}"
            )
        if fit is not None:
            constants, runs = refit.run(published, lambda text: print(text, file=sys.stderr, flush=True))
            for path in refit.write(fit, constants, runs):
                print(f"wrote {path}", file=sys.stderr)
        else:
            runs = refit.checked(published)
    if html is not None:
        from timetrial.report import residuals

        print(f"wrote {residuals.write_page(runs, html)}", file=sys.stderr)
    print(json.dumps(refit.as_json(runs), indent=1) if as_json else refit.table(runs, left_out))


def list_systems(
    name: Annotated[str | None, typer.Argument(help="Show one system with the source of each figure.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Machines that runs can be predicted on, and the software generations they are predicted with."""
    from timetrial.systems import listing

    print(listing.as_json(name) if as_json else listing.as_text(name))


def calibrate(
    out: Annotated[Path | None, typer.Option(help="Directory for the system file; by default that of `local`.")] = None,
) -> None:
    """Measure this machine, in under two minutes: what `predict --system local` then predicts for."""
    from timetrial.predict.calibrate import calibrate as measure

    print(measure(out))

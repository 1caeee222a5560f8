"""The command line: parse, call, print. What a command does stands in the module that it imports.

Imports stay inside the commands, so that those that need no torch answer at once.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from timetrial import __version__, cli_predict, cli_score
from timetrial.errors import RunFailed, UserError
from timetrial.train.launch import TIMEOUT_S

app = typer.Typer(
    name="timetrial",
    help="Train the MLPerf workloads to their targets, predict them on any cluster, and score what was run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Make and check token files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
cli_predict.add_to(app)
cli_score.add_to(app)

Preset = Annotated[str, typer.Option(help="mini (small model, real text, minutes) or official (the closed division).")]
Round = Annotated[str | None, typer.Option("--round", help="Round whose rules hold; the newest by default.")]
PlanText = Annotated[str | None, typer.Option("--plan", help="Mapping, such as tp=2,pp=2,gbs=32,order=tp-cp-dp-pp.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any field of the configuration: optim.base_lr=3e-4.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, order of samples and dropout.")]
MaxSteps = Annotated[int | None, typer.Option(help="Stop after this many optimizer steps, target or not.")]
DataDir = Annotated[Path | None, typer.Option("--data", help="Directory made by `timetrial data build`.")]


def main(arguments: list[str] | None = None) -> None:
    """Run a command; user errors end with one line and their exit code."""
    try:
        app(args=arguments)
    except (UserError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        raise SystemExit(0) from None


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Train the MLPerf workloads to their targets, from one definition."""
    if show:
        print(f"timetrial {__version__}")
        raise typer.Exit


@app.command("list")
def list_workloads(
    workload: Annotated[str | None, typer.Argument(help="Show one workload with the source of each value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Workloads, presets, targets and where their values come from."""
    from timetrial import listing

    print(listing.as_json(workload) if as_json else listing.as_text(workload))


@app.command()
def capabilities(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """What computes what: the CPU way, the GPU way and why, with this machine's marked."""
    import torch

    from timetrial.parallel import capabilities as table

    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(table.as_json(device) if as_json else table.as_text(device))


@app.command()
def train(
    workload: Annotated[str, typer.Argument(help="Name from `timetrial list`.")],
    preset: Preset = "mini",
    round_: Round = None,
    plan: PlanText = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks to start on this machine.", min=1)] = None,
    seed: Seed = None,
    max_steps: MaxSteps = None,
    data: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the run; runs/... by default.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads per rank; by default as many as are free.", min=1)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    restarts: Annotated[int, typer.Option(help="With --nproc: go on so often after a rank died or hung.", min=0)] = 0,
    timeout: Annotated[
        float, typer.Option(help="Seconds that one rank may keep the others waiting.", min=5)
    ] = TIMEOUT_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
    sets: Sets = None,
    gpus_per_node: Annotated[int, typer.Option(help="For --dry-run: ranks on a node.", min=1)] = 8,
    domain: Annotated[int | None, typer.Option(help="For --dry-run: ranks in one NVLink domain.", min=1)] = None,
) -> None:
    """Train a workload to its target."""
    from timetrial.train import request
    from timetrial.train.launch import launched

    if out is None and launched():
        raise UserError("--out is needed under a launcher: ranks must agree on the directory, also when started again")
    if resume and out is None:
        raise UserError("--resume needs --out, the directory of the run to go on with")
    ranks = request.rank_count(nproc, plan, out if resume else None)
    config = request.resolve(
        workload, preset, round_=round_, plan=plan, ranks=ranks, seed=seed, max_steps=max_steps, data=data,
        sets=sets or [], resume_from=out if resume else None, threads=threads,
    )  # fmt: skip
    if dry_run:
        from timetrial.train import dryrun

        print(dryrun.describe(config, gpus_per_node, domain))
        return
    from timetrial.train.rundir import default_path

    out = out or default_path(config)
    if ranks > 1 and not launched():
        raise SystemExit(request.start_ranks(config, ranks, sys.argv[1:], out, restarts, timeout))
    from timetrial.train.run import run_and_report

    command = shlex.join(["timetrial", *sys.argv[1:]])
    run_and_report(config, out, resume=resume, command=command, timeout_s=timeout)


@app.command()
def launch(
    workload: Annotated[str, typer.Argument(help="Name from `timetrial list`.")],
    nodes: Annotated[int, typer.Option(help="Nodes of the job.", min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="Ranks, one per GPU, on each node.", min=1)] = 8,
    preset: Preset = "official",
    round_: Round = None,
    plan: PlanText = None,
    minutes: Annotated[int, typer.Option(help="Wall-clock limit asked of the scheduler.", min=1)] = 240,
    data: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the run, on a shared file system.")] = None,
    sets: Sets = None,
) -> None:
    """Print the torchrun line and an sbatch script for N nodes; nothing is started."""
    from timetrial.train import launch as launching
    from timetrial.train import request

    cluster = launching.Cluster(nodes, gpus_per_node, minutes)
    config = request.resolve(
        workload, preset, round_=round_, plan=plan, ranks=cluster.ranks, data=data, sets=sets or []
    )
    words: list[Any] = ["train", workload, "--preset", preset, "--out", out or f"runs/{workload}-{preset}"]
    for flag, value in (("--round", round_), ("--plan", plan), ("--data", data)):
        words += [flag, value] if value is not None else []
    for text in sets or []:
        words += ["--set", text]
    print(launching.describe(cluster, [str(word) for word in words], config))


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Directory of a run.")]) -> None:
    """Write report.html anew from a run's files."""
    from timetrial.report import html

    print(html.write(run))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Directory of a run with a checkpoint.")],
    out: Annotated[Path, typer.Option(help="Directory for the Hugging Face safetensors.")],
) -> None:
    """Write a run's newest weights as Hugging Face safetensors, adapters merged."""
    from timetrial.train.export import export_run

    print(export_run(run, out))


@app.command()
def base(workload: Annotated[str, typer.Argument(help="Name from `timetrial list`.")]) -> None:
    """Pretrain the base that a mini starts from, unless it is there."""
    from timetrial.train.base import make_base
    from timetrial.workloads.workload import resolve

    print(make_base(resolve(workload, "mini")))


@app.command()
def converge(
    workload: Annotated[str, typer.Argument(help="Name from `timetrial list`.")],
    batch_sizes: Annotated[str | None, typer.Option(help="Global batch sizes, such as 8,16,32.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds 1..N for each batch size.", min=1)] = 5,
    threads: Annotated[int | None, typer.Option(help="CPU threads; by default as many as are free.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="CSV to write; rows that are there are not run again.")] = Path(
        "convergence.csv"
    ),
) -> None:
    """Samples that the mini preset needs to its target, per batch size and seed."""
    from timetrial.train.converge import measure

    measure(workload, batch_sizes, seeds, out, threads)


@data_app.command("build")
def data_build(
    source: Annotated[str, typer.Argument(help="c4 or govreport.")],
    input_: Annotated[Path, typer.Option("--input", help="Directory of the raw files.")],
    tokenizer: Annotated[Path, typer.Option(help="Hugging Face tokenizer.json or its directory.")],
    out: Annotated[Path, typer.Option(help="Directory for the token files.")],
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
) -> None:
    """Tokenize raw text into memory-mapped files; killed builds go on where they stopped."""
    from timetrial.data import build

    for split, meta in build.build(source, input_, tokenizer, out, workers).items():
        print(f"{out / split}: {meta.documents:,} documents, {meta.tokens:,} tokens")


@data_app.command("verify")
def data_verify(path: Annotated[Path, typer.Argument(help="Directory made by `data build`.")]) -> None:
    """Read every token file and compare its checksum."""
    from timetrial.data import build

    build.verify(path)
    print(f"{path}: all files as they were written")

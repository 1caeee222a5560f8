"""One row of a table of published runs as a request for a prediction.

Column names are those of published tables and their usual other spellings, in any case and order. A cell
that is blank, or says n/a, is missing; what then holds is what a submission of its kind uses, and
`Request.assumed` says so:

| missing                | taken                                                                              |
| ---------------------- | ---------------------------------------------------------------------------------- |
| TP, PP, VP, CP, EP     | 1                                                                                  |
| DP                     | accelerators / (TP x PP x CP); also where a DP is given that does not fit           |
| micro batch            | 1                                                                                  |
| global batch           | micro batches per rank x DP where told, else the workload's own                    |
| accelerators           | nodes x accelerators per node where told, else TP x PP x CP x DP                   |
| precision              | fp8, and bf16 on accelerators older than it                                        |
| sequence length, round | the workload's                                                                     |
| order of the axes      | tp-cp-dp-pp; tp-cp-pp-dp where tp_pp_dp_mapping is true                            |
| distributed optimizer  | on (optimizer states sharded, ZeRO stage 1)                                        |
| recomputation          | what submissions of its kind do (`practices.py`), else none; "full:21" means that    |
|                        | 21 blocks are computed again                                                       |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from timetrial.config import Plan, RunConfig, replace
from timetrial.errors import UserError
from timetrial.predict import practices
from timetrial.predict.published import Subject, subject

MISSING = frozenset({"", "-", "--", "?", "n/a", "n.a.", "na", "nan", "none", "null", "unknown", "tbd"})
TRUE = frozenset({"true", "t", "yes", "y", "on", "1", "1.0"})
FALSE = frozenset({"false", "f", "no", "n", "off", "0", "0.0"})

ALIASES = {
    "benchmark": ("benchmark", "workload"),
    "model": ("model", "model_name"),
    "task": ("task",),
    "round": ("round", "mlperf_round"),
    "system": ("accelerator", "gpu", "gpu_type", "system", "accelerator_name", "system_name"),
    "accelerators": ("accelerators", "gpus", "num_gpus", "n_gpus", "ngpus", "gpu_count", "world_size"),
    "nodes": ("nodes", "num_nodes", "n_nodes", "nnodes"),
    "per_node": ("accel_per_node", "accelerators_per_node", "gpus_per_node"),
    "gbs": ("gbs", "global_batch_size", "global_batch", "batch_size"),
    "mbs": ("mbs", "micro_batch", "micro_batch_size", "microbatch", "microbatch_size"),
    "per_rank": ("minibs_per_dp", "minibs"),
    "seq_len": ("seq_len", "seq", "seqlen", "seq_length", "sequence_length"),
    "tp": ("tp", "tensor_parallel", "tensor_model_parallel_size", "tensor_parallel_size"),
    "pp": ("pp", "pipeline_parallel", "pipeline_model_parallel_size", "pipeline_parallel_size"),
    "vp": ("vp", "vpp", "virtual_pipeline", "virtual_pipeline_model_parallel_size", "interleaved_pipeline"),
    "cp": ("cp", "context_parallel", "context_parallel_size"),
    "ep": ("ep", "expert_parallel", "expert_model_parallel_size", "expert_parallel_size"),
    "dp": ("dp", "data_parallel", "data_parallel_size"),
    "fsdp": ("fsdp",),
    "precision": ("precision", "dtype", "format"),
    "recompute": ("act_ckpt", "recompute", "activation_checkpointing", "recomputation"),
    "cuda_graph": ("cuda_graph", "cuda_graphs", "graph"),
    "tp_comm_overlap": ("tp_comm_overlap",),
    "asym_pp": ("asym_pp",),
    "dp_last": ("tp_pp_dp_mapping", "use_tp_pp_dp_mapping"),
    "dist_optimizer": ("dist_optimizer", "distributed_optimizer", "use_distributed_optimizer"),
    "overlap_grad_reduce": ("overlap_grad_reduce",),
    "overlap_param_gather": ("overlap_param_gather",),
    "sharp": ("sharp",),
    "segment": ("segment",),
    "release": ("release", "container"),
    "source": ("source",),
    "submitter": ("submitter",),
    "system_id": ("system_id",),
    "config_file": ("config_file",),
    "tokens_rate": ("tok_s_gpu", "tokens_per_s_per_gpu", "tokens_per_s_per_accel"),
    "tflops_rate": ("tflops_gpu", "model_tflops_per_gpu"),
}  # fmt: skip
"""What is read -> column names that tell it, the first one that is there and not blank counts."""

PRECISIONS = {
    "fp32": "fp32", "float32": "fp32", "tf32": "tf32",
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "16": "bf16", "bf16mixed": "bf16",
    "fp8": "fp8", "float8": "fp8", "fp8tensorwise": "fp8", "fp8delayed": "fp8", "fp8current": "fp8",
    "fp8ds": "fp8", "fp8cs": "fp8", "fp8hybrid": "fp8", "fp8tensorwisescaling": "fp8", "fp8delayedscaling": "fp8",
    "fp8currentscaling": "fp8", "fp8pertensor": "fp8", "fp8pertensorscaling": "fp8",
    "fp8blockscaling": "fp8_block", "fp8blockwisescaling": "fp8_block", "fp8subchannelscaling": "fp8_block",
    "fp8block": "fp8_block", "fp8blockwise": "fp8_block", "fp8sc": "fp8_block", "fp8subchannel": "fp8_block",
    "mxfp8": "mxfp8", "fp8mx": "mxfp8", "nvfp4": "nvfp4", "fp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip
"""Letters and digits of a written precision -> what linear layers compute in. fp16 moves and computes as bf16 does."""

RECIPES = {
    "fp8tensorwise": "tensorwise", "fp8current": "tensorwise", "fp8cs": "tensorwise",
    "fp8tensorwisescaling": "tensorwise", "fp8currentscaling": "tensorwise",
    "fp8delayed": "delayed", "fp8ds": "delayed", "fp8delayedscaling": "delayed",
}  # fmt: skip
"""Letters and digits of a written precision -> the recipe that it names; tensorwise is per-tensor current scaling."""

OLDER = ("a100", "a800", "a30", "a40", "v100", "mi250", "mi210", "tpu-v4", "cpu")
"""Parts of the names of accelerators without eight-bit floating point."""


@dataclass(frozen=True)
class Hints:
    """What a row tells about its software beside the plan; None where it does not."""

    release: str = ""
    """Container or tag: "26.04 NeMo Container"."""
    source: str = ""
    """Publication of the row."""
    submitter: str = ""
    system_id: str = ""
    """The submission's name of its system; may hold the container, as in ngc25.04."""
    config_file: str = ""
    recipe: str = ""
    """Of the low precision: tensorwise, delayed; "" where not told."""
    healing_step: int | None = None
    """Step after which a run in four bits goes on in eight."""
    recompute: str = ""
    """Modules that are computed again, as the row names them."""
    recompute_layers: int = 0
    """Blocks that are computed again as a whole, where a row says "full:21" (of a stage without a pipeline)."""
    cuda_graph: str = ""
    """full_iter, layer, mcore; "" without."""
    tp_comm_overlap: bool | None = None
    asym_pp: bool | None = None
    """Whether embedding and loss count as layers in the pipeline's split."""
    dist_optimizer: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    sharp: bool | None = None
    """Reductions inside the switches of the scale-out fabric."""
    segment: int | None = None
    """Nodes that the scheduler kept in one scale-up domain."""


@dataclass(frozen=True)
class Request:
    """What is to be predicted."""

    config: RunConfig
    """Workload, model, sequence length, batch and plan. Its precision says bf16 where `precision` is lower."""
    round: str
    """As the row tells it, "" where it tells none; `config.round` is the round whose rules are used."""
    system: str
    """Accelerator or system as published; `systems.find` knows these names."""
    accelerators: int
    nodes: int | None
    """None where not told."""
    precision: str
    """Of linear layers: fp32, tf32, bf16, fp8, fp8_block, mxfp8, nvfp4 or mxfp4."""
    attention: str
    """Of attention: bf16 or fp8 (fp32 with fp32)."""
    converges: bool
    """Whether the row is of a benchmark with a target, so that it has a time to train."""
    model: str
    """The model's name, for people."""
    hints: Hints
    assumed: tuple[str, ...] = ()
    """What the row left open, and what was taken instead."""

    @property
    def plan(self) -> Plan:
        return self.config.plan

    @property
    def recipe(self) -> str:
        """Name of the stack's recipe for linear layers: `precision`, fp8(tensorwise) where the row says so."""
        tensorwise = self.precision == "fp8" and self.hints.recipe == "tensorwise"
        return "fp8(tensorwise)" if tensorwise else self.precision

    @property
    def seq_len(self) -> int:
        """Tokens per sample."""
        return self.config.data.seq_len


def request(row: Mapping[str, str]) -> Request:
    """The request of a row: column name as written -> cell. Raises UserError, one line, when there is none."""
    cells = Cells(row)
    if not any(cells.values.values()):
        raise UserError("the row is empty")
    assumed: list[str] = []
    about = subject(cells.text("benchmark"), cells.text("model"), cells.text("task"), cells.text("round"), assumed)
    if about.lora is None and _adapters_by_rates(cells, about):
        about = subject(cells.text("benchmark"), cells.text("model"), "lora", cells.text("round"), assumed)
        assumed.append("adapters, for the row's own rates are those of four FLOP a parameter and token, not six")
    system = cells.text("system")
    if not system:
        raise UserError("no accelerator: fill the column accelerator (or system)")
    precision, attention, recipe, healing = _precision(cells, system, assumed)
    tp, cp, pp = (_degree(cells, axis, assumed) for axis in ("tp", "cp", "pp"))
    vp, ep = cells.count("vp", zero_is_off=True) or 1, cells.count("ep", zero_is_off=True) or 1
    if vp > 1 and pp == 1:
        assumed.append(f"vp=1, for vp={vp} means nothing with pp=1")
        vp = 1
    experts = getattr(about.config.model, "n_experts", 0)
    if ep > 1 and not experts:
        raise UserError(f"EP={ep} needs a mixture-of-experts model and {about.model} has none; set EP to 1")
    accelerators = _accelerators(cells, tp * pp * cp, assumed)
    dp = _data_parallel(cells, accelerators, (tp, pp, cp), assumed)
    mbs, gbs = _batch(cells, dp, about, assumed)
    seq_len = cells.count("seq_len") or about.config.data.seq_len
    hints = _hints(cells, recipe, healing)
    known = practices.of(about.config.workload, system) if about.converges else []
    if not cells.text("recompute"):
        hints = replace(hints, recompute_layers=practices.taken(known, "recompute_layers", 0, assumed))
    if not cells.text("precision"):
        attention = practices.taken(known, "attention", attention, assumed)
    plan = Plan(
        tp=tp, cp=cp, pp=pp, vp=vp, ep=ep, dp=dp, mbs=mbs, gbs=gbs,
        shard=_shard(cells, hints, dp * cp), zero=3 if _fsdp(cells) else 1,
        order="tp-cp-pp-dp" if cells.flag("dp_last") else "tp-cp-dp-pp",
        precision="fp32" if precision in ("fp32", "tf32") else "bf16",
        recompute="full" if hints.recompute == "full" else "selective" if hints.recompute else "none",
    )  # fmt: skip
    config = about.at(gbs)
    return Request(
        config=replace(config, plan=plan, data=replace(config.data, seq_len=seq_len)),
        round=cells.text("round"),
        system=system,
        accelerators=accelerators,
        nodes=cells.count("nodes"),
        precision=precision,
        attention=attention,
        converges=about.converges,
        model=about.model,
        hints=hints,
        assumed=tuple(assumed),
    )


def _adapters_by_rates(cells: Cells, about: Subject) -> bool:
    """Whether the measured rates of a row say that only adapters were trained, whatever its labels say."""
    tokens, tflops = cells.rate("tokens_rate"), cells.rate("tflops_rate")
    if not tokens or not tflops or about.config.lora is not None:
        return False
    config = about.at(about.config.plan.gbs)
    length = cells.count("seq_len") or config.data.seq_len
    whole = config.model.flops_per_sample(length) / length
    adapters = config.model.flops_per_sample(length, frozen=True) / length
    told = tflops * 1e12 / tokens
    return bool(abs(told / adapters - 1) < 0.08 < abs(told / whole - 1))


class Cells:
    """The cells of a row by what they tell."""

    def __init__(self, row: Mapping[str, str]) -> None:
        columns: dict[str, tuple[str, str]] = {}
        for name, cell in row.items():
            columns.setdefault(normal(name), (name.strip(), clean(cell)))
        self.values: dict[str, str] = {}
        """What is told -> its cell, "" where missing."""
        self.names: dict[str, str] = {}
        """What is told -> the column that told it, for messages."""
        for key, aliases in ALIASES.items():
            told = (columns[alias] for alias in aliases if alias in columns and columns[alias][1])
            self.names[key], self.values[key] = next(told, (aliases[0], ""))

    def text(self, key: str) -> str:
        return self.values[key]

    def count(self, key: str, zero_is_off: bool = False) -> int | None:
        """A whole number above 0, None where missing. Raises UserError for anything else."""
        text = self.values[key]
        if not text:
            return None
        number = re.fullmatch(r"\+?(\d{1,3}(?:,\d{3})+|\d{1,12})(?:\.0*)?", text)
        value = int(number[1].replace(",", "")) if number else -1
        if value == 0 and zero_is_off:
            return None
        if value < 1:
            raise UserError(f"{self.names[key]}={text[:40]}: must be a whole number above 0")
        return value

    def rate(self, key: str) -> float | None:
        """A number above 0, None where there is none: measured figures are never asked for."""
        try:
            value = float(self.values[key].replace(",", ""))
        except ValueError:
            return None
        return value if value > 0 else None

    def flag(self, key: str) -> bool | None:
        """True or false, None where missing. Raises UserError for anything else."""
        text = self.values[key].lower()
        if not text:
            return None
        if text in TRUE or text in FALSE:
            return text in TRUE
        raise UserError(f"{self.names[key]}={text[:40]}: must be true or false")


def normal(name: str) -> str:
    """A column's name in the one spelling that `ALIASES` has: "Micro-Batch " -> micro_batch."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def clean(cell: str) -> str:
    """The cell without outer space and quotes, "" where it says that it tells nothing."""
    text = cell.replace("\u00a0", " ").strip().strip("\"'").strip()
    return "" if text.lower() in MISSING else text


def _precision(cells: Cells, system: str, assumed: list[str]) -> tuple[str, str, str, int | None]:
    """(linear layers, attention, recipe, healing step) of texts such as `nvfp4+fp8attn+healing@350`."""
    text = cells.text("precision").lower()
    if not text:
        taken = "bf16" if any(old in system.lower() for old in OLDER) else "fp8"
        assumed.append(f"precision {taken}")
        return taken, "bf16", "", None
    base, *more = re.split(r"\s*\+\s*", text)
    recipe = match[1] if (match := re.search(r"\(([^)]*)\)", base)) else RECIPES.get(re.sub(r"[^a-z0-9]", "", base), "")
    precision = PRECISIONS.get(re.sub(r"[^a-z0-9]", "", base)) or PRECISIONS.get(re.sub(r"\(.*|[^a-z0-9]", "", base))
    if precision is None:
        known = ", ".join(sorted(set(PRECISIONS.values())))
        raise UserError(f"{cells.names['precision']}={text[:40]}: is not known; use one of {known}")
    attention, healing = "fp32" if precision in ("fp32", "tf32") else "bf16", None
    for part in more:
        if part in ("fp8attn", "fp8dpa", "fp8 attention"):
            attention = "fp8"
        elif match := re.fullmatch(r"healing@?(\d{1,9})", part):
            healing = int(match[1])
        else:
            assumed.append(f"nothing for {part[:20]!r} in the precision, which is not known")
    return precision, attention, recipe, healing


def _degree(cells: Cells, axis: str, assumed: list[str]) -> int:
    told = cells.count(axis)
    if told is None:
        assumed.append(f"{axis}=1")
    return told or 1


def _accelerators(cells: Cells, others: int, assumed: list[str]) -> int:
    if (told := cells.count("accelerators")) is not None:
        return told
    nodes, per_node, dp = cells.count("nodes"), cells.count("per_node"), cells.count("dp")
    if nodes and per_node:
        assumed.append(f"accelerators={nodes * per_node}, nodes x accelerators per node")
        return nodes * per_node
    if dp:
        assumed.append(f"accelerators={others * dp}, TP x PP x CP x DP")
        return others * dp
    raise UserError("no number of accelerators: fill the column accelerators (or gpus), or DP")


def _data_parallel(cells: Cells, accelerators: int, degrees: tuple[int, int, int], assumed: list[str]) -> int:
    (tp, pp, cp), others = degrees, math.prod(degrees)
    dp, rest = divmod(accelerators, others)
    if rest or not dp:
        raise UserError(
            f"TP={tp} x PP={pp} x CP={cp} = {others} does not divide {accelerators} accelerators; change one of them"
        )
    told = cells.count("dp")
    if told is not None and told != dp:
        assumed.append(f"dp={dp}, for dp={told} does not make {accelerators} accelerators")
    return dp


def _batch(cells: Cells, dp: int, about: Subject, assumed: list[str]) -> tuple[int, int]:
    mbs, gbs, per_rank = cells.count("mbs"), cells.count("gbs"), cells.count("per_rank")
    if mbs is None:
        mbs = 1
        assumed.append("micro batch 1")
    if gbs is None:
        gbs = per_rank * dp if per_rank else about.config.plan.gbs
        assumed.append(f"gbs={gbs}, " + ("micro batches per rank x DP" if per_rank else "the workload's own"))
    if gbs % (mbs * dp):
        raise UserError(
            f"gbs={gbs} is not a multiple of micro batch {mbs} x DP={dp} = {mbs * dp}; "
            f"change gbs, the micro batch, or TP, PP or CP, which make DP"
        )
    return mbs, gbs


def _fsdp(cells: Cells) -> bool:
    text = cells.text("fsdp").lower()
    return text in TRUE or (text not in FALSE and cells.count("fsdp") is not None)


def _shard(cells: Cells, hints: Hints, copies: int) -> int:
    """Ranks of a shard group: of the fsdp column; 1 (plain data parallelism) without a distributed optimizer."""
    if _fsdp(cells):
        text = cells.text("fsdp").lower()
        size = 0 if text in TRUE else cells.count("fsdp") or 0
        if size and copies % size:
            raise UserError(f"{cells.names['fsdp']}={size} does not divide DP x CP = {copies}; change it")
        return size
    return 1 if hints.dist_optimizer is False else 0


def _hints(cells: Cells, recipe: str, healing: int | None) -> Hints:
    graph, recompute = cells.text("cuda_graph").lower(), cells.text("recompute").lower()
    some = re.fullmatch(r"full:(\d+)", recompute)
    if some:
        recompute = ""
    return Hints(
        release=cells.text("release"),
        source=cells.text("source"),
        submitter=cells.text("submitter"),
        system_id=cells.text("system_id"),
        config_file=cells.text("config_file"),
        recipe=recipe,
        healing_step=healing,
        recompute="full" if recompute in TRUE | {"block", "uniform"} else "" if recompute in FALSE else recompute,
        recompute_layers=int(some[1]) if some else 0,
        cuda_graph="full_iter" if graph in TRUE else "" if graph in FALSE else graph,
        tp_comm_overlap=cells.flag("tp_comm_overlap"),
        asym_pp=cells.flag("asym_pp"),
        dist_optimizer=cells.flag("dist_optimizer"),
        overlap_grad_reduce=cells.flag("overlap_grad_reduce"),
        overlap_param_gather=cells.flag("overlap_param_gather"),
        sharp=cells.flag("sharp"),
        segment=cells.count("segment", zero_is_off=True),
    )

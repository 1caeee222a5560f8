"""The claims of announcements as experiments: which runs are compared, and what decides between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from timetrial.predict.claims_run import (
    GPU_TIME,
    THROUGHPUT,
    TIME,
    Cells,
    Compared,
    Run,
    changed,
    entry,
    lies,
    published,
    run,
)

B200 = "NVIDIA Blackwell GPU (B200-SXM-180GB)"
H100_512, GB200_512 = "eos-dfw_n64_ngc25.01_nemo", "carina_ngpu512_ngc25.04_nemo"
GB200_2496 = "carina_ngpu2496_ngc25.04_nemo"


@dataclass(frozen=True)
class Claim:
    """One claim, and the runs that test it."""

    title: str
    said: str
    """What is claimed, and by whom."""
    compared: tuple[Compared, ...] = ()
    notes: tuple[str, ...] = ()
    """Further sentences, with figures computed."""
    split: Compared | None = None
    """Whose difference in time to train is told part by part."""
    caveat: str = ""
    """Said in bold where no published run tests what is predicted."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """In the order of their first comparison; labels name them."""
        return tuple({r.label: r for c in self.compared for r in (c.before, c.after)}.values())


def big(system_id: str, round_: str = "v5.0") -> Cells:
    """A submission of Llama 3.1 405B."""
    return entry(round_, "llama31_405b", system_id)


def generations() -> Claim:
    """GB200 against H100."""
    h100, gb200 = run("H100, v5.0", big(H100_512)), run("GB200, v5.0", big(GB200_512))
    same = run("GB200, batch of the H100", changed(big(GB200_512), gbs="1152"))
    pairs = [(h100, gb200, TIME), (h100, gb200, THROUGHPUT), (h100, same, TIME), (h100, same, THROUGHPUT)]
    for precision in ("FP8", "BF16"):
        old, new = (
            published(source=f"dgxc-benchmarking {tag} llama3.1/README.md", accelerators="512", precision=precision)
            for tag in ("v25.04.01", "v25.05")
        )
        both = (run(f"H100, {precision}, batch 256", old), run(f"GB200, {precision}, batch 256", new))
        pairs.append((*both, THROUGHPUT))
    samples = {r.label: r.time.samples for r in (h100, gb200, same) if r.time}
    told = ", ".join(f"{n:,.0f} ({label})" for label, n in samples.items())
    vendor = pairs[4][1]
    told_s = [THROUGHPUT.published(r) or 0.0 for r in (gb200, vendor)]
    slower, longer = told_s[1] / told_s[0] - 1, vendor.gpu_s / gb200.gpu_s - 1
    return Claim(
        "GB200 against H100, Llama 3.1 405B on 512 GPUs",
        "GB200 trains Llama 3.1 405B 2.2 times as fast as H100 at 512 GPUs (announcements of MLPerf Training v5.0; the "
        "scores are 269.12 and 121.09 minutes).",
        tuple(Compared(*pair) for pair in pairs),
        (
            f"Convergence: predicted samples to the target are {told}. Both published scores are normalised to the "
            "reference's samples at batch 1152 (rcp_scaling_factor 1.1667 and 1.1538 of the submissions' "
            "scaling.json), which is why the smaller batch wins nothing in the score: the factor is one of throughput.",
            f"At equal batches the published factor in FP8 is lower because GB200 took {100 * slower:.0f} % longer for "
            "a sample there than in the submission. The smaller batch's bubble, its exposed gradients and the other "
            f"order of axes are predicted to take {100 * longer:.0f} %; the rest is not explained.",
        ),
    )


def scaling() -> Claim:
    """From 512 to 2,496 GPUs."""
    small, large = run("512 GB200, v5.0", big(GB200_512)), run("2,496 GB200, v5.0", big(GB200_2496))
    middle = run("1,024 GB200, v5.0", big("carina_ngpu1024_ngc25.04_nemo"))
    pairs = [(small, large, GPU_TIME), (small, large, THROUGHPUT), (small, middle, GPU_TIME)]
    compared = tuple(Compared(*pair) for pair in pairs)
    rest = [f"{whole / steps:.3f}" for whole, steps in zip(*map(_both, compared[:2]), strict=True)]
    return Claim(
        "Strong scaling from 512 to 2,496 GB200, Llama 3.1 405B",
        "90 % scaling efficiency from 512 to 2,496 GPUs, 27.3 minutes (announcements of MLPerf Training v5.0 by "
        "CoreWeave, IBM and NVIDIA). A factor of 0.90 below is an efficiency of 90 %.",
        compared,
        (
            f"Steps aside, what samples, evaluations and the start leave is {rest[0]} as predicted and {rest[1]} as "
            "published.",
        ),
        split=compared[0],
    )


def _both(c: Compared) -> tuple[float, float]:
    if c.published is None:
        raise ValueError(f"{c.after.label} or {c.before.label} is not published")
    return c.ratio, c.published


def order() -> Claim:
    """Data parallelism last."""
    compared, notes = [], []
    for size, system_id in (("512", GB200_512), ("2,496", GB200_2496)):
        last = run(f"{size} GB200, data parallel last", big(system_id))
        before = run(f"{size} GB200, pipeline last", changed(big(system_id), tp_pp_dp_mapping="False"))
        compared.append(Compared(before, last, THROUGHPUT))
        notes += [f"{r.label}: {lies(r)}." for r in (last, before)]
    return Claim(
        "Order of the axes on NVL72: data parallel last",
        "NVIDIA's submissions on NVL72 set TP_PP_DP_MAPPING=True: ranks lie in the order tp-cp-pp-dp, not tp-cp-dp-pp "
        "(mlcommons/training_results_v5.0, config_GB200_128x4x112xtp4pp8cp2_cg_dplast.sh). The published "
        "tables hold no pair of runs that differ in the order alone.",
        tuple(compared),
        (*notes, "What stays in the domain is the pipeline: its messages come with every micro batch and delay the "
         "next stage, whereas gradients and parameters cross once a step and hide behind computing."),
    )  # fmt: skip


def graphs() -> Claim:
    """CUDA graphs against none."""
    rows = [
        ("8B on 8 GB200", entry("v5.1", "llama31_8b", "tyche_ngpu8_ngc25.09_nemo")),
        ("8B on 512 GB200", entry("v5.1", "llama31_8b", "tyche_ngpu512_ngc25.09_nemo")),
        ("LoRA 70B on 512 GB200", entry("v5.0", "llama2_70b_lora", "tyche_ngpu512_ngc25.04_nemo")),
        ("405B on 512 GB200", big("tyche_ngpu512_ngc25.09_nemo", "v5.1")),
        ("405B on 2,560 GB200", big("hsg_ngpu2560_ngc25.09_nemo", "v5.1")),
    ]
    pairs = [(run(f"{words}, none", changed(row, cuda_graph="")), run(f"{words}, graph", row)) for words, row in rows]
    return Claim(
        "CUDA graphs",
        "Full-iteration CUDA graphs take the host's launches out of the step, which matters most at scale "
        "(announcements of MLPerf Training v5.0 and v5.1). The published tables hold no pair with and without.",
        tuple(Compared(none, graph, THROUGHPUT) for none, graph in pairs),
        ("Graphs of layers and of the whole iteration are predicted alike: both leave only gaps between kernels.",),
    )  # fmt: skip


def adapters() -> Claim:
    """LoRA without model parallelism."""
    row = entry("v4.1", "llama2_70b_lora", "eos_ngc24.09_nemo")
    new = entry("v5.0", "llama2_70b_lora", "tyche_ngpu8_ngc25.04_nemo")
    h100, gb200 = run("8 H100, tp4, v4.1", row), run("8 GB200, tp1, v5.0", new)
    later = run("8 H100, tp4, stack of v5.0", changed(row, round="v5.0"))
    split = run("8 GB200, tp4", changed(new, TP="4"))
    alone = run("8 H100, tp1", changed(row, TP="1", round="v5.0"))
    pairs = [(h100, gb200, TIME), (h100, gb200, THROUGHPUT), (h100, later, THROUGHPUT), (later, split, THROUGHPUT)]
    pairs += [(split, gb200, THROUGHPUT), (later, alone, THROUGHPUT)]
    return Claim(
        "LoRA of Llama 2 70B without model parallelism",
        "8 GB200 train the adapters 2.5 times as fast as 8 H100 (announcements of MLPerf Training v5.0: 27.93 minutes "
        "in v4.1, 11.14 in v5.0): 70B fit into one GPU, so that tensor parallelism goes.",
        tuple(Compared(*pair) for pair in pairs),
        ("The factor is the product of a newer stack, the chip at the same plan, and the plan without tensor "
         f"parallelism; an H100 cannot take that last step ({alone.label}: {alone.verdict}).",),
    )  # fmt: skip


def four_bits() -> Claim:
    """FP4 against FP8."""

    def pair(words: str, row: Cells, low: str) -> tuple[Run, Run]:
        return run(f"{words}, {low}", changed(row, precision=low)), run(f"{words}, {row['precision']}", row)

    v50, v51 = big(GB200_512), big("tyche_ngpu512_ngc25.09_nemo", "v5.1")
    pairs = [
        (run("405B on 512 GB200, v5.0, fp8", v50), run("405B on 512 GB200, nvfp4", v51)),
        pair("405B on 512 GB200", v51, "fp8"),
        pair("405B on 512 GB300", big("theia_ngpu512_ngc25.09_nemo", "v5.1"), "fp8"),
        pair("8B on 8 GB200", entry("v5.1", "llama31_8b", "tyche_ngpu8_ngc25.09_nemo"), "fp8(tensorwise)+fp8attn"),
        pair("LoRA on 8 GB200", entry("v5.1", "llama2_70b_lora", "tyche_ngpu8_ngc25.09_nemo"), "fp8+fp8attn"),
    ]
    bridge = {"source": "Megatron-Bridge megatron_bridge_perf_archive.md", "release": "26.06 NeMo Container"}
    for system, low in (("DGX-GB200", "FP8"), ("DGX-GB300", "MXFP8")):
        wanted = {**bridge, "model": "LLAMA3.1_405B", "accelerator": system}
        both = [run(f"405B on 256 {system}, {p}", published(**wanted, precision=p)) for p in (low, "NVFP4")]
        pairs.append((both[0], both[1]))
    for name, benchmark, before, after in (
        ("8B on 8 B200", "llama31_8b", "1xBM.GPU.B200.8", "SR680aV3-8xB200_SXM_180GB"),
        ("8B on 8 B300", "llama31_8b", "AS-8126GS-NB3RT", "nebius_b300_n1"),
        ("LoRA on 8 B200", "llama2_70b_lora", "G894-AD1_pytorch", "nebius_b200_n1"),
    ):
        rows = [entry("v5.1", benchmark, system_id) for system_id in (before, after)]
        found = [run(f"{name}, {row['submitter']}, {row['precision']}", row) for row in rows]
        pairs.append((found[0], found[1]))
    return Claim(
        "FP4 against FP8",
        "NVFP4 training shortens the step of Llama 3.1 405B, Llama 3.1 8B and LoRA against FP8 (announcements of "
        "MLPerf Training v5.1). Pairs of submissions differ in more than the format; "
        "those of 8B disagree with each other.",
        tuple(Compared(before, after, THROUGHPUT) for before, after in pairs),
    )  # fmt: skip


def domains() -> Claim:
    """Scale-up domains of 4, 8 and 72."""
    row = big(GB200_512)
    b200 = run("405B on 512 B200-SXM", changed(row, accelerator=B200))
    of = {n: run(f"405B on 512 GB200, domain of {n}", row if n == 72 else changed(row), domain=n) for n in (4, 8, 72)}
    wide = changed(entry("v6.0", "llama31_8b", "tyche-hsg_ngpu1024_ngc26.04_nemo"), cuda_graph="full_iter")
    eights = [run(f"8B on 1,024 GB200, tp4 cp4, domain of {n}", wide, domain=n) for n in (8, 72)]
    narrow = run("8B on 1,024 GB200, tp8 cp2, domain of 8", changed(wide, TP="8", CP="2"), domain=8)
    lora = {"round": "v5.0", "benchmark": "llama2_70b_lora"}
    rows = [published(**lora, system_id=s) for s in ("nyx_n1_ngc25.04_nemo", "tyche_ngpu8_ngc25.04_nemo")]
    rows += [published(**lora, system_id=s) for s in ("8xBM.GPU.B200.8", "ARS-121GL-NBO_18")]
    names = ("LoRA on 8 B200, cp1", "LoRA on 8 GB200, cp1", "LoRA on 64 B200, cp8", "LoRA on 72 GB200, cp8")
    small, small2, large, large2 = (run(name, row) for name, row in zip(names, rows, strict=True))
    pairs = [
        (b200, of[72]),
        (of[8], of[72]),
        (of[4], of[72]),
        (eights[0], eights[1]),
        (narrow, eights[1]),
        (small, small2),
        (large, large2),
    ]
    return Claim(
        "A scale-up domain of 8 against one of 72",
        "The NVLink domain of 72 lets tensor, context and pipeline parallelism leave the network (announcements of "
        "MLPerf Training v5.0). Domains of 4 and 8 are GB200's own chips and rates in a smaller domain, which nobody "
        "sells. The published pairs of LoRA have context groups that a domain of 8 holds too: they tell the chip and "
        "the network between domains.",
        tuple(Compared(before, after, THROUGHPUT) for before, after in pairs),
        tuple(f"{r.label}: {lies(r)}." for r in (of[8], of[72], *eights, narrow)),
    )


GENERIC = "ngc25.04"
SWITCHES = {
    "copy engines": {"contention": 0.0},
    "prioritised": {"tp_overlap": 1.0, "dp_overlap": 1.0},
    "both": {"contention": 0.0, "tp_overlap": 1.0, "dp_overlap": 1.0},
}
"""Collectives -> what a stack file that has them would say in its table `constants`, in place of what is fitted."""


def collectives() -> Claim:
    """Copy-engine and prioritised collectives: what the stack file can say."""
    compared = []
    for words, row in (
        ("405B on 512 H100", big(H100_512)),
        ("405B on 512 GB200", big(GB200_512)),
        ("405B on 2,496 GB200", big(GB200_2496)),
        ("8B on 512 GB200", entry("v5.1", "llama31_8b", "tyche_ngpu512_ngc25.09_nemo")),
    ):
        plain = run(words, row)
        stack = plain.prediction.stack
        for name, values in SWITCHES.items():
            other = run(f"{words}, {name}", changed(row), stack=replace(stack, constants={**stack.constants, **values}))
            compared.append(Compared(plain, other, THROUGHPUT))
    told = "; ".join(f"{k}: {', '.join(f'{n} = {v:g}' for n, v in values.items())}" for k, values in SWITCHES.items())
    return Claim(
        "Copy-engine and prioritised collectives",
        "Collectives by copy engines leave the SMs to computing, and prioritised ones start when they can "
        "(announcements of MLPerf Training v6.0). The predictor has no model of either: below, constants of the stack "
        "file are set to what perfect ones would make of them: hidden communication costs computing nothing; all of "
        "the products' time, and of the first and last pass without a pipeline, can hide it.",
        tuple(compared),
        (f"As stack files: `like = \"{GENERIC}\"`, and in `[constants]`: {told}.",),
        caveat="Not validated: a sensitivity of the model, which no published run tests.",
    )  # fmt: skip


def experts() -> Claim:
    """Mixtures of experts."""
    return Claim(
        "Mixtures of experts: not predictable yet",
        "DeepSeek-V3 671B, MLPerf Training v6.0: 1,648 TFLOP/s per GPU on 256 GB300, 98.5 % of it kept at 1,024 "
        "(announcements of the round); 2.02 minutes on 8,192 GB300 (CoreWeave, CoreWeave_GB300_2048x4). The package "
        "has no workload with experts, so that none of the three is predicted.",
        caveat="Not predicted.",
    )


CLAIMS: tuple[Callable[[], Claim], ...] = (
    generations,
    scaling,
    order,
    graphs,
    adapters,
    four_bits,
    domains,
    collectives,
    experts,
)

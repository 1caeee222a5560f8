"""Contestant: Timetrial as a library, by whole searches and plan by plan, all in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from peers.predict_turn import Answer, run, timed, tries
from timetrial.config import Plan
from timetrial.predict import search as searches
from timetrial.predict.predict import predict
from timetrial.predict.request import request
from timetrial.predict.space import Space, question


def searched(asked: Answer) -> Answer:
    """A search of the plans that a peer can express, or of all."""
    space = Space(cp=(1,), vp=(1,), orders=Space().orders[:1]) if asked["same"] else Space()
    base = question(asked["row"])
    found: list[searches.Found] = []

    def price() -> Iterator[float]:
        found.append(searches.search(base, space, workers=1))
        yield found[0].ranked[0].seconds

    answer = timed(price)
    refused = sum(refusal.plans for refusal in found[0].refused)
    return answer | {"plans": found[0].tried - refused, "fits": found[0].fitting}


def each(asked: Answer) -> Answer:
    """Every plan on its own, its pipeline laid out."""
    base = question(asked["row"])
    plans = [replace(base.plan, **{name: plan[name] for name in FIELDS}) for plan in asked["plans"]]

    def price() -> Iterator[float]:
        for plan in plans:
            yield predict(replace(base, config=replace(base.config, plan=plan))).step.seconds

    return timed(price)


FIELDS = ("tp", "cp", "pp", "vp", "ep", "dp", "mbs", "gbs", "recompute", "zero", "order", "precision")
assert set(FIELDS) <= set(Plan.__dataclass_fields__)


def rows(asked: Answer) -> Answer:
    """Step times of published runs, under the package's constants."""
    return {"seconds": [predict(request(row["cells"])).step.seconds for row in asked["rows"]]}


def cannot(asked: Answer) -> Answer:
    """What it says to what it cannot express and a peer can."""
    row = asked["row"] | {"tp": "8", "pp": "8"}
    mixture = {"model": "Mixtral 8x7B", "accelerator": "H100", "accelerators": "64", "gbs": "64"}
    return {
        "said": tries(
            {
                "a mixture of experts": lambda: request(mixture),
                "GPT-3": lambda: request(row | {"benchmark": "gpt3"}),
                "A100": lambda: predict(request(row | {"accelerator": "A100"})).step.seconds,
            }
        )
    }


if __name__ == "__main__":
    run({"searched": searched, "each": each, "rows": rows, "cannot": cannot})

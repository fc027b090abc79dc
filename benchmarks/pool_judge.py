"""One call for a whole pool or one for each passage: what it costs, and how it bends verdicts.

    python -m benchmarks.pool_judge --samples 400

A local stand-in for a chat endpoint knows each passage's true chance. Asked about one passage it
says it; in a list it adds a bias by the place, which ``--bias`` sets for the first and, negative,
for the last. Both judges get the same samples. Printed are calls and cost for 1,000 samples, at
prices of 2 and 8 for a million tokens in and out (four characters a token), and the difference
of the shares that the two call relevant, by place, with intervals of 95% over samples.
"""

import argparse
import json
import math
import os
import random
import re
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ctxguard.core.types import Passage
from ctxguard.monitor.judges import LLMJudge, PoolJudge, TokenPrices
from ctxguard.retrieval.assessors import ModelAssessor

SUMMARY = "Compare a judge that is given whole pools with one that is given single passages."
_PRICES = TokenPrices(2.0, 8.0)
_POOL = 12
_TEXT = "A passage of about eighty words on its subject. " * 10
_THIRDS = ("first third", "middle third", "last third")


class Difference(NamedTuple):
    """A mean difference over samples, with its interval of 95%."""

    mean: float
    lower: float
    upper: float

    @classmethod
    def of(cls, by_sample: Sequence[float]) -> "Difference":
        half = 1.96 * stdev(by_sample) / math.sqrt(len(by_sample))
        mean = fmean(by_sample)
        return cls(mean, mean - half, mean + half)


class StandIn:
    """A chat endpoint on 127.0.0.1 that knows the chances of passages.

    Args:
        bias: Added to the chance of the first passage of a list; its negative to that of the last.
    """

    def __init__(self, bias: float) -> None:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = stand_in.answer(json.loads(body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._bias = bias
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: dict[str, Any]) -> str:
        """A completion, with the tokens of what was said."""
        said = "".join(message["content"] for message in request["messages"])
        chances = [int(one) for one in re.findall(r"chance (\d+)", said)]
        if "schema" in json.dumps(request) and "answers" in json.dumps(request["response_format"]):
            last = max(len(chances) - 1, 1)
            content = {
                "answers": [
                    {"passage": place + 1, "relevant": self._bent(chance, place / last)}
                    for place, chance in enumerate(chances)
                ]
            }
        else:
            content = {"grade": int(chances[0] >= 50)}  # type: ignore[dict-item]
        text = json.dumps(content)
        usage = {"prompt_tokens": len(said) // 4, "completion_tokens": len(text) // 4}
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        return json.dumps({"choices": [choice], "usage": usage})

    def _bent(self, chance: int, place: float) -> int:
        return min(max(round(chance + 100 * self._bias * (1.0 - 2.0 * place)), 0), 100)


def samples(n: int, rng: random.Random) -> list[list[Passage]]:
    """Pools of passages whose texts hold their chances."""
    return [
        [
            Passage(f"{number} {rank}", f"chance {round(100 * rng.betavariate(0.5, 0.7))} {_TEXT}")
            for rank in range(_POOL)
        ]
        for number in range(n)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(prog="benchmarks.pool_judge", description=SUMMARY)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--bias", type=float, default=0.08)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    os.environ["NO_PROXY"] = "127.0.0.1"
    pools = samples(options.samples, random.Random(options.seed))
    stand_in = StandIn(options.bias)
    single = LLMJudge("stand-in", base_url=stand_in.url, api_key="none", prices=_PRICES)
    pool = PoolJudge(
        ModelAssessor(
            "stand-in",
            questions=("relevant",),
            base_url=stand_in.url,
            api_key="none",
            prices=_PRICES,
        ),
        seed=options.seed,
    )
    by_third: list[list[float]] = [[], [], []]
    whole: list[float] = []
    for passages in pools:
        alone, together = single.judge("q", passages), pool.judge("q", passages)
        apart: list[list[float]] = [[], [], []]
        for one, other in zip(alone, together, strict=True):
            if one is not None and other is not None and other.place is not None:
                third = 3 * (other.place - 1) // _POOL
                apart[third].append(float(other.grade > 0) - float(one.grade > 0))
        whole.append(fmean(each for third in apart for each in third))
        for found, third_of_pool in zip(by_third, apart, strict=True):
            found.append(fmean(third_of_pool))
    console = Console(width=90, highlight=False)
    costs = Table(title=f"{options.samples} samples of {_POOL} passages", box=None)
    for name in ("judge", "calls per 1,000 samples", "cost per 1,000 samples"):
        costs.add_column(name, justify="left" if name == "judge" else "right")
    for name, ledger in (("one call a passage", single.ledger), ("one call a pool", pool.ledger)):
        accounts = ledger.accounts()
        scale = 1_000 / options.samples
        costs.add_row(name, f"{accounts.calls * scale:,.0f}", f"{(accounts.cost or 0) * scale:.2f}")
    console.print(costs)
    bias = Table(title="share called relevant: pool less single", box=None)
    for name in ("place", "difference", "95% interval"):
        bias.add_column(name, justify="left" if name == "place" else "right")
    for name, values in zip(("all", *_THIRDS), (whole, *by_third), strict=True):
        apart_by = Difference.of(values)
        ends = f"{apart_by.lower:+.3f} to {apart_by.upper:+.3f}"
        bias.add_row(name, f"{apart_by.mean:+.3f}", ends)
    console.print(bias)
    single.close()
    pool.close()
    stand_in.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``ctxguard query``: one question, what is kept for it, what is dropped, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ctxguard.cli._console import FINDING, Output, number, one_line, print_json, table
from ctxguard.cli._inputs import differences, open_index
from ctxguard.cli._words import FLAGS, REASONS, policy_in_words, threshold_in_words
from ctxguard.types import DEFAULT_DEPTH, DEFAULT_K, Mode, Route, Verdict

if TYPE_CHECKING:
    from ctxguard.context import Context
    from ctxguard.retrieval.hybrid import HybridRetriever

_DROPPED_SHOWN = 10
_SNIPPET_SHARE = 0.7
_COMPARED = {"r>": "relative_score", "P>": "probability"}


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("query")(query)


def query(
    question: Annotated[str, typer.Argument(help="The question as asked.", metavar="QUESTION")],
    *,
    index: Annotated[Path, typer.Option(help="Folder that `ctxguard index` wrote.")],
    profile: Annotated[Path | None, typer.Option(help="Calibrated profile.")] = None,
    k: Annotated[
        int, typer.Option("--k", "-k", min=1, help="Size of the context where no policy applies.")
    ] = DEFAULT_K,
    mode: Annotated[Mode, typer.Option(help="What becomes of the decision.")] = Mode.ENFORCE,
    route: Annotated[
        Route | None, typer.Option(help="The stages that answer. (default: all there are)")
    ] = None,
    reranker: Annotated[str | None, typer.Option(help="CrossEncoder, by name or folder.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show every dropped candidate.")] = False,
    as_text: Annotated[
        bool, typer.Option("--text", help="Print only the text for the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask one question and see what is kept, what is dropped, and why.

    Without a profile the retriever's first k are kept.
    """
    if as_text and as_json:
        raise typer.BadParameter("give --text or --json, not both", param_hint="--text")
    from ctxguard.guard import ContextGuard
    from ctxguard.profile import Profile

    output = Output(as_json=as_json or as_text)
    loaded = None if profile is None else Profile.load(profile)
    with output.doing("opening the index"):
        retriever = open_index(index, reranker)
        found = () if loaded is None else differences(loaded, retriever)
        guard = ContextGuard(
            retriever if route is None else retriever.on_route(route),
            profile=loaded,
            k=k,
            mode=mode,
            depth=max(k, DEFAULT_DEPTH if loaded is None else loaded.provenance.depth),
        )
    with output.doing("searching"):
        context = guard.retrieve(question)
    if as_json:
        print_json(context.to_dict())
    elif as_text:
        typer.echo(context.text)
    else:
        _print(context, retriever, output, show_all=show_all)
    if k > len(retriever):
        output.note(f"k = {k} is more than the {len(retriever)} passages of the index")
    for flag in context.flags:
        output.note(f"{flag.value}: {FLAGS[flag]}")
    for failure in context.failures:
        output.note(f"{failure.stage} failed: {failure.cause}")
    for line in found:
        output.err.print(Text(f"finding: the profile does not fit this index: {one_line(line)}"))
    if found:
        raise typer.Exit(FINDING)


def _print(
    context: "Context", retriever: "HybridRetriever", output: Output, *, show_all: bool
) -> None:
    kept = [verdict for verdict in context.verdicts if verdict.kept]
    dropped = [verdict for verdict in context.verdicts if not verdict.kept]
    shown = dropped if show_all else dropped[:_DROPPED_SHOWN]
    facts = [
        ("query", context.query),
        ("route", context.route.value),
        ("keeps", policy_in_words(context.decision.policy)),
        ("kept", f"{len(kept)} of {context.candidates} candidates"),
    ]
    if context.mode is not Mode.ENFORCE:
        served = f"the model is handed the retriever's first {len(context)} instead"
        facts.append(("mode", f"{context.mode.value}: {served}"))
    output.facts(facts)
    made = table("#>", "score>", *_comparison(context), "verdict", "passage")
    length = int(_SNIPPET_SHARE * output.out.width)
    for rows in (kept, shown):
        for verdict in rows:
            passage = retriever.passage(verdict.passage_id)
            about = Text(one_line(verdict.passage_id), style="bold" if verdict.kept else "")
            snippet = _shortened(passage.title or passage.text, length)
            about.append(f"  {snippet}", style="not bold dim")
            made.add_row(
                "" if verdict.rank is None else str(verdict.rank),
                number(verdict.score),
                *[number(getattr(verdict, _COMPARED[name])) for name in _comparison(context)],
                _verdict(verdict),
                about,
                end_section=rows is kept and verdict is kept[-1],
            )
    output.out.print(made)
    if len(shown) < len(dropped):
        output.out.print(f"{len(dropped) - len(shown)} more dropped; --all shows them")


def _comparison(context: "Context") -> tuple[str, ...]:
    """What candidates were compared by; nothing where the scores carry rank only."""
    verdicts = context.verdicts
    return tuple(
        [name for name, field in _COMPARED.items() if any(getattr(v, field) for v in verdicts)][-1:]
    )


def _verdict(verdict: Verdict) -> Text:
    if verdict.reason is None:
        return Text("kept", style="bold green")
    words = Text("dropped: ", style="red").append(REASONS[verdict.reason])
    if verdict.kept_if:
        settings = " and ".join(threshold_in_words(threshold) for threshold in verdict.kept_if)
        words.append(f"; kept if {settings}", style="dim")
    return words


def _shortened(text: str, length: int) -> str:
    text = one_line(text)
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"

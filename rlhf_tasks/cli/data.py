"""`rlhf data PATH`: what a data set is read as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from typer import Argument, Option

from rlhf_tasks import config, console
from rlhf_tasks.errors import UserError


def data(
    path: str = Argument(..., metavar="PATH", help="a file or folder of data, or a set of the hub"),
    all_rows: bool = Option(False, "--all", help="read all rows, and not a sample: exact counts"),
    out: Path | None = Option(None, "--write", metavar="OUT", help="write the rows into OUT"),
) -> int:
    """Show how a file, folder or hub set is read, from a sample: roles, columns, tokens and lengths.

    The section `data` of params.yaml decides, and the tokenizer is the base model's; for a model from
    scratch, which has none yet, words stand for tokens. Nothing is changed.
    """
    from rlhf_tasks.data import tokenizer
    from rlhf_tasks.data.readers import preview
    from rlhf_tasks.project.imports import load_function

    params = Path("params.yaml")
    settings = config.load(params) if params.exists() else config.Config()
    own = None
    if settings.data.format is not None and ":" in settings.data.format:
        own = load_function(settings.data.format, "data.format", Path())
    rendering, split = tokenizer.scratch_rendering(), preview.words
    if settings.model.base != "scratch":
        model = tokenizer.load_base(settings.model, settings.data)
        rendering = tokenizer.ready_rendering(model, settings.model.base)
        rendering = replace(rendering, train_on=settings.sft.train_on)

        def split(prompt: str, response: str) -> tuple[Sequence[str], Sequence[str]]:
            queries, responses, _ = tokenizer.continue_prompts(model, [prompt], [response])
            first, second = (
                [str(model.decode([token])) for token in ids] for ids in (queries[0], responses[0])
            )
            return first, second

    if config.is_hub_id(path) and (all_rows or out is not None):
        raise UserError(f"--all and --write read files; fetch {path} into a folder first, and give that")
    whole = all_rows or out is not None
    corpus = preview.show(Path(path), settings.data, rendering, split, own, whole=whole)
    if out is not None:
        preview.write(corpus, out)
        if rendering.chat is not None:
            console.say(
                f"its texts are as {settings.model.base} reads them: another model, or data.chat: always, "
                "would have them in its template once more"
            )
    return 0

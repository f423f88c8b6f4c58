"""Purposes of texts: queries or documents, and the prompts and tasks of models for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from whimbrel.types.card import Card
from whimbrel.types.request import InputType


def side_of(card: Card, input_type: InputType | None) -> InputType | None:
    """Return the input type of texts whose side a body may leave out: documents, if the model has a format for these."""
    return "document" if input_type is None and "document" in card.text_formats else input_type


SIDES: Final[Mapping[str, InputType]] = {"query": "query", "passage": "document"}
"""Input types of tasks that end in a dot and a key."""


def prompt_for_task(card: Card, word: str | None, input_type: InputType | None) -> dict[str, Any]:
    """Return the input type, and the model's prompt or task named `word`, if it has one, as fields of a Request.

    Case is ignored, and a task may be followed by a dot and one of SIDES. The field `adapter` is there for a task only.
    """
    tower, sought = card.tower(card.tower_for(input_type)), (word or "").casefold()
    prompts = {} if word is None else {name.casefold(): name for name in tower.prompts}
    stem, _, side = sought.rpartition(".")
    tasks = {name.casefold(): name for name in tower.tasks}
    task = tasks.get(stem if side in SIDES else sought)
    return {"prompt_name": prompts.get(sought), "input_type": input_type, **({"adapter": task} if task else {})}

"""Models under evaluation: an engine of this process for each dtype, or a server.

Both have the same verbs. A server has a dtype of its own, and may be away for some minutes. A server of another API does not
say which vectors its model has, so they count as dense, compared by cosine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from whimbrel.errors import SetupError
from whimbrel.outputs.requested import SIMILARITIES

if TYPE_CHECKING:
    from whimbrel.client import Client
    from whimbrel.client.client_verbs import DialectName
    from whimbrel.engine.engine import Engine
    from whimbrel.types.card import Card

    Source: TypeAlias = "Engine | Client"


_MAX_RETRIES: Final = 25
"""Retries of a server that has answered before: about three minutes."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that answers, and what the evaluation has to know of it."""

    name: str
    source: Source
    similarities: Mapping[str, str]
    """Similarity of each output that can be searched, the main one first."""
    ranks: bool
    """True if it judges pairs itself."""
    about: str
    """Name, dtype, device and revision in words."""
    has_roles: bool = True
    """False if its API does not say which texts are queries and which are documents."""

    def choose(self, output: str | None) -> str:
        """Return the output to search by. Raises SetupError for one that the model does not give."""
        if self.ranks and output is None:
            return "scores"
        given = [*self.similarities, *(["scores"] if self.ranks else [])]
        if output is not None and output not in given:
            raise SetupError(
                f"{self.name} gives no {output!r}; it gives: {', '.join(given) or 'nothing that can be searched'}."
            )
        if not given:
            raise SetupError(f"{self.name} gives neither vectors nor scores of pairs, so it finds no documents.")
        return output or given[0]


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def short_name(name: str | None) -> str:
    """Return the name of a model for a table: the last part of its path or hub id; of a server all."""
    if name is None:
        return "all-MiniLM-L6-v2"
    return name if is_url(name) else name.rstrip("/").rpartition("/")[2]


@contextmanager
def open_model(
    name: str | None,
    dtype: str | None,
    arguments: Mapping[str, Any],
    *,
    dialect: DialectName = "whimbrel",
    api_key: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Generator[Model]:
    """Load a model, or connect to the server whose URL it is; `URL#NAME` is one of several there. Raises WhimbrelError.

    `arguments` are those of Engine, without a dtype.
    """
    if name is not None and is_url(name):
        if dtype is not None:
            raise SetupError(
                f"{name} is a server, whose dtype is its own.", hint=f"leave {dtype} out, or name the model itself"
            )
        with _connected(name, dialect, api_key) as model:
            yield model
        return
    from whimbrel.engine.engine import Engine

    own: dict[str, Any] = dict(arguments) | ({} if dtype is None else {"dtype": dtype})
    with Engine(name, progress=tell, max_queue_tokens=2**31, max_request_tokens=2**31, **own) as engine:
        plan, card = engine.plan, engine.card
        about = f"{card.name}, {plan.dtype} on {plan.device}, revision {plan.revision or 'unknown'}"
        yield Model(short_name(card.name), engine, similarities_of(card), card.judges_pairs, about)


def similarities_of(card: Card) -> dict[str, str]:
    """Return the similarity of each output of a model that can be searched, the main one first."""
    return _similarities({name: output.similarity for name, output in card.outputs.items()}, card.similarity)


def _similarities(outputs: Mapping[str, str | None], stated: str | None) -> dict[str, str]:
    """Return the similarity of each output, as pairs are scored: `outputs/pair_scoring.py` says the same of one."""
    known = cast("Mapping[str, Sequence[str]]", SIMILARITIES)
    return {
        name: stated if stated is not None and stated in known[name] else own or known[name][0]
        for name, own in outputs.items()
        if name in known
    }


@contextmanager
def _connected(place: str, dialect: DialectName, api_key: str | None) -> Generator[Model]:
    from whimbrel.client import Client

    url, _, name = place.partition("#")
    with Client(url, model=name or None, dialect=dialect, api_key=api_key, max_retries=_MAX_RETRIES, progress=False) as client:
        if dialect != "whimbrel":
            has_roles = dialect == "cohere"
            about = f"{url}, {dialect}{'' if has_roles else ', which is not told which texts are queries'}"
            yield Model(place, client, {"dense": "cosine"}, False, about, has_roles)
            return
        card, plan = _served(client, url, name)
        outputs = {each: output.get("similarity") for each, output in card["outputs"].items()}
        pairs = bool(card.get("template") or card.get("list_template") or len(card.get("labels", ())) <= 1)
        about = (
            f"{plan['served_name']} at {url}, {plan['dtype']} on {plan['device']}, revision {plan.get('revision') or 'unknown'}"
        )
        similarities = _similarities(outputs, card.get("similarity"))
        yield Model(place if name else plan["served_name"], client, similarities, "scores" in outputs and pairs, about)
        now = _served(client, url, name)[1]
        if changed := [each for each in ("served_name", "revision", "dtype", "max_length") if now.get(each) != plan.get(each)]:
            words = ", ".join(f"{each} was {plan.get(each)}, is {now.get(each)}" for each in changed)
            raise SetupError(f"the model of {url} changed meanwhile: {words}.", hint="evaluate again")


def _served(client: Client, url: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the card and the plan of a server's model. Raises WhimbrelError."""
    served = cast("list[dict[str, Any]]", client.info().get("models", []))
    found = next((each for each in served if not name or name in _names(each)), None)
    if found is None:
        names = ", ".join(name for each in served for name in _names(each)) or "none"
        raise SetupError(f"{url} has no model {name!r}; it has: {names}.", hint="name one of several as URL#NAME")
    return found["card"], found["plan"]


def _names(model: Mapping[str, Any]) -> list[str]:
    plan = model["plan"]
    return [plan["served_name"], *plan["aliases"]]

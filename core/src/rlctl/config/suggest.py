"""Did you mean: from a key that does not exist to the one that was meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from rlctl.config.document import Loc, dotted
from rlctl.config.foreign import our_path
from rlctl.config.schema_paths import EngineModels, keys_at, walk


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate closest to ``word`` (case and ``-``/``_`` do not count), or None when none is near."""
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    match = get_close_matches(word.lower().replace("-", "_")[:100], folded, n=1, cutoff=cutoff)
    return folded[match[0]] if match else None


def for_key(section: Loc, key: str, engines: EngineModels | None = None) -> tuple[str, list[str]]:
    """A hint for an unknown ``key`` of ``section``, and the dotted paths that it names."""
    here = keys_at(section, engines)
    close = nearest(key, here, 0.75)
    paths = [loc for loc, _ in walk(engines=engines)]
    foreign = our_path(key, section)
    if foreign:
        path, remark = foreign
        return f"in rlctl this is {path}" + (f" ({remark})" if remark else ""), [path]
    if close:
        path = dotted((*section, close))
        return f"did you mean {path}?", [path]
    same = _by_distance(section, [loc for loc in paths if loc[-1] == key])
    if same:
        return f"did you mean {_either(same)}?", same
    close = nearest(key, here)
    if close:
        path = dotted((*section, close))
        return f"did you mean {path}?", [path]
    near_leaf = nearest(key, {str(loc[-1]) for loc in paths}, 0.8)
    if near_leaf:
        places = _by_distance(section, [loc for loc in paths if loc[-1] == near_leaf])
        return f"did you mean {_either(places)}?", places
    if not here:
        return "remove it", []
    shown = ", ".join(here[:12]) + (", ..." if len(here) > 12 else "")
    return f"keys of {dotted(section) or 'the file'}: {shown}", []


def for_choice(value: object, choices: Sequence[str]) -> str:
    """A hint for a word out of a closed set."""
    close = nearest(str(value), choices) if isinstance(value, str) else None
    return f"did you mean {close}?" if close else ""


def _by_distance(section: Loc, places: list[Loc]) -> list[str]:
    """Places of one key name, those that share the section's head first, then the actor's, then the shallowest."""
    ranked = sorted(places, key=lambda loc: (loc[:1] != section[:1], loc[0] != "actor", len(loc)))
    return [dotted(loc) for loc in ranked[:2]]


def _either(paths: list[str]) -> str:
    return " or ".join(paths)

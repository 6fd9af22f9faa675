"""From a name in the configuration to a function: a built-in one, a plugin's, or the user's own. Imports no torch.

A user's function is named ``path/to/file.py:function`` or ``module:function``. A loss runs in every rank, which reads the file
itself: what travels is its path and the digest of its text, never code.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlctl.algorithms.table import ADVANTAGES, COSTLY, POLICY_LOSSES
from rlctl.config.suggest import nearest
from rlctl.errors import AlgorithmError
from rlctl.named_records import CORE, is_own, known_records, unknown
from rlctl.records import AlgorithmKind, AlgorithmSpec

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet

BUILTIN: Mapping[AlgorithmKind, Mapping[str, AlgorithmSpec]] = {
    AlgorithmKind.ADVANTAGE: ADVANTAGES,
    AlgorithmKind.POLICY_LOSS: POLICY_LOSSES,
}
KEYS: Mapping[AlgorithmKind, str] = {
    AlgorithmKind.ADVANTAGE: "algorithm.adv_estimator",
    AlgorithmKind.POLICY_LOSS: "actor.policy_loss.loss_mode",
}
"""Where each kind is named."""

ELSEWHERE: Mapping[str, str] = {
    "ppo": "algorithm.adv_estimator=gae (PPO with a critic), under actor.policy_loss.loss_mode=vanilla",
    "gspo": "actor.policy_loss.loss_mode=gspo, with algorithm.adv_estimator=grpo",
    "cispo": "actor.policy_loss.loss_mode=cispo, with algorithm.adv_estimator=grpo",
    "dapo": "grpo with actor.policy_loss.clip_ratio_high=0.28, algorithm.filter_groups and reward.overlong_buffer",
    "sft": "trainer.type=sft",
    "reinforce": "algorithm.adv_estimator=reinforce_plus_plus",
    "reinforce++": "algorithm.adv_estimator=reinforce_plus_plus",
    "drgrpo": "algorithm.adv_estimator=dr_grpo",
}
"""What the field calls an algorithm that is one or more settings here, by its name in lower case without - and _."""


def elsewhere(name: str) -> str | None:
    """The settings that an algorithm of this name means here; None where that is not known."""
    return ELSEWHERE.get(name.lower().replace("-", "").replace("_", ""))


WORDS: Mapping[AlgorithmKind, str] = {
    AlgorithmKind.ADVANTAGE: "advantage estimator",
    AlgorithmKind.POLICY_LOSS: "policy loss",
}
OWN = "path/to/file.py:function"


@dataclass(frozen=True)
class Algorithm:
    """A formula that is known to exist; it travels to the ranks as it stands.

    Args:
        spec: its record; of a user's function one made from the signature.
        dist: who brings it, for messages; empty: the user.
        digest: SHA-256 of the user's file, else empty.
    """

    spec: AlgorithmSpec
    dist: str = CORE
    digest: str = ""

    @property
    def label(self) -> str:
        """``policy loss 'gspo'``, for messages."""
        return f"{WORDS[self.spec.kind]} {self.spec.name!r}"

    def function(self) -> Callable[..., Any]:
        """Import it (once in a process).

        Raises:
            AlgorithmError: it does not load, or a user's file is another one here.
        """
        return _function(self)

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Its arguments by name."""
        return _parameters(self)

    def takes(self, name: str) -> bool:
        """True when its signature names this input."""
        return name in self.parameters()

    @property
    def chooser(self) -> Algorithm | None:
        """What chooses among the tokens of a mini-batch before it is split, or None."""
        if not self.spec.prepare:
            return None
        return Algorithm(AlgorithmSpec(self.spec.name, self.spec.kind, self.spec.prepare), self.dist)

    def call(self, offered: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
        """Call it with those of ``offered`` that it names, and ``settings``.

        Raises:
            AlgorithmError: it needs what is not offered, or a function that is not rlctl's own raises.
        """
        parameters = self.parameters()
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = [] if open_ended else [name for name in settings if name not in parameters]
        missing = [
            name
            for name, p in parameters.items()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            if name not in offered and name not in settings
        ]
        if unknown or missing:
            raise AlgorithmError(
                f"the {self.label} cannot be called",
                found=" and ".join(
                    [f"it needs {', '.join(missing)}"] * bool(missing)
                    + [f"it does not take {', '.join(unknown)}"] * bool(unknown)
                ),
                wanted=f"arguments among {', '.join(sorted(offered))}, and its own args",
                next=f"rename the arguments of {self.spec.target}, or give them defaults",
            )
        arguments = {name: offered[name] for name in parameters if name in offered and name not in settings}
        if self.dist == CORE:
            return self.function()(**arguments, **settings)
        try:
            return self.function()(**arguments, **settings)
        except Exception as error:  # a user's or a plugin's code: its reader mends it there, not in rlctl
            raise AlgorithmError(
                f"the {self.label} failed",
                found=f"{type(error).__name__}: {error}{_place(error, self.spec.target)}",
                next=f"correct {self.spec.target}",
            ) from error


def builtin(kind: AlgorithmKind, name: str) -> Algorithm:
    """One of rlctl's own.

    Raises:
        KeyError: there is none of this name.
    """
    return Algorithm(BUILTIN[kind][name])


def find(kind: AlgorithmKind, name: str, plugins: PluginSet | None) -> Algorithm:
    """The algorithm that ``name`` stands for. A plugin's or a user's is imported, so that its faults show now.

    Args:
        name: a built-in name, a plugin's, ``/path/to/file.py:function`` or ``module:function``.

    Raises:
        ConfigError: there is none of this name, or two distributions claim it.
        AlgorithmError: it does not load.
    """
    if is_own(name):
        return _own(kind, name)
    known = known_algorithms(kind, plugins)
    if name not in known:
        default = next(iter(BUILTIN[kind]))
        raise unknown(name, known, words=WORDS[kind], own=OWN, key=KEYS[kind], default=default)
    dist, spec = known[name]
    found = Algorithm(spec, dist)
    if dist != CORE:
        found.parameters()
    return found


def known_algorithms(kind: AlgorithmKind, plugins: PluginSet | None) -> dict[str, tuple[str, AlgorithmSpec]]:
    """Every named algorithm of a kind with the dist that brings it.

    Raises:
        ConfigError: two dists claim one name.
    """
    return known_records("rlctl_algorithms", WORDS[kind], BUILTIN[kind], plugins, lambda spec: spec.kind == kind)


def _own(kind: AlgorithmKind, name: str) -> Algorithm:
    target, _, function = name.rpartition(":")
    if not target or not function.isidentifier():
        raise AlgorithmError(
            f"the {WORDS[kind]} {name!r} is named without a function",
            wanted="path/to/file.py:function, or module:function",
            next=f"{KEYS[kind]}={name.partition(':')[0]}:FUNCTION",
        )
    digest = _digest(Path(target)) if target.endswith(".py") else ""
    bare = Algorithm(AlgorithmSpec(name, kind, name), "", digest)
    needs = tuple(n for n in COSTLY if bare.takes(n)) if kind is AlgorithmKind.ADVANTAGE else ()
    return Algorithm(AlgorithmSpec(name, kind, name, needs=needs, per_token=True), "", digest)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise AlgorithmError(
            f"the file {path} cannot be read",
            found=error.strerror or type(error).__name__,
            wanted="the file of the user's algorithm, under the same path on every host",
            next=f"put it there: {path}",
        ) from None


@cache
def _function(algorithm: Algorithm) -> Callable[..., Any]:
    target, _, name = algorithm.spec.target.rpartition(":")
    label = algorithm.label
    try:
        module = _file_module(Path(target), algorithm.digest) if algorithm.digest else importlib.import_module(target)
    except AlgorithmError:
        raise
    except Exception as error:  # a module of a plugin or of the user may raise anything when it is imported
        raise AlgorithmError(
            f"the {label} does not load",
            found=f"{type(error).__name__}: {error}{_place(error, target)}",
            wanted=algorithm.spec.target,
            next=f"correct {target}" if not algorithm.dist else f"pip install --upgrade {algorithm.dist}",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        near = nearest(name, own)
        raise AlgorithmError(
            f"{target} has no function {name!r}",
            found=", ".join(own) or "no function at all",
            wanted=f"did you mean {near!r}?" if near else "the function of " + label,
            next=f"{KEYS[algorithm.spec.kind]}={target}:{near or (own[0] if own else 'FUNCTION')}",
        )
    return function


@cache
def _parameters(algorithm: Algorithm) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(algorithm.function()).parameters


def _file_module(path: Path, digest: str) -> ModuleType:
    found = _digest(path)
    if found != digest:
        raise AlgorithmError(
            f"the file {path} is not the one that the run began with",
            found=f"SHA-256 {found[:12]}",
            wanted=f"SHA-256 {digest[:12]}, as in the process that started the run",
            next="copy it to every host, and do not edit it while a run uses it",
        )
    # Of the path too: equal files beside other neighbours are other modules.
    name = f"rlctl_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    # The file may import its neighbours.
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _place(error: BaseException, target: str) -> str:
    """`` (line 12)``: the last line of the user's own file in the traceback."""
    file, lines = target.rpartition(":")[0] or target, []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename == file and error.lineno:
        lines.append(error.lineno)
    return f" (line {lines[-1]})" if lines else ""

"""Names of rewards to builders: a plain table, and what plugins declare through ``rlctl_rewards``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rlctl.config.schema_paths import describe, wanted
from rlctl.config.schema_reward import is_user_function
from rlctl.data.faults import listing, nearest
from rlctl.data.rewards.base import Reward, RewardContext
from rlctl.errors import ConfigError, RlctlError
from rlctl.named_records import known_records, unknown
from rlctl.records import RewardSpec

if TYPE_CHECKING:
    from rlctl.config.schema import RewardComponent
    from rlctl.plugins import PluginSet

BUILTIN: Mapping[str, RewardSpec] = {
    spec.name: spec
    for spec in (
        RewardSpec("exact_match", "rlctl.data.rewards.text:exact_match", "the completion is the answer"),
        RewardSpec("contains", "rlctl.data.rewards.text:contains", "the completion contains the answer"),
        RewardSpec("regex", "rlctl.data.rewards.text:regex", "a pattern is found, or its group is the answer"),
        RewardSpec("format", "rlctl.data.rewards.text:format_reward", "all of it matches a pattern, or has tags"),
        RewardSpec("length", "rlctl.data.rewards.text:length", "near a target length, or a penalty over a limit"),
        RewardSpec("number", "rlctl.data.rewards.number:number", "the last number is the answer"),
        RewardSpec("math", "rlctl.data.rewards.math:math", "equal by math-verify"),
        RewardSpec("model", "rlctl.data.rewards.model:model", "what a trained reward model says"),
        RewardSpec("environment", "rlctl.data.rewards.environment:environment", "the sum of a conversation's turns"),
        RewardSpec("reasoning_gym", "rlctl.data.rewards.gym:reasoning_gym", "the task's own scorer"),
    )
}


def known_rewards(plugins: PluginSet | None) -> dict[str, tuple[str, RewardSpec]]:
    """Every named reward with the dist that brings it.

    Raises:
        ConfigError: two dists claim one name.
    """
    return known_records("rlctl_rewards", "reward", BUILTIN, plugins)


def build_component(
    component: RewardComponent, place: str, context: RewardContext, plugins: PluginSet | None
) -> Reward:
    """Build one component. ``place`` is its path in the configuration, for messages.

    Raises:
        ConfigError: the name or an argument is unknown, or the builder refuses its arguments.
        DataError: a user's function cannot be loaded.
    """
    if is_user_function(component.name):
        from rlctl.data.rewards.user import user_function

        return user_function(component.name, component.args, context)
    known = known_rewards(plugins)
    if component.name not in known:
        own, key = "path/to/file.py:function", f"{place}.name"
        raise unknown(component.name, known, words="reward", own=own, key=key, default="exact_match")
    dist, spec = known[component.name]
    builder = _load(dist, spec)
    parameters = inspect.signature(builder).parameters
    args = dict(component.args)
    _check_args(component.name, args, parameters, place)
    if spec is BUILTIN.get(component.name):
        _check_types(component.name, args, builder, place)
    if "context" in parameters:
        args["context"] = context
    try:
        reward = builder(**args)
    except RlctlError as error:
        error.details = (f"at {place}", *error.details)
        raise
    except Exception as error:  # a plugin's builder, or a wrong type of an argument from the configuration
        raise ConfigError(
            f"the reward {component.name!r} of {dist} refuses its settings",
            found=f"{type(error).__name__}: {error}",
            wanted=f"{component.name}{inspect.signature(builder)}",
            next=f"change {place}.args",
        ) from error
    return reward


def _check_types(name: str, args: Mapping[str, Any], builder: Callable[..., Any], place: str) -> None:
    """Each argument is of the type that the builder writes: `no` for a boolean would be true, and text a list of letters."""
    hints = get_type_hints(builder)
    for key, value in args.items():
        try:
            TypeAdapter(hints[key]).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(
                f"the argument {key} of the reward {name!r} has a wrong type",
                found=f"{place}.args.{key} is {describe(value)}",
                wanted=wanted(hints[key]),
                next=f"change {place}.args.{key}",
            ) from error


def _load(dist: str, spec: RewardSpec) -> Callable[..., Any]:
    module, _, attribute = spec.target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a plugin's module may raise anything when it is imported
        raise ConfigError(
            f"the reward {spec.name!r} of {dist} does not load",
            found=f"{type(error).__name__}: {error}",
            wanted=spec.target,
            next=f"rlctl doctor, or pip install --upgrade {dist}",
        ) from error


def _check_args(name: str, args: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], place: str) -> None:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    accepted = {key: parameter for key, parameter in parameters.items() if key != "context"}
    for key in args:
        if key not in accepted:
            near = nearest(key, accepted)
            raise ConfigError(
                f"the reward {name!r} has no argument {key!r}",
                found=f"{place}.args.{key}",
                wanted=listing(accepted) if accepted else "no arguments",
                next=f"rename it to {near}" if near else f"remove {place}.args.{key}",
            )
    missing = [key for key, parameter in accepted.items() if parameter.default is parameter.empty and key not in args]
    if missing:
        raise ConfigError(f"the reward {name!r} needs {listing(missing)}", next=f"{place}.args.{missing[0]}=VALUE")

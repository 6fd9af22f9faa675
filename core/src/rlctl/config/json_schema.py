"""The JSON schema of a run's YAML file, with the ``engine`` sections of the backends that were chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlctl.config.engine_sections import ROLE_KINDS, config_model, find_backend
from rlctl.config.engines import FOLLOWERS
from rlctl.config.schema import RunConfig
from rlctl.records import BackendKind

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet

_SECTIONS = {
    "actor": "ActorConfig",
    "ref": "RefConfig",
    "critic": "CriticConfig",
    "teacher": "TeacherConfig",
    "rollout": "RolloutConfig",
}


def json_schema(plugins: PluginSet, backend: str | None = None, rollout: str | None = None) -> dict[str, Any]:
    """The schema (draft 2020-12), as editors read it.

    Args:
        plugins: the installed plugins.
        backend: fill in the engine section of this training backend (actor and ref), or of this rollout backend.
        rollout: fill in the engine section of this rollout backend.

    Raises:
        BackendUnavailableError: no such backend is installed.
    """
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "rlctl run"
    kinds = {BackendKind.TRAIN: backend, BackendKind.ROLLOUT: rollout}
    trains = backend is None or find_backend(plugins, backend, BackendKind.TRAIN) is not None
    if not trains and backend is not None and find_backend(plugins, backend, BackendKind.ROLLOUT) is not None:
        kinds = {BackendKind.TRAIN: None, BackendKind.ROLLOUT: rollout or backend}
    for role, (kind, *_) in ROLE_KINDS.items():
        name = kinds[kind]
        if name is not None:
            _fill_in(schema, role, name, kind, plugins)
    return schema


def _fill_in(schema: dict[str, Any], role: str, name: str, kind: BackendKind, plugins: PluginSet) -> None:
    from rlctl.registry import require_backend

    spec = require_backend(name, kind, plugins)[0].spec
    model = config_model(spec)
    engine = model.model_json_schema(ref_template="#/$defs/{model}")
    definitions = schema["$defs"]
    for key, value in engine.pop("$defs", {}).items():
        definitions.setdefault(key, value)
    definitions[model.__name__] = engine
    properties = definitions[_SECTIONS[role]]["properties"]
    properties["engine"] = {"$ref": f"#/$defs/{model.__name__}", "description": f"Settings of the {spec.name} backend."}
    properties["backend"] = {**properties["backend"], "enum": sorted({spec.name, *spec.aliases})}
    if role not in FOLLOWERS:
        properties["backend"]["default"] = spec.name

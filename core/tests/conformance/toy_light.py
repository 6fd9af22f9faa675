"""The light side of the toy backends that the conformance suite is tried on: records, of the standard library and rlctl alone."""

from __future__ import annotations

from rlctl.records import BackendKind, BackendSpec, ModelType


def spec(kind: BackendKind, engine: str, config: str = "toy_config:ToyConfig") -> BackendSpec:
    """The record of one toy."""
    return BackendSpec(
        name="toy",
        kind=kind,
        engine=engine,
        config=config,
        api_version=(1, 0),
        model_types=(ModelType.LANGUAGE_MODEL,),
        devices=(("cpu", None),),
        capabilities=(),
        requirements=("torch>=2",),
        imports=("torch",),
        install_hint="pip install toy",
    )

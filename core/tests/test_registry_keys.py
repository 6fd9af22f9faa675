"""Which engine answers a key, what an error lists, and stage 4 in this process."""

from __future__ import annotations

import pytest

from rlctl.causes import Cause
from rlctl.discovery import Candidate
from rlctl.doctor import run_doctor
from rlctl.errors import BackendUnavailableError, EngineError, RlctlError
from rlctl.plugins import BackendRecord, PluginEntry, PluginSet, Stage, load_plugins
from rlctl.records import API_VERSION, BackendKind, BackendSpec, CheckStatus, ModelType
from rlctl.registry import create_engine, fallback_order, require_backend, require_device, resolve_backend


def spec(name: str, *devices: tuple[str, str | None], **more) -> BackendSpec:
    fields = {
        "kind": BackendKind.TRAIN,
        "engine": "m:E",
        "config": "m:C",
        "api_version": API_VERSION,
        "model_types": (ModelType.LANGUAGE_MODEL,),
        "devices": devices or (("cpu", None),),
        "capabilities": (),
        "requirements": (),
        "imports": (),
        "install_hint": f"pip install {name}",
        **more,
    }
    return BackendSpec(name=name, **fields)


def entry(dist: str, *specs: BackendSpec, status=CheckStatus.OK, **more) -> PluginEntry:
    return PluginEntry(dist, dist, "1.0", f"{dist}_light", Stage.COMPATIBLE, status, backends=specs, **more)


def resolve(plugins: PluginSet, name: str, device: str, vendor: str | None, notice=None, **more) -> str:
    key = {"kind": "train", "model_type": "language_model", **more}
    return resolve_backend(plugins, name, key["kind"], key["model_type"], device, vendor, notice).dist


def test_the_exact_vendor_wins_then_the_device_then_nvidia():
    plugins = PluginSet(
        [
            entry("any", spec("fake", ("cuda", None))),
            entry("green", spec("fake", ("cuda", "nvidia"))),
            entry("moon", spec("fake", ("cuda", "moonchip"))),
        ]
    )
    assert resolve(plugins, "fake", "cuda", "moonchip") == "moon"
    assert resolve(plugins, "fake", "cuda", "nvidia") == "green"
    assert resolve(plugins, "fake", "cuda", "marschip") == "any"


def test_a_cuda_like_vendor_falls_back_to_nvidia_and_is_told():
    plugins = PluginSet([entry("green", spec("fake", ("cuda", "nvidia")))])
    said: list[str] = []
    assert resolve(plugins, "fake", "cuda", "marschip", said.append) == "green"
    assert said == ["fake has no engine of its own for cuda/marschip; taking the one for cuda/nvidia"]
    said.clear()
    assert resolve(plugins, "fake", "cuda", "nvidia", said.append) == "green"
    assert said == []


def test_npu_never_falls_back_to_nvidia():
    plugins = PluginSet([entry("green", spec("fake", ("cuda", "nvidia"), ("npu", "nvidia")))])
    assert fallback_order("npu", "huawei") == (("npu", "huawei"), ("npu", None))
    with pytest.raises(BackendUnavailableError, match="no engine for npu/huawei"):
        resolve(plugins, "fake", "npu", "huawei")


def test_two_dists_may_share_a_name_on_different_devices():
    plugins = PluginSet(
        [entry("mega", spec("megatron", ("cuda", "nvidia"))), entry("speed", spec("megatron", ("npu", "huawei")))]
    )
    assert resolve(plugins, "megatron", "cuda", "nvidia") == "mega"
    assert resolve(plugins, "megatron", "npu", "huawei") == "speed"


def test_a_device_without_engine_names_what_is_there_and_who_else_answers():
    plugins = PluginSet([entry("a", spec("one", ("cpu", None))), entry("b", spec("two", ("npu", None)))])
    with pytest.raises(BackendUnavailableError) as caught:
        resolve(plugins, "one", "npu", "huawei")
    assert caught.value.found == "it answers cpu"
    assert caught.value.wanted == "npu/huawei"
    assert caught.value.next == "--backend two"


def test_a_head_without_engine_is_refused_by_name():
    plugins = PluginSet([entry("a", spec("one"))])
    with pytest.raises(BackendUnavailableError, match="no engine for a value_model"):
        resolve(plugins, "one", "cpu", None, model_type="value_model")


def test_alias_reaches_its_backend_with_one_line():
    plugins = PluginSet([entry("a", spec("fsdp2", aliases=("fsdp",)))])
    said: list[str] = []
    assert resolve(plugins, "fsdp", "cpu", None, said.append) == "a"
    assert said == ["fsdp is an alias of fsdp2"]


def test_a_real_name_beats_an_alias_and_two_aliases_are_refused():
    real = PluginSet([entry("a", spec("x2", aliases=("x",))), entry("b", spec("x"))])
    assert resolve(real, "x", "cpu", None) == "b"
    twice = PluginSet([entry("a", spec("x2", aliases=("x",))), entry("b", spec("x3", aliases=("x",)))])
    with pytest.raises(BackendUnavailableError) as caught:
        resolve(twice, "x", "cpu", None)
    assert "x2 (a 1.0) and x3 (b 1.0)" in str(caught.value)


def test_unknown_names_list_registered_failed_and_installable():
    broken = PluginEntry(
        "b", "rlctl-b", "2.0", "b", Stage.DECLARED, CheckStatus.FAIL, ("ImportError: x", "OSError: y"), "do it"
    )
    with pytest.raises(BackendUnavailableError) as caught:
        require_backend("onee", "train", PluginSet([entry("a", spec("one")), broken]))
    text = str(caught.value)
    assert "registered: one (a 1.0)" in text
    assert "failed: b (rlctl-b 2.0) declared: ImportError: x <- OSError: y" in text
    ours = (
        "fsdp2 (pip install rlctl-plugin-fsdp), megatron (pip install rlctl-plugin-megatron), "
        "mindspeed_megatron (pip install rlctl-plugin-mindspeed), veomni (pip install rlctl-plugin-veomni)"
    )
    assert f"installable: {ours}" in text
    assert "did you mean one?" in text
    assert caught.value.next == "--backend one"


def test_a_failed_plugin_of_that_name_is_blamed_with_its_own_remedy():
    broken = PluginEntry("toy", "rlctl-toy", "2.0", "t", Stage.DECLARED, CheckStatus.FAIL, ("OSError: y",), "mend it")
    with pytest.raises(BackendUnavailableError) as caught:
        require_backend("toy", "train", PluginSet([broken]))
    assert "is installed (rlctl-toy 2.0) but does not load" in caught.value.what
    assert caught.value.next == "mend it"


def test_unmet_requirements_refuse_with_the_command():
    needy = spec("needy", requirements=("no-such-dist-here>=2",))
    with pytest.raises(BackendUnavailableError) as caught:
        require_backend("needy", "train", PluginSet([entry("a", needy)]))
    assert "no-such-dist-here is not installed" in caught.value.what
    assert caught.value.next == "pip install 'no-such-dist-here>=2'"


def test_a_disabled_first_party_plugin_is_said_to_be_off():
    off = PluginEntry("fsdp", "rlctl-plugin-fsdp", "0.1.0", "t", Stage.DISCOVERED, CheckStatus.SKIP)
    with pytest.raises(BackendUnavailableError, match="switched off") as caught:
        require_backend("fsdp2", "train", PluginSet([off]))
    assert caught.value.next == "unset RLCTL_DISABLE_PLUGINS"


@pytest.mark.parametrize("kind", ["train", "rollout"])
def test_the_other_kind_is_pointed_at_its_own_flag(kind):
    other = BackendKind.ROLLOUT if kind == "train" else BackendKind.TRAIN
    with pytest.raises(BackendUnavailableError, match=r"is a .* backend, not a .* one") as caught:
        require_backend("one", kind, PluginSet([entry("a", spec("one", kind=other))]))
    assert caught.value.next == ("--rollout one" if kind == "train" else "--backend one")


def test_every_backend_of_the_catalogue_is_refused_by_name():
    from rlctl import catalogue

    for known in catalogue.entries():
        for name in (known.spec.name, *known.spec.aliases):
            with pytest.raises(BackendUnavailableError) as caught:
                require_backend(name, known.spec.kind, PluginSet())
            assert repr(name) in caught.value.what
            assert "is not installed" in caught.value.what
            first = catalogue.find(name, known.spec.kind)
            assert first is not None
            assert caught.value.next == first.install


def test_missing_veomni_in_a_process_that_imports_neither_torch_nor_transformers(site):
    code = """
        import sys
        from rlctl.errors import BackendUnavailableError
        from rlctl.plugins import load_plugins
        from rlctl.registry import require_backend
        try:
            require_backend("veomni", "train", load_plugins())
        except BackendUnavailableError as error:
            print(error)
            print("exit code", error.exit_code)
        heavy = {"torch", "transformers", "pydantic", "numpy", "rich", "click"} & set(sys.modules)
        print("heavy", sorted(heavy))
        print("few", len(sys.modules) < 400)
    """
    done = site.python(code)
    assert done.returncode == 0, done.stderr
    assert "the training backend 'veomni' is not installed" in done.stdout
    assert "not released with rlctl" not in done.stdout
    assert "next:    pip install rlctl-plugin-veomni\n" in done.stdout
    assert "exit code 1" in done.stdout
    assert "heavy []" in done.stdout
    assert "few True" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


# ---- stage 4 --------------------------------------------------------------------------------------------------
def record(plugins: PluginSet, name: str) -> BackendRecord:
    return next(r for r in plugins.backends() if r.spec.name == name)


@pytest.mark.parametrize(
    ("name", "source", "found", "mend"),
    [
        (
            "chain1",
            "try:\n    raise ImportError('libhccl.so: cannot open shared object file')\n"
            "except ImportError as e:\n    raise RuntimeError('Failed to load the backend extension') from e\n",
            "ImportError: libhccl.so: cannot open shared object file",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        ),
        ("exit1", "raise SystemExit(7)", "SystemExit: the module called exit(7)", "pip install --upgrade rlctl-exit1"),
        ("miss1", "import no_such_lib.sub", "No module named 'no_such_lib'", "pip install no_such_lib"),
    ],
)
def test_an_engine_that_does_not_import_carries_its_whole_chain(here, name, source, found, mend):
    here.add_backend(name, source)
    plugins = load_plugins()
    with pytest.raises(BackendUnavailableError) as caught:
        create_engine(plugins, record(plugins, name), role="actor", settings={})
    assert caught.value.found is not None
    assert found in caught.value.found
    assert caught.value.next is not None
    assert caught.value.next.startswith(mend)
    assert caught.value.__cause__ is not None
    if name == "chain1":
        assert "RuntimeError: Failed to load the backend extension" in caught.value.details[0]
        assert caught.value.details[1].startswith("because ImportError")


def test_an_engine_that_lacks_hooks_says_which(here):
    here.add_backend("hollow")
    plugins = load_plugins()
    with pytest.raises(EngineError) as caught:
        create_engine(plugins, record(plugins, "hollow"), role="actor", settings={})
    assert "rlctl_forward_backward" in str(caught.value)


def test_own_errors_of_a_plugin_pass_unchanged(here):
    source = "from rlctl.errors import CapabilityError\nraise CapabilityError('no', next='buy one')\n"
    here.add_backend("owner1", source)
    plugins = load_plugins()
    with pytest.raises(RlctlError) as caught:
        create_engine(plugins, record(plugins, "owner1"), role="actor", settings={})
    assert (caught.value.what, caught.value.next) == ("no", "buy one")


ROLLOUT = """
    import os
    from rlctl.hookspecs import hookimpl

    ORDER = os.environ.pop("TINY_ORDER", "")


    class Hooks:
        @hookimpl
        def rlctl_build_mesh(self, topology, settings):
            return "mesh"

        @hookimpl
        def rlctl_engine_init(self, mesh, model, optimizer, forward_only):
            return "info"

        @hookimpl
        def rlctl_generate(self, request, on_done):
            return ["text"]

        @hookimpl
        def rlctl_load_weights(self, weights, version):
            return {}

        @hookimpl
        def rlctl_weight_fingerprint(self, names):
            return {"w": "plain"}
"""


def test_engine_is_built_after_its_process_is_prepared_and_others_wrap_it(here, caplog):
    here.add_backend("roll", ROLLOUT, "rollout", engine="'roll_engine:Hooks'", env="{'TINY_ENV': 'set'}")
    with (here.path / "roll_light.py").open("a") as file:
        file.write(
            "\nimport os\n\n\n@hookimpl\ndef rlctl_prepare_process(backend, config):\n"
            "    os.environ['TINY_ORDER'] = 'prepared'\n"
        )
    wrapper = (
        "from rlctl.hookspecs import hookimpl\n\n\nclass Wrap:\n    @hookimpl(wrapper=True)\n"
        "    def rlctl_weight_fingerprint(self, names):\n        inner = yield\n"
        "        return {k: 'wrapped ' + v for k, v in inner.items()}\n\n\n"
        "@hookimpl\ndef rlctl_engine_wrappers(backend, role):\n"
        "    return [('good', 'wrap_light:Wrap'), ('gone', 'wrap_light:Nothing')] if role == 'rollout' else []\n"
    )
    here.add("rlctl-wrap", "wrap", "wrap_light", wrap_light=wrapper)
    plugins = load_plugins()
    said: list[str] = []
    engine = create_engine(plugins, record(plugins, "roll"), role="rollout", settings={}, notice=said.append)
    assert engine.weight_fingerprint(["w"]) == {"w": "wrapped plain"}
    assert len(said) == 1
    assert "wrapper 'gone' of rlctl-wrap is left out: AttributeError" in said[0]
    import os
    import sys

    assert sys.modules["roll_engine"].ORDER == "prepared"
    assert os.environ.pop("TINY_ENV") == "set"
    plain = create_engine(plugins, record(plugins, "roll"), role="other", settings={})
    assert plain.weight_fingerprint(["w"]) == {"w": "plain"}


def test_a_text_in_the_place_of_a_name_does_not_flood_the_message() -> None:
    with pytest.raises(RlctlError) as refused:
        require_backend("x" * 5000, BackendKind.ROLLOUT, load_plugins())
    assert len(str(refused.value.what)) < 200
    assert "xxx..." in refused.value.what


# ---- vendors ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("devices", "environ", "wanted"),
    [
        # (device, vendor) before the device, before (cuda, nvidia).
        ((("cuda", "moonchip"), ("cuda", None), ("cuda", "nvidia")), {"RLCTL_DEVICE": "cuda", "RLCTL_VENDOR": "moonchip"}, 0),
        ((("cuda", "other"), ("cuda", None), ("cuda", "nvidia")), {"RLCTL_DEVICE": "cuda", "RLCTL_VENDOR": "moonchip"}, 1),
        ((("cuda", "other"), ("cuda", "nvidia")), {"RLCTL_DEVICE": "cuda", "RLCTL_VENDOR": "moonchip"}, 1),
        ((("npu", "marschip"), ("npu", "huawei")), {"RLCTL_DEVICE": "npu"}, 1),
        ((("npu", "marschip"), ("npu", "huawei")), {"RLCTL_DEVICE": "npu", "RLCTL_VENDOR": "marschip"}, 0),
        ((("npu", None), ("npu", "huawei")), {"RLCTL_DEVICE": "npu", "RLCTL_VENDOR": "marschip"}, 0),
        ((("npu", "huawei"), ("cuda", "nvidia")), {"RLCTL_DEVICE": "npu", "RLCTL_VENDOR": "marschip"}, None),
        ((("cuda", "nvidia"), ("cpu", None)), {"RLCTL_DEVICE": "cpu", "RLCTL_VENDOR": "moonchip"}, 1),
    ],
)  # fmt: skip
def test_the_variables_name_device_and_vendor_and_the_record_is_found(monkeypatch, devices, environ, wanted):
    from rlctl.device import detect_device

    for name in ("RLCTL_DEVICE", "RLCTL_VENDOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    plugins = PluginSet([entry(f"dist{i}", spec("fake", place)) for i, place in enumerate(devices)])
    found = detect_device()
    if wanted is None:
        with pytest.raises(BackendUnavailableError, match="no engine for npu/marschip"):
            resolve(plugins, "fake", found.type, found.vendor)
    else:
        assert resolve(plugins, "fake", found.type, found.vendor) == f"dist{wanted}"


# ---- owners that are there and cannot be used --------------------------------------------------------------------------------
def away() -> PluginSet:
    """One name of two dists; that of the npu lacks what it needs."""
    needs = spec(
        "mega",
        ("npu", "huawei"),
        requirements=("no-such-dist-here>=2",),
        remedies={"no-such-dist-here": "ask the vendor"},
    )
    return PluginSet([entry("here", spec("mega", ("cpu", None))), entry("there", needs)])  # fmt: skip


def test_the_owner_of_a_device_is_named_with_what_it_lacks():
    plugins = away()
    for ask in (
        lambda: resolve(plugins, "mega", "npu", "huawei"),
        lambda: require_device("mega", "train", plugins, "npu", "huawei"),
    ):
        with pytest.raises(BackendUnavailableError) as caught:
            ask()
        assert caught.value.what == "backend 'mega' on npu/huawei is there 1.0, which cannot be used here"
        assert caught.value.found == "no-such-dist-here is not installed, no-such-dist-here>=2 is required"
        assert caught.value.next == "ask the vendor"
    require_device("mega", "train", plugins, "cpu", None)
    require_device("mega", "train", plugins, "cuda", "nvidia")  # that nobody answers it is another message's matter
    assert resolve(plugins, "mega", "cpu", None) == "here"


def test_a_remedy_that_pip_has_not_follows_the_pip_command():
    from rlctl.remedy import for_import, for_requirements
    from rlctl.requirements import unmet_requirements

    unmet = unmet_requirements(("no-such-one>=1", "no_such.two", "no-such-three"))
    assert for_requirements(unmet, {"No-Such-Two": "make it yourself"}) == (
        "pip install 'no-such-one>=1' no-such-three; then make it yourself"
    )
    missing = Cause("ModuleNotFoundError", "No module named 'no_such.part'", "", "no_such.part")
    candidate = Candidate("p", "dist-p", "1.0", "p_light")
    assert for_import(candidate, [missing], (), {"no_such": "ask the vendor"}) == "ask the vendor"
    assert for_import(candidate, [missing], ()) == "pip install no_such"


def test_a_backend_whose_devices_are_not_here_is_passed_over_and_not_blamed(here, monkeypatch):
    fields = {"requirements": "('no-such-dist-here>=2',)", "devices": "(('npu', 'huawei'),)"}
    here.add_backend("faraway", **fields)
    found = next(e for e in load_plugins().entries if e.name == "faraway")
    assert (found.stage, found.status) == (Stage.COMPATIBLE, CheckStatus.SKIP)
    assert "no-such-dist-here is not installed" in found.cause[0]
    assert found.cause[1].startswith("it runs on npu only, and this machine shows none")
    assert load_plugins().warnings() == []
    report = run_doctor(["faraway"], quick=True, timeout_s=60)
    (row,) = report.backends
    assert (row.status, row.next) == (CheckStatus.SKIP, "pip install 'no-such-dist-here>=2'")
    assert report.exit_code() == 0
    monkeypatch.setenv("RLCTL_DEVICE", "npu")
    assert "no-such-dist-here" in load_plugins().warnings()[0]
    (row,) = run_doctor(["faraway"], quick=True, timeout_s=60).backends
    assert row.status is CheckStatus.FAIL

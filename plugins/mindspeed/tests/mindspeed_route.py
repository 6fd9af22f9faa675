"""One process on the route to an NPU, or on megatron's to the CPU. Started by test_mindspeed_route.py, with the doubles in sight.

Argument: what to do. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlctl import extensions

extensions.keep_from_loading()

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MOE: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"llama": (LLAMA, "language_model"), "values": (LLAMA, "value_model"), "experts": (MOE, "language_model")}
OPTIM = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5}


def prepare(device: str, **settings: Any) -> type:
    """The engine class of a device, its process prepared as a rank's is."""
    if device == "npu":
        from rlctl_mindspeed.plugin import rlctl_prepare_process

        rlctl_prepare_process(backend="megatron", config={"device": device, **settings})
        from rlctl_mindspeed.engine import MindSpeedEngine

        return MindSpeedEngine
    from rlctl_megatron.plugin import rlctl_prepare_process

    rlctl_prepare_process(backend="megatron", config={"device": device})
    from rlctl_megatron.engine import MegatronEngine

    return MegatronEngine


def three_steps(engine_class: type, device: str, name: str) -> dict[str, Any]:
    """Three AdamW steps, a checkpoint with the step after it in a new engine, and the export."""
    import torch

    from rlctl.batch import pack
    from rlctl.engine import Engine
    from rlctl.logits import LossOutput
    from rlctl.records import BackendKind
    from rlctl.topology import resolve

    config, head = MODELS[name]
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(2, 61, (n,), generator=generator) for n in (9, 4, 13, 8)]
    batch = pack({"input_ids": ids, "loss_mask": [torch.arange(len(i)) > 0 for i in ids]})
    batch = batch.with_items(item_weight=torch.full((batch.num_items,), 1 / batch.num_items))

    def loss(reader: Any, micro: Any) -> LossOutput:
        found = reader.values().square() if head == "value_model" else -reader.log_prob()
        return LossOutput((micro.items["item_weight"] * found).sum())

    def step(engine: Engine) -> tuple[float, float]:
        out = engine.forward_backward(list(batch.chunks(2)), loss, forward_only=False)
        return sum(o.loss for o in out), engine.optimizer_step().grad_norm

    def build() -> Engine:
        engine = Engine(engine_class(), BackendKind.TRAIN, "megatron")
        model = {"config": config, "seed": 3, "dtype": "float32", "model_type": head}
        info = engine.build(resolve(1, {}), {"device": device}, model, OPTIM, False)
        notes.update(info.notes)
        engine.set_mode(True)
        return engine

    notes: dict[str, str] = {}
    engine = build()
    assert engine.mesh is not None
    where = engine.mesh.device
    steps = [step(engine) for _ in range(3)]
    weights = {n: t.detach().double().cpu() for n, t in engine.export_weights()}
    with tempfile.TemporaryDirectory() as folder:
        engine.save_state(Path(folder))
        after = step(engine)
        engine.move("cpu", "model", "optimizer", "grad")
        engine.move(device, "model", "optimizer", "grad")
        engine.shutdown()
        again = build()
        again.load_state(Path(folder))
        resumed = step(again)
        again.shutdown()
    return {
        "device": where,
        "notes": notes,
        "steps": steps,
        "after": after,
        "resumed": resumed,
        "weights": {n: [float(t.sum()), float(t.abs().max()), list(t.shape)] for n, t in sorted(weights.items())},
    }


def adaptor() -> Any:
    return sys.modules["mindspeed.megatron_adaptor"]


def refusal(action: Any) -> dict[str, Any]:
    from rlctl.errors import RlctlError

    try:
        action()
    except RlctlError as error:
        return {"error": type(error).__name__, "what": error.what, "found": error.found, "next": error.next}
    return {}


def main(what: str) -> dict[str, Any]:
    if what in ("npu", "cpu"):
        engine_class = prepare(what)
        before = {"before": adaptor().order} if what == "npu" else {}
        return {**before, **{name: three_steps(engine_class, what, name) for name in MODELS}}
    if what == "order: torch, transformers and megatron's plugin first":
        import torch  # noqa: F401
        import transformers  # noqa: F401

        import rlctl_megatron.config
        import rlctl_megatron.plugin  # noqa: F401
    elif what == "order: megatron-core first":
        import megatron.core.models.gpt  # noqa: F401

        return refusal(lambda: prepare("npu"))
    elif what == "settings":
        sys.argv = ["rlctl", "--tensor-model-parallel-size", "8"]
        prepare("npu", mindspeed_args={"use_flash_attn": True})
        prepare("npu", mindspeed_args={"use_flash_attn": True})
        other = refusal(lambda: prepare("npu", mindspeed_args={"use_flash_attn": False}))
        return {
            "argv": [adaptor().argv[0], *adaptor().argv[1:]],
            "kept": sys.argv[1:],
            "repatched": adaptor().repatched,
            "other": other,
        }
    engine_class = prepare("npu")
    prepare("npu")  # again: nothing happens twice
    found = three_steps(engine_class, "npu", "llama")
    return {
        "before": adaptor().order,
        "steps": found["steps"],
        "weights": found["weights"],
        "repatched": adaptor().repatched,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))

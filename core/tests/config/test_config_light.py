"""Loading a configuration imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "transformers", "numpy", "pyarrow", "datasets", "matplotlib")

CODE = """
import sys
from rlctl.config import load, migrate, json_schema, recipes
from rlctl.plugins import load_plugins
from rlctl.errors import RlctlError
plugins = load_plugins()
try:
    load.load_config(sys.argv[1], ["trainer.seed=1", "nonsense=2"], plugins=plugins)
except RlctlError as error:
    print(error)
json_schema.json_schema(plugins)
migrate.migrate("trainer: {nnodes: 1}", "x.yaml")
print("heavy:", sorted(set(sys.argv[2:]) & set(sys.modules)))
"""


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: {path: org/tiny}\ndata: {task: {name: sort_digits}}\ntrainer: {type: sft}\n")
    done = subprocess.run([sys.executable, "-c", CODE, str(run), *HEAVY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "nonsense" in done.stdout
    assert done.stdout.splitlines()[-1] == "heavy: []"

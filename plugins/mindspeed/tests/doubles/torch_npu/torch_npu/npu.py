"""``torch.npu`` of the double: one device for each local rank, its memory and random state the CPU's."""

import os

import torch

rlctl_simulated = True
_current = 0


def is_available():
    return True


def device_count():
    return int(os.environ.get("DOUBLE_NPU_COUNT", "2"))


def current_device():
    return _current


def set_device(device):
    global _current
    _current = device if isinstance(device, int) else torch.device(device).index or 0


def get_device_name(device=None):
    return "Ascend double (CPU)"


def get_device_properties(device=None):
    return type("Properties", (), {"name": get_device_name(), "uuid": f"double-{_current}"})()


def synchronize(device=None): ...
def empty_cache(): ...
def reset_peak_memory_stats(device=None): ...


def memory_allocated(device=None):
    return 0


def max_memory_allocated(device=None):
    return 0


def get_rng_state(device=None):
    return torch.get_rng_state()


def set_rng_state(state, device=None):
    torch.set_rng_state(state)


def manual_seed(seed):
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed):
    """torch.manual_seed calls it once its own generator, which is this one, has the seed."""


def is_initialized():
    return True


def _is_in_bad_fork():
    return False


class Stream:
    """Its work is done when a call returns."""

    def __init__(self, *_, **__): ...
    def wait_stream(self, *_): ...
    def wait_event(self, *_): ...
    def synchronize(self): ...
    def record(self, *_): ...
    def wait(self, *_): ...
    def record_event(self, *_):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_): ...


Event = Stream


def current_stream(*_):
    return Stream()


default_stream = current_stream


def stream(of=None):
    return of if of is not None else Stream()

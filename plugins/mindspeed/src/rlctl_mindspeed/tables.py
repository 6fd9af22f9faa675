"""Which torch, torch_npu and CANN belong together, and which packages of the index are no packages. Data with its source."""

from __future__ import annotations

TABLE_SOURCE = "README of Ascend Extension for PyTorch (torch_npu 2.13.0, and gitcode.com/Ascend/pytorch)"
CANN_OF: dict[str, tuple[str, ...]] = {
    "2.4.0": ("8.0.RC3",),
    "2.4.0.post2": ("8.0.0",),
    "2.4.0.post4": ("8.1.RC1",),
    "2.5.1": ("8.1.RC1",),
    "2.5.1.post1": ("8.2.RC1",),
    "2.6.0": ("8.2.RC1",),
    "2.6.0.post3": ("8.3.RC1",),
    "2.6.0.post5": ("8.5.0",),
    "2.7.1": ("8.3.RC1",),
    "2.7.1.post2": ("8.5.0",),
    "2.7.1.post4": ("9.0.0",),
    "2.8.0": ("8.3.RC1",),
    "2.8.0.post2": ("8.5.0",),
    "2.8.0.post4": ("9.0.0",),
    "2.9.0": ("8.5.0",),
    "2.9.0.post2": ("9.0.0",),
    "2.10.0": ("9.0.0",),
    "2.10.0rc2": ("8.5.0",),
    "2.11.0rc1": ("8.5.0",),
    "2.12.0rc1": ("8.5.0",),
}
"""Release of torch_npu -> releases of CANN that it was made for. Its first three numbers are those of its torch. Releases that the
source does not list are not here, and nothing is said of them."""

MINDSPEED_ROUTE = (
    "git clone -b core_r0.12.1 https://gitcode.com/Ascend/MindSpeed.git && pip install -e MindSpeed "
    "(the package mindspeed on PyPI is a placeholder that refuses to install)"
)
CANN_ROUTE = (
    "install the CANN toolkit and kernels from https://www.hiascend.com/cann (and the driver, which npu-smi shows)"
)
PLACEHOLDERS: dict[str, tuple[str, str]] = {
    "mindspeed": ("0.0.1.dev1", MINDSPEED_ROUTE),
    "ascend-cann-toolkit": ("0.0.1.dev1", CANN_ROUTE),
}
"""Distribution of PyPI that holds the vendor's name and no code -> (its release, where the real one is)."""
MINDSPEED_CORE = {"0.12": ">=0.12.1,<0.13"}
"""Series of MindSpeed -> the megatron-core that it patches."""

"""``rlctl doctor``: what is installed, what loads, why something does not, and the command that mends it. All as data.

No plugin code runs in this process: every light module, check and backend is tried in a child of its own.
"""

from rlctl.doctor.report import BackendReport, DoctorError, DoctorReport
from rlctl.doctor.run import DEFAULT_TIMEOUT_S, run_doctor

__all__ = ["DEFAULT_TIMEOUT_S", "BackendReport", "DoctorError", "DoctorReport", "run_doctor"]

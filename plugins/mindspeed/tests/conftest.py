"""Makes the helpers next to the tests importable under importlib import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
